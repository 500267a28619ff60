"""Tiny text encoders of the real classes, with random weights, for the tokenizers of
tiny_tokenizers."""

from functools import partial
from typing import Any

import torch
from transformers import (
    BertModel,
    CLIPTextModel,
    Gemma2Model,
    Gemma3ForConditionalGeneration,
    GlmModel,
    LlamaForCausalLM,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3ForCausalLM,
    Qwen3VLModel,
    T5EncoderModel,
)

from helpers.tiny_tokenizers import tiny_qwen

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "intermediate_size": 16, "head_dim": 8, "vocab_size": 400}
# of what looks at images
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
QWEN_VISION |= {"intermediate_size": 16}


def tiny_encoder(kind: Any, **settings: Any) -> Any:
    return kind(kind.config_class(**settings)).eval()


def tiny_text_encoder(
    kind: Any = CLIPTextModel, width: int = 32, max_length: int = 77
) -> CLIPTextModel:
    return tiny_encoder(
        kind,
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


def tiny_t5_encoder(width: int = 32, kind: Any = T5EncoderModel) -> T5EncoderModel:
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return tiny_encoder(kind, vocab_size=400, **sizes)


tiny_gemma_encoder = partial(tiny_encoder, Gemma2Model, **SMALL)
tiny_gemma3 = partial(
    tiny_encoder,
    Gemma3ForConditionalGeneration,
    text_config=SMALL,
    vision_config=VISION,
    mm_tokens_per_image=4,
)
tiny_glm_encoder = partial(tiny_encoder, GlmModel, **SMALL, pad_token_id=0)


def tiny_qwen_vl() -> Qwen2_5_VLForConditionalGeneration:
    rope = {"mrope_section": [1, 1, 2], "type": "default", "rope_type": "default"}
    text = {k: v for k, v in SMALL.items() if k != "head_dim"} | {"rope_scaling": rope}
    names = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"}
    names |= {"vision_end_token_id": "<|vision_end|>", "video_token_id": "<|video_pad|>"}
    tokenizer = tiny_qwen()
    ids = {key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()}
    vision = {**QWEN_VISION, "fullatt_block_indexes": [0]}
    kind = Qwen2_5_VLForConditionalGeneration
    return tiny_encoder(kind, text_config=text, vision_config=vision, **ids)


def tiny_qwen3(layers: int = 2) -> Qwen3ForCausalLM:
    return tiny_encoder(Qwen3ForCausalLM, **{**SMALL, "num_hidden_layers": layers})


def tiny_llama() -> LlamaForCausalLM:
    return tiny_encoder(LlamaForCausalLM, **SMALL, attn_implementation="eager")


def tiny_qwen3_vl(layers: int = 2, kind: Any = Qwen3VLModel) -> Qwen3VLModel:
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10000.0}
    text = {**SMALL, "num_hidden_layers": layers, "rope_parameters": rope}
    return tiny_encoder(kind, text_config=text, vision_config=vision)


def tiny_bert() -> BertModel:
    known = BertModel.config_class().to_dict()
    small = {name: value for name, value in SMALL.items() if name in known}
    return tiny_encoder(BertModel, **small, max_position_embeddings=80)


def tiny_mistral3(layers: int = 2) -> Mistral3ForConditionalGeneration:
    return tiny_encoder(
        Mistral3ForConditionalGeneration,
        text_config={"model_type": "mistral", **SMALL, "num_hidden_layers": layers},
        vision_config={"model_type": "pixtral", **VISION},
    )


def tiny_chatglm() -> Any:
    """Kolors' text encoder."""
    from diffusers.pipelines.kolors import ChatGLMModel
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig

    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=600,
        hidden_size=32,
        ffn_hidden_size=37,
        kv_channels=8,
        num_attention_heads=4,
        seq_length=256,
        multi_query_attention=True,
        multi_query_group_num=2,
        add_qkv_bias=True,
        original_rope=True,
    )
    model = ChatGLMModel(config, empty_init=False).eval()
    for weight in model.parameters():  # as the class makes them they may be anything
        torch.nn.init.normal_(weight, std=0.3)
    return model
