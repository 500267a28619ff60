"""Tiny pipelines of the real classes and their parts, with random weights."""

import inspect

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from helpers.tiny_tokenizers import tiny_tokenizer

# Sizes of a tiny transformer; each class takes those that its configuration has.
SIZES = {
    "num_layers": 2,
    "num_single_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 4, 8),
}


def tiny_model(kind, seed=0, **changes):
    """A transformer of a class, as small as it can be."""
    torch.manual_seed(seed)
    known = inspect.signature(kind).parameters
    sizes = {name: size for name, size in SIZES.items() if name in known}
    return kind(**{**sizes, **changes}).eval()


def tiny(kind, model, vae, *texts, scheduler=None, **parts):
    """A pipeline of a class, with a denoiser and pairs of a text encoder and its tokenizer."""
    for number, (encoder, tokenizer) in enumerate(texts, start=1):
        end = f"_{number}" if number > 1 else ""
        parts |= {f"text_encoder{end}": encoder, f"tokenizer{end}": tokenizer}
    denoiser = "unet" if isinstance(model, UNet2DConditionModel) else "transformer"
    scheduler = scheduler or FlowMatchEulerDiscreteScheduler()
    pipe = kind(vae=vae, scheduler=scheduler, **{denoiser: model}, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_text_encoder(kind=CLIPTextModel, width: int = 32, max_length: int = 77):
    config = CLIPTextConfig(
        vocab_size=600,
        hidden_size=width,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_length,
        projection_dim=width,
        bos_token_id=518,
        eos_token_id=519,
    )
    return kind(config).eval()


def make_unet(**changes) -> UNet2DConditionModel:
    """SD 1.x's blocks at a width of 8 and 16."""
    config = {
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "layers_per_block": 2,
        "block_out_channels": (8, 16, 16, 16),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "cross_attention_dim": 32,
        "attention_head_dim": (2, 4, 4, 4),
        "norm_num_groups": 4,
    }
    torch.manual_seed(0)
    return UNet2DConditionModel(**{**config, **changes}).eval()


def make_small_unet(**changes) -> UNet2DConditionModel:
    """One of few layers, for what takes long in each: on the way down, in the middle, and two on
    the way up."""
    config = {
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "attention_head_dim": (2, 4),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return make_unet(**{**config, **changes})


def make_sd15_unet() -> UNet2DConditionModel:
    """SD 1.5's own configuration, which is diffusers' default, at a fifth of its width."""
    return make_unet(
        sample_size=64,
        block_out_channels=(64, 128, 256, 256),
        attention_head_dim=8,
        cross_attention_dim=768,
        norm_num_groups=32,
    )


def make_vae() -> AutoencoderKL:
    torch.manual_seed(1)
    return AutoencoderKL(
        block_out_channels=(4, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        latent_channels=4,
    ).eval()


def make_scheduler() -> DDIMScheduler:
    return DDIMScheduler(beta_schedule="scaled_linear", steps_offset=1, clip_sample=False)


def make_pipeline(kind=StableDiffusionPipeline, max_length: int = 77, **parts):
    torch.manual_seed(2)
    components = {
        "unet": parts.get("unet") or make_unet(),
        "vae": make_vae(),
        "text_encoder": tiny_text_encoder(max_length=max_length),
        "tokenizer": tiny_tokenizer(max_length),
        "scheduler": make_scheduler(),
        "safety_checker": None,
        "feature_extractor": None,
    }
    pipe = kind(**{**components, **parts}, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def small_pipeline(kind=StableDiffusionPipeline, **parts):
    """A pipeline whose UNet has few layers, for what does not depend on them: it takes a third of
    the time. The matrix's rows of SD 1.x and 2.x have all blocks."""
    return make_pipeline(kind, **{"unet": make_small_unet(), **parts})


def make_sdxl_unet(conditions: int = 6, text_width: int = 64, **changes) -> UNet2DConditionModel:
    """SDXL's blocks; sizes and crops are 6 conditions, the refiner has 5 and one text encoder."""
    return make_unet(
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=text_width,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * conditions + 32,
        use_linear_projection=True,
        **changes,
    )


def make_sdxl_pipeline(kind=StableDiffusionXLPipeline, unet=None, **parts):
    unet = unet or make_sdxl_unet()
    torch.manual_seed(2)
    pipe = kind(
        vae=make_vae(),
        text_encoder=tiny_text_encoder(),
        text_encoder_2=tiny_text_encoder(CLIPTextModelWithProjection),
        tokenizer=tiny_tokenizer(),
        tokenizer_2=tiny_tokenizer(),
        unet=unet,
        scheduler=make_scheduler(),
        **parts,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
