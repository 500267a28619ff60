"""FLUX.1, Kontext, Fill and relatives: joint attention in blocks of two streams, then of one."""

from functools import partial

from ...prompts.tokens import Prompt
from ..attention_layer import DOUBLE_THEN_SINGLE
from ..denoiser_call import grid_of_ids
from ..encoders import TextCall, read_t5, refuse_unknown
from ..family import IN_TURN, Family
from ..parts import Edits, ImageLatents, packed, shifted_latents


def read_flux(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read T5; CLIP gives one pooled vector. Source: pipeline_flux.py,
    ``_get_t5_prompt_embeds``."""
    return read_t5(call, texts, call.pipe.tokenizer_2, most=512)


# A family of FLUX.1's architecture
flux_like = partial(
    Family,
    layers=DOUBLE_THEN_SINGLE,
    joined="text first",
    grid=grid_of_ids,
    grid_argument="img_ids",
    timestep_unit=1000.0,
    patch=2,  # cut by the pipelines; the model's own patches are of 1
    preset="joint",
)
_PIPELINES = """
FluxPipeline FluxImg2ImgPipeline FluxInpaintPipeline FluxFillPipeline FluxControlPipeline
FluxControlImg2ImgPipeline FluxControlInpaintPipeline FluxControlNetPipeline
FluxControlNetImg2ImgPipeline FluxControlNetInpaintPipeline FluxKontextPipeline
FluxKontextInpaintPipeline FluxModularPipeline
"""

FAMILY = flux_like(
    name="FLUX.1",
    denoisers=("FluxTransformer2DModel",),
    readers={"Flux": read_flux, "FluxPriorRedux": refuse_unknown},
    text_stream=lambda model, states: model.context_embedder(states),
    guidance=dict.fromkeys(_PIPELINES.split(), IN_TURN),
    text_argument="prompt_2",  # T5's; CLIP gives no columns
    image_latents=ImageLatents(
        # guidance_scale is an input of the model, which keeps its default
        pipelines={"FluxPipeline": {"true_cfg_scale": 1.0}},
        encode=lambda pipe, pixels: packed(pipe, shifted_latents(pipe, pixels)),
        noise="flow",
    ),
    # The times are SD3's. The layers that matter are at both ends (Avrahami et al. 2024, "Stable
    # Flow"), so that all take part.
    edits=Edits(pipelines=("FluxPipeline",), cross=0.3, self_=0.3),
)
