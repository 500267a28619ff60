"""Chroma: FLUX.1's joint attention without CLIP, with a mask over T5's padding."""

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ..attention_layer import DOUBLE_THEN_SINGLE
from ..denoiser_call import grid_of_ids
from ..encoders import TextCall
from ..family import IN_TURN, Family


def read_chroma(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read T5. Source: pipeline_chroma.py, ``_get_t5_prompt_embeds``."""
    tokenizer, options = call.pipe.tokenizer, filled(call.length(most=512))
    return [read_source(tokenizer, call.source(tokenizer, text), **options) for text in texts]


FAMILY = Family(
    name="Chroma",
    denoisers=("ChromaTransformer2DModel",),
    layers=DOUBLE_THEN_SINGLE,
    joined="text first",
    grid=grid_of_ids,
    grid_argument="img_ids",
    timestep_unit=1000.0,
    patch=2,  # cut by the pipelines; the model's own patches are of 1
    size_unit=16,
    half="bfloat16",
    readers={"Chroma": read_chroma},
    preset="joint",
    guidance=dict.fromkeys(
        ("ChromaPipeline", "ChromaImg2ImgPipeline", "ChromaInpaintPipeline"), IN_TURN
    ),
)
