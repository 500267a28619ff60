"""FLUX.2, FLUX.2 klein and FLUX.3: joint attention; prompts inside a chat."""

from torch import Tensor

from ...errors import InvalidValueError
from ...prompts.tokens import Prompt
from ..denoiser_call import grid_of_ids
from ..encode_prompt import read_each_encoded, read_encoded
from ..encoders import TextCall
from ..family import Family
from ..parts import IN_TURN, Edits, ImageLatents, vae_latents
from ..pipeline import Pipeline
from .flux import flux_like

UPSAMPLER = "prompt_upsampler"  # the block that replaces the prompt with a caption


def _encode(pipe: Pipeline, pixels: Tensor) -> Tensor:
    """Encode to patches of 2x2 cells, ``[B, 4 C, rows / 2, cols / 2]``, normalised by the VAE's
    batch norm (pipeline_flux2.py, ``_encode_vae_image``)."""
    latents = pipe._patchify_latents(vae_latents(pipe.vae, pixels))
    norm = pipe.vae.bn
    deviation = (norm.running_var + pipe.vae.config.batch_norm_eps).sqrt()
    return (latents - norm.running_mean[:, None, None]) / deviation[:, None, None]


def read_flux3(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read prompts that no block of the pipeline will replace; after a run the caption is known,
    and read."""
    if call.columns is None and UPSAMPLER in call.pipe.blocks.sub_blocks:
        raise InvalidValueError(
            f"The {UPSAMPLER} of this {type(call.pipe).__name__} replaces the prompt with a "
            "caption before it is read. Build the pipeline from blocks without it, "
            f'blocks.sub_blocks.pop("{UPSAMPLER}"), or run it inside capture(): store.heatmaps() '
            "has the caption's words."
        )
    return read_each_encoded(call, texts)


_FLUX2 = "Flux2Pipeline Flux2KleinPipeline Flux2KleinInpaintPipeline Flux2ModularPipeline"

FAMILIES = (
    flux_like(
        name="FLUX.2",
        denoisers=("Flux2Transformer2DModel",),
        readers={"Flux2": read_encoded},
        text_stream=lambda model, states: model.context_embedder(states),
        guidance=dict.fromkeys(_FLUX2.split(), IN_TURN),
        image_latents=ImageLatents(
            # Flux2Pipeline's guidance_scale is an input of the model, which keeps its default
            pipelines={"Flux2Pipeline": {}, "Flux2KleinPipeline": {"guidance_scale": 1.0}},
            encode=_encode,
            noise="flow",
        ),
        # SD3's times
        edits=Edits(pipelines=("Flux2Pipeline", "Flux2KleinPipeline"), cross=0.3, self_=0.3),
    ),
    # Each mode attends to itself, then text and image to each other.
    Family(
        name="FLUX.3",
        denoisers=("Flux3Transformer2DModel",),
        layers={
            "txt_mode_blocks.*.attn": ("block", "text"),
            "mode_blocks.image.*.attn": ("block", "self"),
            "mode_blocks.image_cond.*.attn": ("block", "control"),
            "single_transformer_blocks.*.attn": ("single", "joint"),
        },
        joined="text first",
        grid=grid_of_ids,
        grid_argument="img_ids",
        timestep_unit=1000.0,
        patch=2,  # cut by the pipelines
        readers={"Flux3": read_flux3},
        guidance={"Flux3DistilledModularPipeline": IN_TURN},  # the other has a guider
        preset="joint",
    ),
)
