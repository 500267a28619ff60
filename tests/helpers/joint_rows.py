"""Further rows of the support matrix with joint attention: the kin of FLUX and others."""

import math
from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderKLFlux2,
    BriaPipeline,
    BriaTransformer2DModel,
    ChromaImg2ImgPipeline,
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
)

from helpers.newer import newer
from helpers.rows import Options, Row, Way, new_images, sized
from helpers.tiny_encoders import (
    tiny_llama,
    tiny_mistral3,
    tiny_qwen3,
    tiny_qwen_vl,
    tiny_t5_encoder,
)
from helpers.tiny_tokenizers import tiny_mistral, tiny_qwen, tiny_t5, tiny_tokenizer
from helpers.transformer_rows import FLUX, VAE, clip, own_norms, quiet, short, vae


def chroma(kind: Any = ChromaPipeline) -> Any:
    torch.manual_seed(0)
    transformer = ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    pipe = kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=tiny_t5_encoder(),
        tokenizer=tiny_t5(),
        transformer=own_norms(transformer).eval(),
    )
    return quiet(pipe)


def auraflow() -> Any:
    torch.manual_seed(0)
    transformer = AuraFlowTransformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pos_embed_max_size=256,
    )
    pipe = AuraFlowPipeline(
        tokenizer=tiny_t5(),
        text_encoder=tiny_t5_encoder(),
        vae=vae(),
        transformer=own_norms(transformer).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    return quiet(pipe)


def bria() -> Any:
    torch.manual_seed(0)
    transformer = BriaTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    pipe = BriaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.1),
        text_encoder=tiny_t5_encoder(),
        tokenizer=tiny_t5(),
        transformer=own_norms(transformer).eval(),
    )
    return quiet(pipe)


def longcat() -> Any:
    torch.manual_seed(0)
    transformer = LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    pipe = LongCatImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.1, latent_channels=16),
        text_encoder=tiny_qwen_vl(),
        tokenizer=tiny_qwen(),
        text_processor=None,
        transformer=own_norms(transformer).eval(),
    )
    pipe.tokenizer_max_length = 24
    return quiet(pipe)


def hidream() -> Any:
    torch.manual_seed(0)
    transformer = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[32, 16],
        text_emb_dim=64,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=[0, 1, 1, 0],
    )
    pipe = HiDreamImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.1),
        text_encoder=clip(),
        tokenizer=tiny_tokenizer(),
        text_encoder_2=clip(),
        tokenizer_2=tiny_tokenizer(),
        text_encoder_3=tiny_t5_encoder(),
        tokenizer_3=tiny_t5(),
        text_encoder_4=tiny_llama(),
        tokenizer_4=tiny_mistral("right"),
        transformer=own_norms(transformer).eval(),
    )
    return quiet(pipe)


def ovis() -> Any:
    torch.manual_seed(0)
    transformer = OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    pipe = OvisImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.1),
        text_encoder=tiny_qwen3().model,
        tokenizer=tiny_qwen(),
        transformer=own_norms(transformer).eval(),
    )
    return quiet(pipe)


def ernie() -> Any:
    torch.manual_seed(0)
    transformer = newer("ErnieImageTransformer2DModel")(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=16,
        in_channels=16,
        out_channels=16,
        text_in_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    for part in (transformer.adaLN_modulation[-1], transformer.final_linear):
        torch.nn.init.normal_(part.weight)  # zeros as they are made
    pipe = newer("ErnieImagePipeline")(
        transformer=own_norms(transformer).eval(),
        vae=AutoencoderKLFlux2(**VAE).eval(),
        text_encoder=tiny_mistral3().model,
        tokenizer=tiny_mistral(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    return quiet(pipe)


def of_area(pipe: Any, way: Way) -> Options:
    """The pipeline scales every image to about the area of this many cells a side, and rounds
    down."""
    pipe.default_sample_size = 1 + math.isqrt(way.size[0] * way.size[1]) // 8
    return short(pipe, way)


def behind_an_instruction(pipe: Any, way: Way) -> Options:
    """Which the tiny tokenizer spells in letters."""
    return {**sized(pipe, way), "max_sequence_length": 160}


def as_written(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "enable_prompt_rewrite": False}


def from_image(pipe: Any, way: Way) -> Options:
    # half of the steps are run
    return {**short(pipe, way), "image": new_images(way, way.total), "num_inference_steps": 4}


BATCHED: Options = {"joint": "text first", "layers": 4, "unit": 16, "cell": 16}
UNFUSED: Options = {**FLUX, "in_turn": True, "processors": ()}

JOINT = (
    Row("Chroma", chroma, short, **{**UNFUSED, "processors": ("fused",)}),
    Row("Chroma, image to image", lambda: chroma(ChromaImg2ImgPipeline), from_image, **UNFUSED),
    Row("AuraFlow", auraflow, short, processors=("fused",), n_text=8 + 24, **BATCHED),
    Row("Bria", bria, short, processors=(), n_text=24, **BATCHED),
    Row(
        "HiDream-I1",
        hidream,
        of_area,
        processors=(),
        n_text=3 * 24,
        **{**BATCHED, "joint": "image first"},
    ),
    Row("Ovis-Image", ovis, behind_an_instruction, **{**UNFUSED, "n_text": 160}),
    Row(
        "ERNIE-Image",
        ernie,
        sized,
        needs="ErnieImagePipeline",
        processors=(),
        **{**BATCHED, "joint": "image first", "layers": 2},
    ),
    Row("LongCat-Image", longcat, as_written, **UNFUSED),
)
