"""Chroma: FLUX.1's joint attention without CLIP, with a mask over T5's padding."""

from ...prompts.tokens import Prompt
from ..encoders import TextCall, read_t5
from ..family import IN_TURN
from .flux import flux_like


def read_chroma(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read T5. Source: pipeline_chroma.py, ``_get_t5_prompt_embeds``."""
    return read_t5(call, texts, most=512)


FAMILY = flux_like(
    name="Chroma",
    denoisers=("ChromaTransformer2DModel",),
    readers={"Chroma": read_chroma},
    guidance=dict.fromkeys(
        ("ChromaPipeline", "ChromaImg2ImgPipeline", "ChromaInpaintPipeline"), IN_TURN
    ),
)
