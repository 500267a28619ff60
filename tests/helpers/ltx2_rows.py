"""Rows of the support matrix: LTX-2, videos with their sound, with random weights."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from helpers.newer import needs_argument
from helpers.rows import Options, Row, Way, new_images
from helpers.tiny_encoders import tiny_gemma3
from helpers.tiny_pipelines import tiny, tiny_model
from helpers.tiny_tokenizers import tiny_gemma
from helpers.video_rows import BATCHED, long_video

REGISTERS = 4  # the length of the text is a multiple
LENGTH = 16
# What LTX-2.3 has and LTX-2.0 has not.
NEWER: dict[str, Any] = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
    "rope_type": "split",
}


def transformer(**changes: Any) -> LTX2VideoTransformer3DModel:
    sizes = {"attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16}
    sizes |= {"audio_num_attention_heads": 2, "audio_attention_head_dim": 4}
    sizes |= {"audio_cross_attention_dim": 8, "audio_in_channels": 4, "audio_out_channels": 4}
    channels = {"in_channels": 4, "out_channels": 4}
    return tiny_model(LTX2VideoTransformer3DModel, **{**sizes, **channels, **changes})


def connectors(*, newer: bool, **changes: Any) -> LTX2TextConnectors:
    if newer:
        needs_argument(LTX2TextConnectors.__init__, "per_modality_projections")
    config = {
        "caption_channels": 16,
        "text_proj_in_factor": 3,  # Gemma's layers and its embeddings
        "video_connector_num_attention_heads": 2,
        "video_connector_attention_head_dim": 8,
        "video_connector_num_layers": 1,
        "video_connector_num_learnable_registers": REGISTERS,
        "audio_connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": 4 if newer else 8,
        "audio_connector_num_layers": 1,
        "audio_connector_num_learnable_registers": REGISTERS,
    }
    if not newer:  # the defaults, which the oldest admitted diffusers does not have
        config |= {"connector_rope_base_seq_len": 4096, "rope_theta": 10000.0}
        config |= {"rope_double_precision": True, "causal_temporal_positioning": False}
    if newer:
        config |= {"per_modality_projections": True, "video_hidden_dim": 16, "audio_hidden_dim": 8}
        config |= {"proj_bias": True, "rope_type": "split"}
    return LTX2TextConnectors(**{**config, **changes}).eval()


def ltx2(kind: Any = LTX2Pipeline, *, newer: bool = False, **parts: Any) -> Any:
    torch.manual_seed(0)
    vae = AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(4, 8, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        upsample_residual=(False, False, False),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    sound = AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mel_bins=8,
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=8,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
    )
    sounds = {"audio_vae": sound.eval(), "vocoder": vocoder.eval()}
    model = parts.pop("transformer", None) or transformer(**(NEWER if newer else {}))
    parts = {**sounds, "connectors": connectors(newer=newer), **parts}
    return tiny(kind, model, vae.eval(), (tiny_gemma3(), tiny_gemma()), **parts)


def video_and_sound(pipe: Any, way: Way) -> Options:
    """With guidance by the negative prompt alone."""
    scale = 5.0 if way.guided else 1.0
    scales = {"audio_guidance_scale": scale, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0}
    scales |= {"stg_scale": 0.0, "modality_scale": 1.0}
    return {**long_video(pipe, way), **scales, "max_sequence_length": LENGTH}


def alike_videos(pipe: Any, way: Way) -> Options:
    """Prompts of one length: of others the pipeline gives videos each other's masks."""
    prompts = ["a red cat", "a red sofa"][: way.prompts]
    own = {"prompt": prompts if way.prompts > 1 else prompts[0]}
    return {**video_and_sound(pipe, way), **own}


def from_first_frame(pipe: Any, way: Way) -> Options:
    needs_argument(LTX2ImageToVideoPipeline.__call__, "image_crf")
    own = {"image": new_images(way, way.total), "image_crf": 0}
    return {**video_and_sound(pipe, way), **own}


SIZES: dict[str, Any] = {**BATCHED, "unit": 32, "cell": 32}
ONE_A_PROMPT: dict[str, Any] = {**SIZES, "images_option": None}

LTX2_VIDEOS = (
    Row("LTX-2", ltx2, alike_videos, **SIZES),
    Row("LTX-2.3", lambda: ltx2(newer=True), video_and_sound, **ONE_A_PROMPT),
    Row(
        "LTX-2, from an image",
        lambda: ltx2(LTX2ImageToVideoPipeline),
        from_first_frame,
        **ONE_A_PROMPT,
    ),
)
