"""Folders of diffusers that fit the tiny checkpoints of :mod:`helpers.ldm_checkpoints`: pipelines
with the same shapes under diffusers' own names, with other weights, saved by save_pretrained."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from helpers.tiny_tokenizers import tiny_tokenizer

CROSS, PLAIN = "CrossAttnDownBlock2D", "DownBlock2D"
SD1_UNET = {
    "block_out_channels": (32, 32, 64, 64),
    "down_block_types": (CROSS, CROSS, CROSS, PLAIN),
    "cross_attention_dim": 64,
    "attention_head_dim": 8,
}
SD2_UNET = {
    "block_out_channels": (64, 64, 128, 128),
    "down_block_types": (CROSS, CROSS, CROSS, PLAIN),
    "cross_attention_dim": 64,
    "attention_head_dim": [1, 1, 2, 2],
    "use_linear_projection": True,
}
SDXL_UNET = {
    "block_out_channels": (64, 64, 128),
    "down_block_types": (PLAIN, CROSS, CROSS),
    "cross_attention_dim": 192,
    "attention_head_dim": [1, 1, 2],
    "use_linear_projection": True,
    "transformer_layers_per_block": [1, 1, 2],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 128 + 6 * 256,
}
REFINER_UNET = {
    **SDXL_UNET,
    "block_out_channels": (64, 64, 128, 128),
    "down_block_types": (PLAIN, CROSS, CROSS, PLAIN),
    "cross_attention_dim": 128,
    "attention_head_dim": [1, 1, 2, 2],
    "transformer_layers_per_block": [1, 1, 1, 1],
    "projection_class_embeddings_input_dim": 128 + 5 * 256,
}


def unet(config: dict[str, Any], channels: int = 4, size: int = 8) -> Any:
    up = [kind.replace("Down", "Up") for kind in reversed(config["down_block_types"])]
    shape = {**config, "up_block_types": up, "in_channels": channels, "sample_size": size}
    return diffusers.UNet2DConditionModel(**shape)


def vae(scale: float = 0.18215) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(32,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
        scaling_factor=scale,
        sample_size=64,
    )


def clip(width: int, layers: int, *, act: str = "gelu", projected: bool = False) -> Any:
    config = CLIPTextConfig(
        vocab_size=520,
        hidden_size=width,
        projection_dim=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        hidden_act=act,
        bos_token_id=518,
        eos_token_id=519,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def padded(pad: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    return tokenizer


def sd1_pipeline(channels: int = 4) -> Any:
    kind = {4: "StableDiffusionPipeline", 9: "StableDiffusionInpaintPipeline"}[channels]
    return getattr(diffusers, kind)(
        unet=unet(SD1_UNET, channels),
        vae=vae(),
        text_encoder=clip(64, 2, act="quick_gelu"),
        tokenizer=tiny_tokenizer(),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sd2_pipeline() -> Any:
    """Of SD 2.x, whose last layer of the text encoder is left out, for the velocity."""
    return diffusers.StableDiffusionPipeline(
        unet=unet(SD2_UNET),
        vae=vae(),
        text_encoder=clip(64, 23),
        tokenizer=padded("!"),
        scheduler=diffusers.DDIMScheduler(
            prediction_type="v_prediction", clip_sample=False, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl_pipeline() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        unet=unet(SDXL_UNET),
        vae=vae(0.13025),
        text_encoder=clip(64, 2, act="quick_gelu"),
        text_encoder_2=clip(128, 2, projected=True),
        tokenizer=tiny_tokenizer(),
        tokenizer_2=padded("!"),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )


def refiner_pipeline() -> Any:
    return diffusers.StableDiffusionXLImg2ImgPipeline(
        unet=unet(REFINER_UNET),
        vae=vae(0.13025),
        text_encoder=None,
        text_encoder_2=clip(128, 2, projected=True),
        tokenizer=None,
        tokenizer_2=padded("!"),
        scheduler=diffusers.EulerDiscreteScheduler(),
        requires_aesthetics_score=True,
        force_zeros_for_empty_prompt=False,
    )


MADE = {
    "sd1": sd1_pipeline,
    "sd2": sd2_pipeline,
    "sdxl": sdxl_pipeline,
    "refiner": refiner_pipeline,
}


def save_settings(name: str, folder: Path, **options: Any) -> Path:
    """Save the pipeline of a name in :data:`MADE`, its weights among the rest."""
    torch.manual_seed(7)  # not those of the file
    MADE[name](**options).save_pretrained(folder)
    return folder
