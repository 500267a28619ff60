"""LTX-Video: videos as one sequence, cross-attention to T5."""

from ..denoiser_call import grid_of_places
from ..encoders import read_t5
from ..family import NEGATIVE_FIRST, Family
from ..pipeline import Given, Model


def _grid(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of a sequence of latents, from its sizes or its cells' positions ``[B, 3,
    N]``; raise ValueError if it begins with frames that the video continues from."""
    coordinates = given.get("video_coords")
    if coordinates is None:
        return given["num_frames"], given["height"], given["width"]
    advice = (
        "The cells of given frames that are not the first come before the video's: give the video "
        "its first frame alone."
    )
    return grid_of_places("video_coords", coordinates[0].float().T, advice)


FAMILY = Family(
    name="LTX-Video",
    denoisers=("LTXVideoTransformer3DModel",),
    layers={
        "transformer_blocks.*.attn1": ("block", "self"),
        "transformer_blocks.*.attn2": ("block", "cross"),
    },
    grid=_grid,
    grid_argument="video_coords",
    video=True,
    fps=25,
    patch=1,
    readers={"LTX": read_t5},
    guidance=dict.fromkeys(
        ("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"), NEGATIVE_FIRST
    ),
)
