"""LTX-Video: films as one sequence, cross-attention to T5."""

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..encoders import TextCall, refuse_unknown
from ..family import NEGATIVE_FIRST, Family


def read_ltx(call: TextCall, texts: list[str]) -> list[Prompt]:
    """T5, filled up. Source: pipeline_ltx.py, ``_get_t5_prompt_embeds``."""
    tokenizer, options = call.pipe.tokenizer, filled(call.length())
    return [read_source(tokenizer, Source.of(text), **options) for text in texts]


FAMILY = Family(
    name="LTX-Video",
    denoisers=("LTXVideoTransformer3DModel",),
    layers={
        "transformer_blocks.*.attn1": ("block", "self"),
        "transformer_blocks.*.attn2": ("block", "cross"),
    },
    grid=lambda _model, given: (given["num_frames"], given["height"], given["width"]),
    film=True,
    patch=1,
    size_unit=32,
    half="bfloat16",
    readers={"LTX": read_ltx, "LTX2": refuse_unknown},
    guidance={"LTXPipeline": NEGATIVE_FIRST},
)
