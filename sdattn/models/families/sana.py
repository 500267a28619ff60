"""Sana: linear attention over the picture, cross-attention to Gemma."""

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall, cleaned, refuse_unknown
from ..family import NEGATIVE_FIRST, Family


def read_sana(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Gemma behind an instruction, of which the start and what the length leaves of its end are
    kept. Source: pipeline_sana.py, ``_get_gemma_prompt_embeds`` and ``encode_prompt``."""
    tokenizer, length = call.pipe.tokenizer, call.length()
    lines = None if call.negative else call.option("complex_human_instruction")
    if not lines:
        options = {**filled(length), "padding_side": "right"}
        return [read_source(tokenizer, cleaned(call, text), **options) for text in texts]
    instruction = "\n".join(lines)
    options = filled(len(tokenizer.encode(instruction)) + length - 2)
    return [
        read_source(
            tokenizer,
            cleaned(call, text).within(instruction, ""),
            keep=lambda n: [0, *range(n - length + 1, n)],
            padding_side="right",
            **options,
        )
        for text in texts
    ]


FAMILY = Family(
    name="Sana",
    half="bfloat16",
    denoisers=("SanaTransformer2DModel",),
    layers={
        "transformer_blocks.*.attn1": ("block", "linear"),
        "transformer_blocks.*.attn2": ("block", "cross"),
    },
    grid=grid_of_patches,
    size_unit=32,
    readers={"Sana": read_sana, "SanaWM": refuse_unknown},
    guidance=dict.fromkeys(("SanaPipeline", "SanaControlNetPipeline"), NEGATIVE_FIRST),
    text_options=("max_sequence_length", "clean_caption", "complex_human_instruction"),
)
