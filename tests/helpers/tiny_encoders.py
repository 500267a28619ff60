"""Tiny text encoders of the real classes, with random weights, for the tokenizers of
tiny_tokenizers."""

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLModel,
    T5EncoderModel,
)

from helpers.tiny_tokenizers import tiny_qwen

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "intermediate_size": 16, "head_dim": 8, "vocab_size": 400}


def tiny_text_encoder(
    kind: Any = CLIPTextModel, width: int = 32, max_length: int = 77
) -> CLIPTextModel:
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


def tiny_t5_encoder(width: int = 32, kind: Any = T5EncoderModel) -> T5EncoderModel:
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return kind(kind.config_class(vocab_size=400, **sizes)).eval()


def tiny_gemma_encoder() -> Gemma2Model:
    return Gemma2Model(Gemma2Config(**SMALL)).eval()


def tiny_gemma3() -> Gemma3ForConditionalGeneration:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=dict(SMALL), vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


def tiny_qwen_vl() -> Qwen2_5_VLForConditionalGeneration:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"intermediate_size": 16, "fullatt_block_indexes": [0]}
    rope = {"mrope_section": [1, 1, 2], "type": "default", "rope_type": "default"}
    text = {k: v for k, v in SMALL.items() if k != "head_dim"} | {"rope_scaling": rope}
    names = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"}
    names |= {"vision_end_token_id": "<|vision_end|>", "video_token_id": "<|video_pad|>"}
    tokenizer = tiny_qwen()
    ids = {key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def tiny_qwen3(layers: int = 2) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "num_hidden_layers": layers})).eval()


def tiny_llama(layers: int = 2) -> LlamaForCausalLM:
    config = LlamaConfig(**{**SMALL, "num_hidden_layers": layers}, attn_implementation="eager")
    return LlamaForCausalLM(config).eval()


def tiny_qwen3_vl(layers: int = 2, kind=Qwen3VLModel) -> Qwen3VLModel:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"intermediate_size": 16, "deepstack_visual_indexes": [0]}
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10000.0}
    text = {**SMALL, "num_hidden_layers": layers, "rope_parameters": rope}
    return kind(Qwen3VLConfig(text_config=text, vision_config=vision)).eval()


def tiny_glm_encoder() -> GlmModel:
    return GlmModel(GlmConfig(**SMALL, pad_token_id=0)).eval()


def tiny_bert() -> BertModel:
    small = {name: value for name, value in SMALL.items() if name in BertConfig().to_dict()}
    return BertModel(BertConfig(**small, max_position_embeddings=80)).eval()


def tiny_mistral3(layers: int = 2) -> Mistral3ForConditionalGeneration:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14}
    text = {"model_type": "mistral", **SMALL, "num_hidden_layers": layers}
    config = Mistral3Config(text_config=text, vision_config={"model_type": "pixtral", **vision})
    return Mistral3ForConditionalGeneration(config).eval()


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
