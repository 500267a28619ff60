"""Bria 3: FLUX.1's joint attention with T5."""

from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..encoders import TextCall, refuse_unknown, zero_filled
from ..family import NEGATIVE_FIRST
from .flux import flux_like


def read_bria(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read T5, each prompt alone, then zeros. Source: pipeline_bria.py,
    ``_get_t5_prompt_embeds``."""
    tokenizer, length = call.pipe.tokenizer, call.length()
    read = [
        read_source(tokenizer, Source.of(text), truncation=True, max_length=length)
        for text in texts
    ]
    return zero_filled(read, length)


FAMILY = flux_like(
    name="Bria",
    denoisers=("BriaTransformer2DModel",),
    timestep_unit=1.0,
    patch=1,  # the pipeline counts the cells of 2x2 that it packs
    readers={"Bria": read_bria, "BriaFibo": refuse_unknown},
    guidance={"BriaPipeline": NEGATIVE_FIRST},
)
