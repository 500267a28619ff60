"""Further rows of the support matrix with cross-attention."""

from typing import Any

from diffusers import SanaSprintPipeline, SCMScheduler

from helpers.rows import Options, Row, Way
from helpers.transformer_rows import SANA, sana, with_instruction


def sprint() -> Any:
    return sana(SanaSprintPipeline, scheduler=SCMScheduler(), guidance_embeds=True)


def without_negative(pipe: Any, way: Way) -> Options:
    return {**with_instruction(pipe, way), "negative_prompt": None}


CROSS = (Row("SanaSprint", sprint, without_negative, **{**SANA, "prompt_rows": None}),)
