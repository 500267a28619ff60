"""Pipelines that are edited, one for each kind of attention and each layout of guidance."""

import torch

from helpers.flow_pipelines import flow_pipeline
from helpers.tiny_pipelines import (
    make_sdxl_pipeline,
    make_unet,
    small_pipeline,
    tiny_text_encoder,
)
from helpers.transformer_rows import own_norms
from sdattn.control.registration import register_attention_control
from sdattn.models.denoiser import find_denoiser
from sdattn.models.families import edits_of

SOURCE, TARGET = "a red cat", "a red dog"
OFF = {"cross_replace_steps": 0.0, "self_replace_steps": 0.0}
FAST = {"num_inference_steps": 3, "height": 64, "width": 96}
CFG = {"guidance_scale": 4.0}
TURNS = {"true_cfg_scale": 4.0, "negative_prompt": "o"}


def make_sd2_pipeline():
    """SD 2.x: heads by width, linear projections, a wider text encoder, v-prediction."""
    unet = make_unet(
        attention_head_dim=(2, 4, 4, 4), use_linear_projection=True, cross_attention_dim=64
    )
    pipe = small_pipeline(unet=unet, text_encoder=tiny_text_encoder(width=64))
    pipe.scheduler.register_to_config(prediction_type="v_prediction")
    return pipe


# By name: how the pipeline is made, or the name of a flow's, and what decides on its guidance.
UNETS = {
    "SD": (small_pipeline, CFG),
    "SDXL": (make_sdxl_pipeline, CFG),
    "SD 2": (make_sd2_pipeline, CFG),
}
JOINT = {
    "SD3": ("SD3", CFG),
    "FLUX, true CFG": ("FLUX.1", TURNS),
    "SD3 without guidance": ("SD3", {"guidance_scale": 1.0}),
    "FLUX, distilled": ("FLUX.1", {"guidance_scale": 3.5}),
    "FLUX.2": ("FLUX.2", {}),
    "FLUX.2 klein, in turn": ("FLUX.2 klein", CFG),
    "Qwen-Image, in turn": ("Qwen-Image", TURNS),
}
IN_TURN = ("FLUX, true CFG", "FLUX.2 klein, in turn", "Qwen-Image, in turn")


def made(name, **schedule):
    """A pipeline whose attention is uneven, and the options of its calls."""
    kind, guidance = {**UNETS, **JOINT}[name]
    if name in UNETS:
        return kind(), {**guidance, **FAST}
    pipe, options = flow_pipeline(kind, **schedule)
    own_norms(pipe.transformer)
    if kind == "SD3":
        for layer in find_denoiser(pipe).layers:
            layer.module.to_q.weight.data *= 4
    return pipe, {**options, **guidance, **FAST}


def drawn(pipe, prompts, options):
    generators = [torch.Generator().manual_seed(0) for _ in prompts]
    negative = options.get("negative_prompt")
    more = {} if negative is None else {"negative_prompt": [negative] * len(prompts)}
    return pipe(prompt=prompts, generator=generators, **{**options, **more}).images


def layers_of(pipe):
    return edits_of(pipe).layers(find_denoiser(pipe).layers)


def opened(pipe, prompts, options):
    """The images of a batch through the processors of an edit, with no controller."""
    with register_attention_control(pipe, None, layers=layers_of(pipe)):
        return drawn(pipe, prompts, options)


def same(images, others):
    return [a.tobytes() == b.tobytes() for a, b in zip(images, others, strict=True)]
