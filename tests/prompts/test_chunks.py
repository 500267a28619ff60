"""Prompts that are longer than CLIP, in the layouts of their chunks."""

import itertools

import pytest

from sdattn.prompts.chunks import read_long_prompt
from sdattn.prompts.tokens import (
    TruncationWarning,
    read_prompt,
)

TOY = ["<cat-toy>", "<cat-toy>_1", "<cat-toy>_2", "sks", "<one>"]


def chunked_ids(tokenizer, text, ends):
    """77 columns a chunk, the text cut at ``ends``."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bounds = itertools.pairwise([0, *ends, len(ids)])
    chunks = [[518, *ids[start:end], 519] for start, end in bounds]
    return [one for chunk in chunks for one in [*chunk, *[519] * (77 - len(chunk))]]


def test_long_prompts_in_chunks_of_their_own(tokenizer):
    text = "cat dog " * 70  # ends a chunk with a word however it is cut
    read = read_long_prompt(tokenizer, text, 154)
    assert [token.id for token in read.tokens] == chunked_ids(tokenizer, text, [75])
    assert read.find("cat") == [(i + 1 + i // 75 * 2,) for i in range(0, 140, 2)]
    text = "cat dog " * 72 + "turquoise red"  # token 150 is within "turquoise"
    read = read_long_prompt(tokenizer, text, 231, split="tokens")
    assert [token.id for token in read.tokens] == chunked_ids(tokenizer, text, [75, 150])
    assert read.find("<sos>") == [(0, 77, 154)]
    assert read.find("<eos>") == [(76, 153, 159)]
    assert read.find("turquoise red") == [(*range(147, 153), *range(155, 159))]


def test_long_prompts_with_one_start_and_one_end(tokenizer):
    text = "cat dog " * 50
    for n_chunks in (2, 3):
        read = read_long_prompt(tokenizer, text, 75 * n_chunks + 2)
        ids = tokenizer(text, padding="max_length", max_length=75 * n_chunks + 2)["input_ids"]
        assert [token.id for token in read.tokens] == ids
        assert read.find("<sos>") == [(0,)]
        assert read.find("<eos>") == [(101,)]
        assert read.find("<pad>") == [tuple(range(102, 75 * n_chunks + 2))]
    tokenizer.pad_token = "!"  # SD 2.x: the end comes last
    read = read_long_prompt(tokenizer, text, 152)
    assert read.find("<eos>") == [(151,)]
    assert read.find("<pad>") == [tuple(range(101, 151))]


def test_long_prompts_that_end_their_chunks_with_a_sentence(tokenizer):
    """Compel's ``SplitLongTextMode``; the ends were made with compel 2.5.1."""
    text = "cat dog. " * 30  # 3 tokens a sentence: 75 is an end anyhow
    assert read_long_prompt(tokenizer, text, 154) == read_long_prompt(
        tokenizer, text, 154, split="sentences"
    )
    text = "cat dog. cat, " * 10 + "red turquoise " * 6 + "cat"  # 50 + 60 + 1 tokens
    for split, ends in {"tokens": [75], "sentences": [48], "phrases": [50], "words": [71]}.items():
        read = read_long_prompt(tokenizer, text, 154, split=split)
        assert [token.id for token in read.tokens] == chunked_ids(tokenizer, text, ends), split
    for columns in (154, 231):  # a chunk more is empty
        with pytest.raises(ValueError, match=r"at \(49,\) where.*\(78,\) .*split=\"tokens\""):
            read_long_prompt(tokenizer, text, columns)
    with pytest.raises(ValueError, match="split='brutal'.*tokens"):
        read_long_prompt(tokenizer, text, 154, split="brutal")


def test_long_prompts_that_are_not_long_have_empty_chunks(tokenizer):
    read = read_long_prompt(tokenizer, "a cat", 154)  # beside a long negative prompt
    assert [token.id for token in read.tokens] == chunked_ids(tokenizer, "a cat", [2])
    assert read.find("<eos>") == [(3, 78)]
    assert read_long_prompt(tokenizer, "a cat", 77) == read_prompt(tokenizer, "a cat")


def test_long_prompts_can_be_too_long(tokenizer):
    text = "cat " * 160
    for columns, seen in [(154, 150), (152, 150)]:
        with pytest.warns(TruncationWarning, match=f"{columns} tokens.*: (cat, )+cat$"):
            read = read_long_prompt(tokenizer, text, columns)
        assert len(read.seen) == seen
    for columns in (76, 100, 153, 0, -77):
        with pytest.raises(ValueError, match=f"{columns}.*columns"):
            read_long_prompt(tokenizer, text, columns)


def test_long_prompts_know_textual_inversions(tokenizer):
    tokenizer.add_tokens(TOY)
    read = read_long_prompt(tokenizer, "cat " * 74 + "<cat-toy> dog", 154, split="tokens")
    assert read.find("<cat-toy>") == [(75, 78, 79)]
    assert read.find("dog") == [(80,)]
