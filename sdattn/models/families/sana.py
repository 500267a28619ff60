"""Sana and SanaSprint: linear attention over the image, cross-attention to Gemma."""

import math
from functools import cached_property

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ..denoiser_call import Timestep, grid_of_patches
from ..encoders import TextCall, cleaned, refuse_unknown
from ..family import IN_TURN, NEGATIVE_FIRST, Family
from ..pipeline import Given, Model


def read_sana(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Gemma after an instruction; its start is kept, and as much of its end as fits. Source:
    pipeline_sana.py, ``_get_gemma_prompt_embeds`` and ``encode_prompt``."""
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


class SprintTimestep(Timestep):
    """SanaSprint's timestep: its scheduler has angles ``a`` in [0, pi / 2], and the model gets
    ``sin a / (cos a + sin a)``. Source: pipeline_sana_sprint.py, ``__call__``."""

    @cached_property
    def _read(self) -> float:
        given = super()._read
        return math.atan2(given, 1 - given)


class Sana(Family):
    """Sana, and SanaSprint, which has the same class with an embedding of the guidance."""

    def timestep(self, model: Model, given: Given) -> Timestep:
        if model.config.guidance_embeds:
            return SprintTimestep(given["timestep"])
        return Timestep(given["timestep"], 1 / getattr(model.config, "timestep_scale", 1.0))


FAMILY = Sana(
    name="Sana",
    denoisers=("SanaTransformer2DModel",),
    layers={
        "transformer_blocks.*.attn1": ("block", "linear"),
        "transformer_blocks.*.attn2": ("block", "cross"),
    },
    grid=grid_of_patches,
    readers={"Sana": read_sana, "SanaWM": refuse_unknown},
    guidance={
        **dict.fromkeys(("SanaPipeline", "SanaControlNetPipeline"), NEGATIVE_FIRST),
        # distilled: the guidance is an input of the model
        **dict.fromkeys(("SanaSprintPipeline", "SanaSprintImg2ImgPipeline"), IN_TURN),
    },
    text_options=("max_sequence_length", "clean_caption", "complex_human_instruction"),
)
