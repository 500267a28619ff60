"""Tiny tokenizers of the real kinds: CLIP, T5, Gemma, Qwen, Mistral.

Each knows a few words as one token and spells all else in letters or bytes.
"""

import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.processors import TemplateProcessing
from transformers import CLIPTokenizer, PreTrainedTokenizerFast

MERGES = ("c a", "ca t</w>", "d o", "do g</w>", "r e", "re d</w>")  # of CLIP's byte pairs
WORDS = ("a", "cat", "dog", "red", "on", "sofa", "the")
# Qwen2's own, transformers/models/qwen2/tokenization_qwen2.py
QWEN_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# of Qwen3-VL: a message is a text or a list of parts
VISION_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}[SYSTEM_PROMPT]"
    "{% for block in message.content %}{{ block.text }}{% endfor %}[/SYSTEM_PROMPT]{% else %}[INST]"
    "{% for block in message.content %}{{ block.text }}{% endfor %}[/INST]{% endif %}{% endfor %}"
)


def byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes, as byte-level BPE (GPT-2) spells them."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(spare)) for byte in range(256)]


def tiny_tokenizer(max_length: int = 77, merges: Sequence[str] = MERGES) -> CLIPTokenizer:
    """Real CLIP tokenization: "cat" and "dog" are one token, all else falls into letters."""
    symbols = byte_symbols()
    entries = [*symbols, *(s + "</w>" for s in symbols)]
    entries += [pair.replace(" ", "") for pair in merges]
    entries += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    with tempfile.TemporaryDirectory() as folder:  # transformers 4 reads them from files only
        files = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        files[0].write_text(json.dumps(vocabulary))
        files[1].write_text("\n".join(["#version: 0.2", *merges]))
        return CLIPTokenizer(*map(str, files), model_max_length=max_length)


def tiny_t5(max_length: int = 512) -> PreTrainedTokenizerFast:
    """SentencePiece's Unigram: no start, "</s>", then "<pad>"; a word's token holds its space."""
    letters = [chr(code) for code in (*range(33, 127), *range(0xC0, 0x180))]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(letter, -6.0) for letter in letters] + [("▁" + word, -1.0) for word in WORDS]
    backend = Tokenizer(Unigram(pieces, unk_id=2))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always"),
        ]
    )
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],  # as T5's own
    )


def _byte_fallback(specials: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """SentencePiece's BPE as Gemma and older Mistrals have it: spaces are "▁", the rest bytes."""
    letters = [chr(code) for code in range(33, 127)] + ["▁", "\n"]
    merges = [("▁" + word[:i], word[i]) for word in WORDS for i in range(len(word))]
    merges = list(dict.fromkeys(merges))
    entries = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    entries += ["".join(pair) for pair in merges]
    return {entry: number for number, entry in enumerate(dict.fromkeys(entries))}, merges


def tiny_gemma() -> PreTrainedTokenizerFast:
    """ "<bos>" in front and nothing behind; by itself it pads on the left."""
    vocabulary, merges = _byte_fallback(["<pad>", "<eos>", "<bos>", "<unk>"])
    backend = Tokenizer(
        BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
    )


def _byte_level(specials: list[str]) -> Tokenizer:
    symbols = byte_symbols()
    spelled = ["Ġ" + word for word in WORDS] + list(WORDS)
    merges = [(word[:i], word[i]) for word in spelled for i in range(1, len(word))]
    merges = list(dict.fromkeys(merges))
    entries = dict.fromkeys([*symbols, *("".join(pair) for pair in merges)])
    backend = Tokenizer(BPE({entry: number for number, entry in enumerate(entries)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return backend


def tiny_qwen(padding_side: str = "right") -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds nothing by itself; the chat's tokens, and images', are in the
    text."""
    images = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    backend = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *images])
    backend.normalizer = normalizers.NFC()
    backend.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side=padding_side,
        chat_template=CHAT,
        model_max_length=131072,
    )


def tiny_vision_qwen() -> PreTrainedTokenizerFast:
    """With Qwen3-VL's chat."""
    tokenizer = tiny_qwen()
    tokenizer.chat_template = VISION_CHAT
    return tokenizer


def tiny_mistral(padding_side: str = "left") -> PreTrainedTokenizerFast:
    """Byte-level BPE (Tekken) with "<s>" in front."""
    instructions = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]"]
    backend = _byte_level(["<unk>", "<s>", "</s>", "<pad>", *instructions])
    start = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side=padding_side,
        chat_template=MISTRAL_CHAT,
    )


def tiny_glm() -> PreTrainedTokenizerFast:
    """Byte-level BPE with two tokens in front; it pads on the left."""
    backend = _byte_level(["<|endoftext|>", "[gMASK]", "<sop>"])
    starts = [(token, backend.token_to_id(token)) for token in ("[gMASK]", "<sop>")]
    backend.post_processor = TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=starts)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        padding_side="left",
    )


def tiny_bert_tokenizer() -> PreTrainedTokenizerFast:
    """Word pieces in lower case between "[CLS]" and "[SEP]"."""
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    letters += [chr(code) for code in range(0x4E00, 0x4E10)]
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *("##" + one for one in letters)]
    entries += [word for word in WORDS if len(word) > 1]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    backend = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=77,
    )


def tiny_chatglm_tokenizer() -> Any:
    """SentencePiece's BPE; knows a few words, spells all else in letters or bytes. It needs
    sentencepiece."""
    from diffusers.pipelines.kolors import ChatGLMTokenizer
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


# name -> its maker
TINY_TOKENIZERS = {
    "clip": tiny_tokenizer,
    "t5": tiny_t5,
    "gemma": tiny_gemma,
    "qwen": tiny_qwen,
    "qwen-left": lambda: tiny_qwen("left"),
    "mistral": tiny_mistral,
    "glm": tiny_glm,
    "bert": tiny_bert_tokenizer,
    "mistral-right": lambda: tiny_mistral("right"),
}
