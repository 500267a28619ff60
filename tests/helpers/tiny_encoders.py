"""Tiny text encoders of the real classes, with random weights, for the tokenizers of
tiny_tokenizers."""

from transformers import (
    BertConfig,
    BertModel,
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
    T5Config,
    T5EncoderModel,
)
from transformers.processing_utils import ProcessorMixin

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "intermediate_size": 16, "head_dim": 8, "vocab_size": 400}


def tiny_t5_encoder(width: int = 32) -> T5EncoderModel:
    config = T5Config(vocab_size=400, d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return T5EncoderModel(config).eval()


def tiny_gemma_encoder() -> Gemma2Model:
    return Gemma2Model(Gemma2Config(**SMALL)).eval()


def tiny_gemma3() -> Gemma3ForConditionalGeneration:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=dict(SMALL), vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


def tiny_qwen_vl(tokenizer=None) -> Qwen2_5_VLForConditionalGeneration:
    """For images with a tokenizer that has their tokens."""
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"intermediate_size": 16, "fullatt_block_indexes": [0]}
    rope = {"mrope_section": [1, 1, 2], "type": "default", "rope_type": "default"}
    text = {k: v for k, v in SMALL.items() if k != "head_dim"} | {"rope_scaling": rope}
    names = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"}
    names |= {"vision_end_token_id": "<|vision_end|>", "video_token_id": "<|video_pad|>"}
    ids = {key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items() if tokenizer}
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


class TextProcessor(ProcessorMixin):
    """Pixtral's processor needs torchvision; this is its base with the text half only."""

    attributes = ("tokenizer",)
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer, chat_template=None):
        super().__init__(tokenizer, chat_template=chat_template)
