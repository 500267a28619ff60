"""The rows of the support matrix whose denoiser is a transformer."""

from functools import partial
from typing import Any

import torch
from diffusers import FlowMatchHeunDiscreteScheduler, Flux2Pipeline

from helpers.rows import Options, Row, Way, also_images, in_turn, short, sized
from helpers.tiny_pipelines import by_default, tiny
from helpers.tiny_pipelines import own_norms as own_norms

sd3 = by_default("StableDiffusion3Pipeline")
flux = by_default("FluxPipeline")
flux2 = by_default("Flux2Pipeline")
klein = by_default("Flux2KleinPipeline")
qwen_image = by_default("QwenImagePipeline")
pixart = by_default("PixArtAlphaPipeline")
sana = by_default("SanaPipeline")
flux_options = partial(in_turn, max_sequence_length=24)
unbinned = partial(short, use_resolution_binning=False)
with_instruction = partial(unbinned, complex_human_instruction=["Paint:"])


def kontext(pipe: Any, way: Way) -> Options:
    image = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    options = {**flux_options(pipe, way), "image": image, "_auto_resize": False}
    return {**options, "max_area": way.size[0] * way.size[1]}  # it fits sizes into an area


def without_negative(pipe: Any, way: Way) -> Options:
    length = 160 if isinstance(pipe, Flux2Pipeline) else 24  # its system message is long
    return sized(pipe, way, max_sequence_length=length, negative_prompt=None)


PATCHES: Options = {"unit": 16, "cell": 16}
SD3: Options = {**PATCHES, "joint": "image first", "layers": 3, "processors": ("fused",)}
FLUX: Options = {**PATCHES, "joint": "text first", "n_text": 24, "layers": 4}
FLUX |= {"prompt_rows": None, "processors": ("fused",)}
CROSS: Options = {**PATCHES, "layers": 2}
CROSS |= {"processors": ("AttnProcessor", "TorchAttnProcessor", "fused")}
SANA: Options = {"layers": 2, "unit": 32, "cell": 2, "processors": ()}
HALF = {"num_inference_steps": 4}  # of which half are run

TRANSFORMERS = (
    Row("Stable Diffusion 3", sd3, short, **SD3),
    Row(
        "Stable Diffusion 3 without T5",
        partial(sd3, text_encoder_3=None, tokenizer_3=None),
        short,
        **SD3,
    ),
    Row(
        "Stable Diffusion 3.5 (dual attention, normed)",
        partial(sd3, dual_attention_layers=(0, 1), qk_norm="rms_norm"),
        short,
        **{**SD3, "processors": ()},  # diffusers' fused processor does not know dual attention
    ),
    Row(
        "Stable Diffusion 3, second-order scheduler",
        lambda: sd3(scheduler=FlowMatchHeunDiscreteScheduler()),
        short,
        **SD3,
    ),
    Row(
        "Stable Diffusion 3, image to image",
        partial(tiny, "StableDiffusion3Img2ImgPipeline"),
        also_images(short, **HALF),
        **SD3,
    ),
    Row("FLUX.1", flux, flux_options, in_turn=True, **FLUX),
    Row(
        "FLUX.1, image to image",
        partial(tiny, "FluxImg2ImgPipeline"),
        also_images(flux_options, **HALF),
        in_turn=True,
        **FLUX,
    ),
    Row("FLUX.1 Kontext", partial(tiny, "FluxKontextPipeline"), kontext, in_turn=True, **FLUX),
    Row("FLUX.2", flux2, without_negative, **{**FLUX, "n_text": 160}),
    Row("FLUX.2 klein", klein, without_negative, in_turn=True, **FLUX),
    Row("Qwen-Image", qwen_image, in_turn, in_turn=True, **{**FLUX, "n_text": None, "layers": 2}),
    Row("PixArt Alpha", pixart, unbinned, **CROSS),
    Row("PixArt Sigma", partial(tiny, "PixArtSigmaPipeline"), unbinned, **CROSS),
    Row("Sana", sana, with_instruction, **SANA),
    Row(
        "Sana (normed across heads)",
        partial(sana, qk_norm="rms_norm_across_heads"),
        with_instruction,
        **SANA,
    ),
)
