"""LTX-Video: films as one sequence, cross-attention to T5."""

from ..encoders import read_t5
from ..family import NEGATIVE_FIRST, Family

FAMILY = Family(
    name="LTX-Video",
    denoisers=("LTXVideoTransformer3DModel",),
    layers={
        "transformer_blocks.*.attn1": ("block", "self"),
        "transformer_blocks.*.attn2": ("block", "cross"),
    },
    grid=lambda _model, given: (given["num_frames"], given["height"], given["width"]),
    film=True,
    fps=25,
    patch=1,
    size_unit=32,
    half="bfloat16",
    readers={"LTX": read_t5},
    guidance={"LTXPipeline": NEGATIVE_FIRST},
)
