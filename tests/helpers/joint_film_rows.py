"""Rows of the support matrix: films whose attention is joint, with random weights."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from transformers import CLIPTextModel

from helpers.film_rows import BATCHED, FILM, film, long_film
from helpers.rows import Options, Row, Way, pictures
from helpers.tiny_encoders import tiny_llama, tiny_t5_encoder
from helpers.tiny_tokenizers import tiny_mistral, tiny_t5, tiny_tokenizer
from helpers.transformer_rows import clip, own_norms, quiet


def cogvideox(kind: Any = CogVideoXPipeline, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 2,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 24,
        "sample_height": 24,
        "sample_frames": 9,
        "patch_size": 2,
        "max_text_seq_length": 12,
        "use_rotary_positional_embeddings": True,
    }
    transformer = CogVideoXTransformer3DModel(**{**config, **changes})
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    pipe = kind(
        tokenizer=tiny_t5(),
        text_encoder=tiny_t5_encoder(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=CogVideoXDDIMScheduler(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def hunyuan_video(kind: Any = HunyuanVideoPipeline, in_channels: int = 4) -> Any:
    torch.manual_seed(0)
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=in_channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 4, 4),
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=False,
    )
    pipe = kind(
        text_encoder=tiny_llama().model,
        tokenizer=tiny_mistral("right"),
        transformer=own_norms(transformer).eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder_2=clip(CLIPTextModel),
        tokenizer_2=tiny_tokenizer(),
    )
    return quiet(pipe)


def templated_film(pipe: Any, way: Way) -> Options:
    """The pipeline's own template would be 500 tokens here, which spell it in letters."""
    guidance = {"true_cfg_scale": 5.0 if way.guided else 1.0, "guidance_scale": 6.0}
    template = {"template": "[INST]film: {}[/INST]", "crop_start": 4}
    return {**film(pipe, way), **guidance, "prompt_template": template}


def from_first_frame(pipe: Any, way: Way) -> Options:
    return {**templated_film(pipe, way), "image": pictures(way, way.total)}


def cogvideox15() -> Any:
    """Two frames of the latent are one of the grid; three are filled up to four."""
    return cogvideox(patch_size_t=2, patch_bias=False)


def cogvideox15_from_a_picture() -> Any:
    changes = {"in_channels": 8, "ofs_embed_dim": 2}
    return cogvideox(CogVideoXImageToVideoPipeline, patch_size_t=2, patch_bias=False, **changes)


def long_from_first_frame(pipe: Any, way: Way) -> Options:
    return {**long_film(pipe, way), "image": pictures(way, way.prompts)}


# its pipeline makes one film a prompt, whatever it is told
COG: dict[str, Any] = {**BATCHED, "joint": "text first", "images_option": None}
HUNYUAN: dict[str, Any] = {**FILM, "in_turn": True, "joint": "picture first", "n_text": 12}

JOINT_FILMS = (
    Row("CogVideoX", cogvideox, film, **COG),
    Row("CogVideoX 1.5", cogvideox15, long_film, **COG),
    Row("CogVideoX 1.5, from a picture", cogvideox15_from_a_picture, long_from_first_frame, **COG),
    Row("HunyuanVideo", hunyuan_video, templated_film, **HUNYUAN),
    Row(
        "HunyuanVideo, SkyReels from a picture",
        lambda: hunyuan_video(HunyuanSkyreelsImageToVideoPipeline, in_channels=8),
        from_first_frame,
        **HUNYUAN,
    ),
)
