"""Rows of the support matrix: videos that are one sequence, with random weights."""

from typing import Any

from diffusers import (
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from helpers.rows import Options, Row, Way, second_half, sized
from helpers.tiny_encoders import tiny_t5_encoder
from helpers.tiny_pipelines import tiny, tiny_model
from helpers.tiny_tokenizers import tiny_t5

FRAMES = 5  # of the video, two of a latent that is cut by four


def wan_transformer(**changes: Any) -> WanTransformer3DModel:
    sizes = {"attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 32}
    sizes |= {"freq_dim": 16, "ffn_dim": 16, "rope_max_seq_len": 32}
    return tiny_model(WanTransformer3DModel, **{**sizes, **changes})


def wan(kind: Any = WanPipeline, **parts: Any) -> Any:
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    config = UMT5Config(vocab_size=400, d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model, vae = parts.pop("transformer", None), parts.pop("vae", vae)
    text = UMT5EncoderModel(config).eval(), tiny_t5()
    return tiny(kind, model or wan_transformer(), vae.eval(), text, **parts)


def ltx(kind: Any = LTXPipeline) -> Any:
    sizes = {"attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 32}
    model = tiny_model(LTXVideoTransformer3DModel, in_channels=8, out_channels=8, **sizes)
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        encoder_causal=True,
        decoder_causal=False,
    )
    return tiny(kind, model, vae.eval(), (tiny_t5_encoder(), tiny_t5()))


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
    return wan(transformer_2=wan_transformer(seed=1), boundary_ratio=0.5)


BATCHED: dict[str, Any] = {**VIDEO, "prompt_rows": second_half}

VIDEOS = (
    Row("Wan 2.1", wan, video, in_turn=True, **VIDEO),
    Row("LTX-Video", ltx, long_video, **{**BATCHED, "unit": 32, "cell": 32}),
)
