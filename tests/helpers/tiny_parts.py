"""What makes the parts of tiny pipelines, by the beginnings of the pipelines' names."""

from collections.abc import Callable
from functools import partial
from typing import Any

from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
)
from diffusers.guiders import ClassifierFreeGuidance
from transformers import (
    ByT5Tokenizer,
    CLIPTextModelWithProjection,
    Qwen3VLForConditionalGeneration,
    UMT5EncoderModel,
)

from helpers import tiny_encoders as encoders
from helpers import tiny_processors as processors
from helpers import tiny_tokenizers as tokenizers
from helpers.newer import newer

SMALL_UNET = {
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "attention_head_dim": (2, 4),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
# Sizes and crops are six conditions
SDXL_UNET = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
    "transformer_layers_per_block": (1, 2),
    "cross_attention_dim": 64,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
    "use_linear_projection": True,
}
KOLORS_UNET = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
    "encoder_hid_dim": 32,
    "encoder_hid_dim_type": "text_proj",
}


def make_scheduler() -> DDIMScheduler:
    return DDIMScheduler(beta_schedule="scaled_linear", steps_offset=1, clip_sample=False)


def lcm_scheduler() -> LCMScheduler:
    return LCMScheduler.from_config(make_scheduler().config)


def texts(*pairs: tuple[Callable[[], Any], Callable[[], Any]]) -> dict[str, Any]:
    """What makes text encoders and their tokenizers, by the names of these parts; and a scheduler
    of flows, which some replace."""
    parts: dict[str, Any] = {"scheduler": FlowMatchEulerDiscreteScheduler}
    for number, (encoder, tokenizer) in enumerate(pairs, start=1):
        end = f"_{number}" if number > 1 else ""
        parts |= {f"text_encoder{end}": encoder, f"tokenizer{end}": tokenizer}
    return parts


CLIP = (encoders.tiny_text_encoder, tokenizers.tiny_tokenizer)
PROJECTED = (
    partial(encoders.tiny_text_encoder, CLIPTextModelWithProjection),
    tokenizers.tiny_tokenizer,
)
T5 = (encoders.tiny_t5_encoder, tokenizers.tiny_t5)
UMT5 = (partial(encoders.tiny_t5_encoder, kind=UMT5EncoderModel), tokenizers.tiny_t5)
BYT5 = (encoders.tiny_t5_encoder, ByT5Tokenizer)
GEMMA = (encoders.tiny_gemma_encoder, tokenizers.tiny_gemma)
VISION = (encoders.tiny_qwen_vl, tokenizers.tiny_qwen)
LLAMA = partial(tokenizers.tiny_mistral, "right")
DIFFUSION = {"scheduler": make_scheduler}
SHIFTING = {"scheduler": partial(FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True)}


def qwen3_vl(layers: int) -> Callable[[], Any]:
    return partial(encoders.tiny_qwen3_vl, layers, Qwen3VLForConditionalGeneration)


