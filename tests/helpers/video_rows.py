"""Rows of the support matrix: videos that are one sequence, with random weights."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from helpers.rows import Options, Row, Way, second_half, sized
from helpers.tiny_encoders import tiny_t5_encoder
from helpers.tiny_tokenizers import tiny_t5

FRAMES = 5  # of the video, two of a latent that is cut by four


def wan_transformer(**changes: Any) -> WanTransformer3DModel:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 16,
        "ffn_dim": 16,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return WanTransformer3DModel(**{**config, **changes}).eval()


def wan(kind: Any = WanPipeline, **parts: Any) -> Any:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    text = UMT5Config(vocab_size=400, d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    made = {
        "tokenizer": tiny_t5(),
        "text_encoder": UMT5EncoderModel(text).eval(),
        "vae": vae.eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "transformer": wan_transformer(),
    }
    pipe = kind(**{**made, **parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ltx(kind: Any = LTXPipeline) -> Any:
    torch.manual_seed(0)
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=32,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        encoder_causal=True,
        decoder_causal=False,
    )
    pipe = kind(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=tiny_t5_encoder(),
        tokenizer=tiny_t5(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def video(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "num_frames": FRAMES, "max_sequence_length": 12}


def long_video(pipe: Any, way: Way) -> Options:
    """Two frames of a latent that is cut by eight."""
    return {**video(pipe, way), "num_frames": 9}


VIDEO: dict[str, Any] = {
    "frames": 2,
    "prompt_rows": None,
    "unit": 16,
    "cell": 16,
    "layers": 2,
    "processors": (),
    "images_option": "num_videos_per_prompt",
}


def wan_of_two() -> Any:
    """Wan 2.2: another transformer in the second half of the schedule."""
    torch.manual_seed(1)
    return wan(transformer_2=wan_transformer(), boundary_ratio=0.5)


BATCHED: dict[str, Any] = {**VIDEO, "prompt_rows": second_half}

VIDEOS = (
    Row("Wan 2.1", wan, video, in_turn=True, **VIDEO),
    Row("LTX-Video", ltx, long_video, **{**BATCHED, "unit": 32, "cell": 32}),
)
