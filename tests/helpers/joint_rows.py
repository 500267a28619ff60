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
from helpers.tiny_pipelines import tiny, tiny_model
from helpers.tiny_tokenizers import tiny_mistral, tiny_qwen, tiny_t5, tiny_tokenizer
from helpers.transformer_rows import FLUX, VAE, clip, own_norms, short, vae


def chroma(kind: Any = ChromaPipeline) -> Any:
    sizes = {"joint_attention_dim": 32, "approximator_num_channels": 8, "patch_size": 1}
    sizes |= {"approximator_hidden_dim": 16, "approximator_layers": 1}
    model = own_norms(tiny_model(ChromaTransformer2DModel, in_channels=16, **sizes))
    made = vae(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False)
    return tiny(kind, model, made, (tiny_t5_encoder(), tiny_t5()))


def auraflow() -> Any:
    sizes = {"num_mmdit_layers": 2, "num_single_dit_layers": 2, "attention_head_dim": 8}
    sizes |= {"joint_attention_dim": 32, "caption_projection_dim": 16, "pos_embed_max_size": 256}
    sizes |= {"sample_size": 16, "patch_size": 2, "in_channels": 4}
    model = own_norms(tiny_model(AuraFlowTransformer2DModel, **sizes))
    return tiny(AuraFlowPipeline, model, vae(), (tiny_t5_encoder(), tiny_t5()))


def bria() -> Any:
    model = tiny_model(BriaTransformer2DModel, in_channels=16, joint_attention_dim=32)
    text = tiny_t5_encoder(), tiny_t5()
    return tiny(BriaPipeline, own_norms(model), vae(shift_factor=0.1), text)


def longcat() -> Any:
    model = own_norms(tiny_model(LongCatImageTransformer2DModel, in_channels=64))
    made = vae(shift_factor=0.1, latent_channels=16)
    text = tiny_qwen_vl(), tiny_qwen()
    pipe = tiny(LongCatImagePipeline, model, made, text, text_processor=None)
    pipe.tokenizer_max_length = 24
    return pipe


def hidream() -> Any:
    sizes = {"attention_head_dim": 8, "caption_channels": [32, 16], "text_emb_dim": 64}
    sizes |= {"axes_dims_rope": (4, 2, 2), "max_resolution": (32, 32), "patch_size": 2}
    channels = {"in_channels": 4, "out_channels": 4, "llama_layers": [0, 1, 1, 0]}
    model = own_norms(tiny_model(HiDreamImageTransformer2DModel, **sizes, **channels))
    return tiny(
        HiDreamImagePipeline,
        model,
        vae(shift_factor=0.1),
        (clip(), tiny_tokenizer()),
        (clip(), tiny_tokenizer()),
        (tiny_t5_encoder(), tiny_t5()),
        (tiny_llama(), tiny_mistral("right")),
    )


def ovis() -> Any:
    model = own_norms(tiny_model(OvisImageTransformer2DModel, in_channels=16, out_channels=16))
    text = tiny_qwen3().model, tiny_qwen()
    return tiny(OvisImagePipeline, model, vae(shift_factor=0.1), text)


def ernie() -> Any:
    sizes = {"hidden_size": 32, "ffn_hidden_size": 16, "text_in_dim": 16}
    sizes |= {"in_channels": 16, "out_channels": 16, "rope_axes_dim": (4, 6, 6)}
    model = own_norms(tiny_model(newer("ErnieImageTransformer2DModel"), **sizes))
    for part in (model.adaLN_modulation[-1], model.final_linear):
        torch.nn.init.normal_(part.weight)  # zeros as they are made
    made = AutoencoderKLFlux2(**VAE).eval()
    return tiny(newer("ErnieImagePipeline"), model, made, (tiny_mistral3().model, tiny_mistral()))


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