# What is no part of the pipeline is set on it.
PARTS: dict[str, dict[str, Any]] = {
    "StableDiffusion": {**texts(CLIP), **DIFFUSION},
    "SemanticStableDiffusion": {**texts(CLIP), **DIFFUSION},
    "LEditsPPPipelineStableDiffusion": {**texts(CLIP), **DIFFUSION},
    "StableDiffusionXL": {**texts(CLIP, PROJECTED), **DIFFUSION, "unet": SDXL_UNET},
    "LatentConsistencyModel": {**texts(CLIP), "scheduler": lcm_scheduler},
    "AnimateDiff": {**texts(CLIP), **DIFFUSION, "unet": SMALL_UNET},
    "Kolors": {
        **texts((encoders.tiny_chatglm, tokenizers.tiny_chatglm_tokenizer)),
        **DIFFUSION,
        "unet": KOLORS_UNET,
    },
    "StableDiffusion3": texts(
        PROJECTED, PROJECTED, (partial(encoders.tiny_t5_encoder, 64), tokenizers.tiny_t5)
    ),
    "AuraFlow": texts(T5),
    "Bria": texts(T5),
    "Chroma": texts(T5),
    "CogVideoX": {**texts(T5), "scheduler": CogVideoXDDIMScheduler},
    "CogView3": {**texts(T5), "scheduler": CogVideoXDDIMScheduler},
    "CogView4": {**texts((encoders.tiny_glm_encoder, tokenizers.tiny_glm)), **SHIFTING},
    "ErnieImage": texts((lambda: encoders.tiny_mistral3().model, tokenizers.tiny_mistral)),
    "Flux": {
        **texts(CLIP, T5),
        "vae": {"use_quant_conv": False, "use_post_quant_conv": False},
    },
    "Flux2": texts((partial(encoders.tiny_mistral3, 30), processors.tiny_mistral_processor)),
    "Flux2Klein": {
        **texts((partial(encoders.tiny_qwen3, 28), tokenizers.tiny_qwen)),
        "transformer": {"guidance_embeds": False},
    },
    "Flux3": texts((qwen3_vl(32), processors.tiny_chat_processor)),
    "HiDream": texts(PROJECTED, PROJECTED, T5, (encoders.tiny_llama, LLAMA)),
    "HunyuanDiT": {
        **texts((encoders.tiny_bert, tokenizers.tiny_bert_tokenizer), T5),
        **DIFFUSION,
    },
    "HunyuanImage": {
        **texts(VISION, BYT5),
        "tokenizer_max_length": 190,
        "tokenizer_2_max_length": 16,
    },
    "HunyuanVideo": texts((lambda: encoders.tiny_llama().model, LLAMA), CLIP),
    "HunyuanSkyreels": texts((lambda: encoders.tiny_llama().model, LLAMA), CLIP),
    "HunyuanVideo15": {
        **texts((lambda: encoders.tiny_qwen_vl().model.language_model, tokenizers.tiny_qwen), BYT5),
        "guider": ClassifierFreeGuidance,
        "system_message": "clip",
        "prompt_template_encode_start_idx": 12,
        "tokenizer_max_length": 40,
        "tokenizer_2_max_length": 24,
        "vision_num_semantic_tokens": 3,
    },
    "Ideogram4": texts((partial(encoders.tiny_qwen3_vl, 36), tokenizers.tiny_vision_qwen)),
    "Kandinsky5": texts((encoders.tiny_qwen_vl, processors.tiny_qwen_processor), CLIP),
    "Krea2": {
        **texts((encoders.tiny_qwen3_vl, tokenizers.tiny_qwen)),
        **SHIFTING,
        "text_encoder_select_layers": lambda: (1, 2),
    },
    "LongCatImage": {
        **texts(VISION),
        "vae": {"latent_channels": 16},
        "tokenizer_max_length": 24,
    },
    "LTX": texts(T5),
    "LTX2": texts((encoders.tiny_gemma3, tokenizers.tiny_gemma)),
    "Lumina2": texts(GEMMA),
    "MiniMaxH3": {
        **texts((qwen3_vl(52), tokenizers.tiny_qwen)),
        "processor": processors.tiny_vision_processor,
        "scheduler": lambda: newer("MiniMaxH3Scheduler")(),
        "audio_scheduler": lambda: newer("MiniMaxH3Scheduler")(shift=3.0),
        "transformer_ref": lambda: None,
    },
    "Mochi": {
        **texts(T5),
        "scheduler": partial(FlowMatchEulerDiscreteScheduler, invert_sigmas=True),
    },
    "OvisImage": texts((lambda: encoders.tiny_qwen3().model, tokenizers.tiny_qwen)),
    "PixArt": {**texts(T5), **DIFFUSION},
    "QwenImage": texts(VISION),
    "QwenImageEdit": {
        **texts(VISION),
        "processor": processors.tiny_qwen_processor,
        # of few cells and channels: the pipelines resize images to a megapixel
        "vae": {
            "base_dim": 2,
            "dim_mult": [1] * 6,
            "num_res_blocks": 0,
            "temperal_downsample": [False] * 5,
        },
    },
    "QwenImage21": {
        "text_encoder": qwen3_vl(2),
        "processor": processors.tiny_vision_processor,
        **SHIFTING,
    },
    "Sana": texts(GEMMA),
    "SkyReelsV2": texts(UMT5),
    "Wan": texts(UMT5),
    "ZImage": texts((encoders.tiny_qwen3, tokenizers.tiny_qwen)),
}
