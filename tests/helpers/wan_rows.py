"""Rows of the support matrix: videos of Wan that begin with an image, and Wan 2.2."""

from functools import partial
from typing import Any

import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from helpers.rows import Options, Row, also_images
from helpers.tiny_pipelines import own_norms, tiny
from helpers.video_rows import VIDEO, video, wan_transformer

IMAGE = 5  # columns of the image: its four patches and one of all
CHANNELS = 12  # of the noise, of a mask, of the image


def vision() -> CLIPVisionModel:
    torch.manual_seed(1)
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
    small = {"height": 32, "width": 32}
    return tiny(
        "WanImageToVideoPipeline",
        transformer=seeing(**changes),
        image_encoder=vision(),
        image_processor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=small),
    )


def wan22_from_image() -> Any:
    """14B of Wan 2.2: the image is in the channels alone, and another transformer runs the second
    half of the schedule."""
    return tiny(
        "WanImageToVideoPipeline",
        in_channels=CHANNELS,
        transformer_2=wan_transformer(1, in_channels=CHANNELS),
        boundary_ratio=0.5,
    )


def wan22_small(kind: str = "WanPipeline") -> Any:
    """5B of Wan 2.2: each token has a timestep of its own, and a cell has 32 pixels on a side."""
    vae = {
        "decoder_base_dim": 3,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
    }
    return tiny(kind, vae=vae, expand_timesteps=True)


def wan22_small_from_image() -> Any:
    return wan22_small("WanImageToVideoPipeline")


wan_image = also_images(video, 1)
# as many columns of text as diffusers reckons with
from_seen_image = also_images(partial(video, max_sequence_length=512), 1)
WAN: Options = {**VIDEO, "in_turn": True}
SMALL: Options = {**WAN, "unit": 32, "cell": 32}

WAN_VIDEOS = (
    # its pipeline gives the image to one video a prompt
    Row(
        "Wan 2.1, from an image",
        wan_from_image,
        from_seen_image,
        text_last=True,
        **{**WAN, "images_option": None, "processors": ("fused",)},
    ),
    Row("Wan 2.2, from an image", wan22_from_image, wan_image, **WAN),
    Row("Wan 2.2 5B", wan22_small, video, **SMALL),
    Row("Wan 2.2 5B, from an image", wan22_small_from_image, wan_image, **SMALL),
)
