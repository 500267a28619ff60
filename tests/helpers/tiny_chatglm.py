"""A tiny ChatGLM with its real tokenizer, as Kolors has them; needs sentencepiece."""

import io
import tempfile
from pathlib import Path

import torch
from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig

from helpers.tiny_tokenizers import WORDS


def tiny_chatglm_tokenizer() -> ChatGLMTokenizer:
    """SentencePiece's BPE; knows a few words, spells all else in letters or bytes."""
    from sentencepiece import SentencePieceTrainer

    made = io.BytesIO()
    letters = "".join(map(chr, range(33, 127)))
    SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 20 + [letters]),
        model_writer=made,
        vocab_size=400,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.model")
        file.write_bytes(made.getvalue())
        return ChatGLMTokenizer(str(file))


def tiny_chatglm(width: int = 32) -> ChatGLMModel:
    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=600,
        hidden_size=width,
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
