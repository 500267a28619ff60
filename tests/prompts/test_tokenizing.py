"""Tokenizers of every kind, fast and slow: the same words, the same columns."""

import pytest
from helpers.tiny_tokenizers import TINY_TOKENIZERS, tiny_qwen
from tokenizers import AddedToken
from tokenizers.processors import ByteLevel

try:
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy
except ImportError:  # transformers 4
    from transformers import BertTokenizer as BertTokenizerLegacy

from sdattn.prompts.tokens import (
    TruncationWarning,
    read_prompt,
    read_source,
)
from sdattn.prompts.words import Source


def slow_tokenizer(folder, max_length):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += ["a", "cat", "tur", "##quo", "##ise", "dog", ",", "'", "s"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerLegacy(str(folder / "vocab.txt"), model_max_length=max_length)
    assert not tokenizer.is_fast
    return tokenizer


def test_a_slow_tokenizer_gives_the_same_columns(tmp_path):
    tokenizer = slow_tokenizer(tmp_path, 12)
    read = read_prompt(tokenizer, "a cat's turquoise, dog")
    assert [(word.text, word.columns) for word in read.words] == [
        ("a", (1,)),
        ("cat's", (2, 3, 4)),
        ("turquoise", (5, 6, 7)),
        (",", (8,)),
        ("dog", (9,)),
    ]
    with pytest.warns(TruncationWarning, match="never saw: cat, dog"):
        short = read_prompt(tokenizer, "a cat turquoise, dog a turquoise a cat dog", max_length=14)
    assert [word.columns for word in short.words][-4:] == [(9, 10, 11), (12,), (), ()]


def test_a_slow_tokenizer_knows_templates_and_added_tokens(tmp_path):
    tokenizer = slow_tokenizer(tmp_path, 20)
    tokenizer.add_tokens(["<toy>", "<toy>_1"])
    read = read_prompt(tokenizer, "a <toy>, cat")
    assert [(word.text, word.columns) for word in read.words] == [
        ("a", (1,)),
        ("<toy>", (2, 3)),
        (",", (4,)),
        ("cat", (5,)),
    ]
    source = Source.of("turquoise dog").within("dog, cat ", ", a cat")
    read = read_source(tokenizer, source, padding="max_length", max_length=14, truncation=True)
    assert read.find("turquoise dog") == [(4, 5, 6, 7)]
    assert read.find("<template>") == [(1, 2, 3, 8, 9, 10)]
    assert read.find("<eos>") == [(11,)]


class LastWordOtherwise(BertTokenizerLegacy):
    """A slow tokenizer that has another token, ``last``, where a text ends."""

    last = ""

    def _tokenize(self, text, *given, **more):
        return [*super()._tokenize(text, *given, **more)[:-1], self.last]


@pytest.mark.parametrize("last", ["a", "dog"])  # before and after "cat" in the vocabulary
def test_a_slow_tokenizer_whose_tokens_change_with_the_text_after_them_is_refused(tmp_path, last):
    slow_tokenizer(tmp_path, 12)
    tokenizer = LastWordOtherwise(str(tmp_path / "vocab.txt"), model_max_length=12)
    tokenizer.last = last
    assert read_prompt(tokenizer, "cat").find("cat") == [(1,)]
    with pytest.raises(ValueError, match="tokens of 'cat' change with the text after it"):
        read_prompt(tokenizer, "cat, cat")


@pytest.mark.parametrize("kind", TINY_TOKENIZERS)
@pytest.mark.parametrize(
    "prompt",
    [
        "a red cat on the sofa",
        "  A turquoise Cat, a dog (on a  cat's SOFA)! ",
        "un café crème, 😀 cat\n",
        "一只 cat 红色的猫",
        'the cat\'s red-haired dog; 8k, "art"',
        "a cat 😀😀 and 👩‍🚀, ok",
        "कुत्ता और cat",
        "path/to\\cat <b>&amp;",
    ],
)
def test_every_tokenizer_spells_a_word_by_its_columns(kind, prompt):
    tokenizer = TINY_TOKENIZERS[kind]()
    read = read_prompt(tokenizer, prompt, max_length=77)
    assert len(read.tokens) == 77
    ids = tokenizer(prompt, padding="max_length", max_length=77)["input_ids"]
    assert [token.id for token in read.tokens] == ids
    assert "".join(word.text for word in read.words) == "".join(prompt.split())
    for word in read.words:
        assert prompt[word.start : word.end] == word.text
        spelled = tokenizer.decode([ids[i] for i in word.columns])
        unknown = tokenizer.unk_token or "<unk>"
        assert unknown in spelled or "".join(spelled.split()).lower() == word.text.lower()
    # No token of the prompt is left over, but for white space.
    owned = {column for word in read.words for column in word.columns}
    for i, token in enumerate(read.tokens):
        assert token.special or i in owned or not prompt[token.start : token.end].strip()


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("clip", ["<sos>"], ["<eos>", "<pad>", "<pad>", "<pad>"]),
        ("t5", [], ["<eos>", "<pad>", "<pad>", "<pad>", "<pad>"]),
        ("gemma", ["<pad>"] * 4 + ["<sos>"], []),
        ("qwen", [], ["<pad>"] * 5),
        ("qwen-left", ["<pad>"] * 5, []),
        ("mistral", ["<pad>"] * 4 + ["<sos>"], []),
        ("mistral-right", ["<sos>"], ["<pad>"] * 4),
    ],
)
def test_special_columns_of_every_tokenizer(kind, before, after):
    read = read_prompt(TINY_TOKENIZERS[kind](), "a red cat", max_length=8)
    assert [token.special for token in read.tokens] == [*before, "", "", "", *after]
    assert read.find("a red cat") == [(len(before), len(before) + 1, len(before) + 2)]


@pytest.mark.parametrize("kind", TINY_TOKENIZERS)
def test_every_tokenizer_tells_what_it_cut_off(kind):
    tokenizer = TINY_TOKENIZERS[kind]()
    added = tokenizer.num_special_tokens_to_add()
    prompt = " ".join(["a", *["cat"] * (5 - added), "dog", "red"])
    with pytest.warns(TruncationWarning, match="6 tokens.*: dog, red$"):
        read = read_prompt(tokenizer, prompt, max_length=6)
    assert [word.text for word in read.truncated] == ["dog", "red"]


def test_added_tokens_may_take_the_space_before_them(tokenizer):
    tokenizer.add_tokens([AddedToken("<toy>", lstrip=True, rstrip=True)])
    read = read_prompt(tokenizer, "a  <toy> cat")
    assert [(word.text, word.start) for word in read.words] == [("a", 0), ("<toy>", 3), ("cat", 9)]
    assert read.find("<toy>") == [(2,)]


def test_a_piece_without_width_is_no_template():
    """RoBERTa's tokenizer cuts the spaces off its offsets, so a lone space spans nothing."""
    tokenizer = tiny_qwen()
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    read = read_prompt(tokenizer, "cat  dog", max_length=4)
    assert [(token.text, token.special) for token in read.tokens[:3]] == [
        ("cat", ""),
        ("Ġ", ""),
        ("Ġdog", ""),
    ]
    assert [(word.text, word.columns) for word in read.words] == [("cat", (0,)), ("dog", (2,))]
    with pytest.raises(KeyError, match="<template>"):
        read.find("<template>")
