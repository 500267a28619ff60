"""Rows of the support matrix: videos of Wan that begin with an image, and Wan 2.2, with random
weights."""

from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from helpers.rows import Options, Row, Way, new_images
from helpers.transformer_rows import own_norms
from helpers.video_rows import VIDEO, video, wan, wan_transformer

IMAGE = 5  # columns of the image: its four patches and one of all
CHANNELS = 12  # of the noise, of a mask, of the image


def vision() -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    return CLIPVisionModel(config).eval()


def seeing(**changes: Any) -> Any:
    """A transformer of Wan 2.1, whose layers attend to an image as well."""
    sizes = {"in_channels": CHANNELS, "image_dim": 16, "added_kv_proj_dim": 24}
    return own_norms(wan_transformer(**{**sizes, **changes}))


def wan_from_image(**changes: Any) -> Any:
    """Wan 2.1: its layers attend to the image, which is in the channels too."""
    torch.manual_seed(1)
    small = {"height": 32, "width": 32}
    return wan(
        WanImageToVideoPipeline,
        transformer=seeing(**changes),
        image_encoder=vision(),
        image_processor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=small),
    )


def wan22_from_image() -> Any:
    """14B of Wan 2.2: the image is in the channels alone, and another transformer runs the second
    half of the schedule."""
    first, second = (wan_transformer(in_channels=CHANNELS, seed=seed) for seed in (0, 1))
    return wan(WanImageToVideoPipeline, transformer=first, transformer_2=second, boundary_ratio=0.5)


def wan22_small(kind: Any = WanPipeline) -> Any:
    """5B of Wan 2.2: each token has a timestep of its own, and a cell has 32 pixels on a side."""
    torch.manual_seed(1)
    vae = AutoencoderKLWan(
        base_dim=3,
        decoder_base_dim=3,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    return wan(kind, vae=vae.eval(), expand_timesteps=True)


def wan22_small_from_image() -> Any:
    return wan22_small(WanImageToVideoPipeline)


def from_image(pipe: Any, way: Way) -> Options:
    return {**video(pipe, way), "image": new_images(way, 1)}


def from_seen_image(pipe: Any, way: Way) -> Options:
    """As many columns of text as diffusers reckons with."""
    return {**from_image(pipe, way), "max_sequence_length": 512}


WAN: dict[str, Any] = {**VIDEO, "in_turn": True}
SMALL: dict[str, Any] = {**WAN, "unit": 32, "cell": 32}

WAN_VIDEOS = (
    # its pipeline gives the image to one video a prompt
    Row(
        "Wan 2.1, from an image",
        wan_from_image,
        from_seen_image,
        text_last=True,
        **{**WAN, "images_option": None, "processors": ("fused",)},
    ),
    Row("Wan 2.2, from an image", wan22_from_image, from_image, **WAN),
    Row("Wan 2.2 5B", wan22_small, video, **SMALL),
    Row("Wan 2.2 5B, from an image", wan22_small_from_image, from_image, **SMALL),
)
