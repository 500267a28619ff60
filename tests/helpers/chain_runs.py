"""The chain as people type it, and a capture of the same run, on a small sharp pipeline."""

import torch

import sdattn
from helpers.tiny_pipelines import make_pipeline, make_unet
from sdattn import AttentionStore, TorchAttnProcessor
from sdattn.models.denoiser import find_denoiser

CROSS = ("down_cross", "mid_cross", "up_cross")
# 6 + 1 + 9 layers; heads and queries of make_unet() at 128x192 pixels, 16x24 cells
DOWN = [(2, 384), (2, 384), (4, 96), (4, 96), (4, 24), (4, 24)]
UP = [(4, 24)] * 3 + [(4, 96)] * 3 + [(2, 384)] * 3


def make_pipe(unet=None):
    """Sharper attention than at random, so that maps which are mixed up differ."""
    pipe = make_pipeline(unet=unet or make_unet())
    for layer in find_denoiser(pipe.unet).layers:
        layer.module.to_q.weight.data *= 4
    return pipe


def run(pipe, prompts, scale=4.0, steps=2, **options):
    images = len(prompts) * options.get("num_images_per_prompt", 1)
    return pipe(
        prompts,
        height=128,
        width=192,
        num_inference_steps=steps,
        guidance_scale=scale,
        generator=[torch.Generator().manual_seed(i) for i in range(images)],
        output_type="latent",
        **options,
    ).images


def chained(pipe, *args, store=None, **options):
    store = store or AttentionStore(pipeline=pipe)
    before = pipe.unet.attn_processors
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    latents = run(pipe, *args, **options)
    pipe.unet.set_attn_processor(before)
    store.detach()
    return store, latents


def captured(pipe, *args, capture=None, **options):
    with sdattn.capture(pipe, **(capture or {})) as store:
        latents = run(pipe, *args, **options)
    return store, latents


def same_maps(ours, theirs, atol=1e-6):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.words == other.words
        torch.testing.assert_close(one.maps, other.maps, atol=atol, rtol=0)
