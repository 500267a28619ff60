"""Z-Image and Z-Image-Turbo: one stream of joint attention, the image and then the caption, each
row with its own length; prompts inside a chat."""

from collections.abc import Sequence

from ...attention.joint_processor import Spans
from ...errors import InvalidTypeError
from ...prompts.tokens import Prompt
from ..encoders import PLACEHOLDER, TextCall, in_chat, read_inside, refuse_unknown, zero_filled
from ..family import Family, Guidance
from ..parts import Names
from ..pipeline import Given, Model

UNIT = 32  # tokens: image and caption are filled up to multiples (SEQ_MULTI_OF)


def read_z_image(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3's chat format without its padding; the model pads each row to a multiple of 32
    tokens, and the map to the longest row. Source: pipeline_z_image.py, ``_encode_prompt``;
    transformer_z_image.py, ``patchify_and_embed``."""
    tokenizer, most = call.pipe.tokenizer, call.option("max_sequence_length")
    inside = in_chat(tokenizer, enable_thinking=True)
    before, _, after = inside(PLACEHOLDER).text.partition(PLACEHOLDER)
    # The pipeline replaces prompts in a list by their rendered form.
    bare = [text.removeprefix(before).removesuffix(after) for text in texts]
    read = read_inside(tokenizer, map(inside, bare), truncation=True, max_length=most)
    longest = max(_filled(len(prompt.tokens)) for prompt in read)
    columns = longest if call.columns is None else call.columns
    if columns < longest or columns % UNIT:
        raise call.unexplained(
            f"`max_sequence_length={most!r}` makes {longest} of {texts}, or more where another "
            "text is longer"
        )
    return zero_filled(read, columns)


def _filled(tokens: int) -> int:
    return tokens + -tokens % UNIT


def _grid(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of latents ``[C, frames, rows, cols]``, one per row; refuse several."""
    if isinstance(given["x"][0], list):
        raise InvalidTypeError(
            "Z-Image Omni puts captions, several images and SigLIP's view of them after "
            "each other in a row, and which tokens are the words' is not known. Text-to-image "
            "pipelines of Z-Image can be watched."
        )
    frames, rows, cols = given["x"][0].shape[1:]
    patch = given.get("patch_size", 2)
    return frames // given.get("f_patch_size", 1), rows // patch, cols // patch


def _spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    start = _filled(cells)
    lengths = (_filled(len(caption)) for caption in given["cap_feats"])
    return [(slice(0, cells), slice(start, start + length)) for length in lengths]


_PIPELINES = """
ZImagePipeline ZImageImg2ImgPipeline ZImageInpaintPipeline ZImageControlNetPipeline
ZImageControlNetInpaintPipeline
"""

FAMILY = Family(
    name="Z-Image",
    denoisers=("ZImageTransformer2DModel",),
    layers={
        "noise_refiner.*.attention": ("block", "self"),
        "context_refiner.*.attention": ("block", "text"),
        "layers.*.attention": ("single", "joint"),
    },
    joined="image first",
    grid=_grid,
    spans=_spans,
    timestep_unit=-1000.0,
    timestep_start=1000.0,
    patch=2,
    readers={"ZImage": read_z_image, "ZImageOmni": refuse_unknown},
    # cfg_truncation ends the guidance in the middle of a run, or before its first step
    guidance=dict.fromkeys(
        _PIPELINES.split(), Guidance(("conditional", "unconditional"), known_by="truncation")
    ),
    names=Names(latents="x", timestep=("t",), text=""),
    preset="joint",
)
