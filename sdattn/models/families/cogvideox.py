"""CogVideoX (Yang et al. 2024): videos as one sequence, joint attention with T5, the text first."""

from ..denoiser_call import grid_of_patches
from ..encoders import read_t5
from ..family import NEGATIVE_FIRST_IN_CALL, Family
from ..pipeline import Given, Model


def _grid(model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of a latent ``[B, frames, C, rows, cols]``; CogVideoX 1.5 joins frames."""
    return grid_of_patches(model, {"hidden_states": given["hidden_states"].transpose(1, 2)})


def _fps(model: Model) -> int:
    """Return the frame rate of CogVideoX 1.5 or of 1.0 (source: model cards)."""
    return 16 if model.config.patch_size_t else 8


_PIPELINES = """
CogVideoXPipeline CogVideoXImageToVideoPipeline CogVideoXVideoToVideoPipeline
CogVideoXFunControlPipeline
"""

FAMILY = Family(
    name="CogVideoX",
    denoisers=("CogVideoXTransformer3DModel",),
    layers={"transformer_blocks.*.attn1": ("double", "joint")},
    joined="text first",
    grid=_grid,
    video=True,
    fps=_fps,
    frame_unit=2,  # its VAE decodes two at a time, and of an even number makes three more
    half="float16",
    readers={"CogVideoX": read_t5},
    # The call decides from the guidance scale at the beginning of a run, which then changes.
    guidance=dict.fromkeys(_PIPELINES.split(), NEGATIVE_FIRST_IN_CALL),
)
