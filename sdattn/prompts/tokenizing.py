import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from ..errors import InvalidValueError
from .words import Source, merge_spans, split_words

SOS = "<sos>"
EOS = "<eos>"
PAD = "<pad>"
TEMPLATE = "<template>"
NO_LIMIT = 10**6  # tokenizers without a limit have 10**30


@dataclass(frozen=True)
class Token:
    """A token column.

    Attributes:
        id: number in the vocabulary; -1 if there is no token.
        text: spelling in the vocabulary, ``"cat</w>"``.
        start, end: character span in the prompt; equal for special tokens.
        special: ``"<sos>"``, ``"<eos>"``, ``"<pad>"``, ``"<template>"`` for the text around the
            prompt, or ``""`` for a piece of the prompt.
    """

    id: int
    text: str
    start: int
    end: int
    special: str


def tokenize(tokenizer: Any, source: Source, **options: Any) -> list[Token]:
    """Return the tokens of a text, with their spans in the prompt and the special ones marked;
    ``options`` are the tokenizer's: ``padding``, ``max_length``, ``truncation`` and so on.

    Added tokens before the text are its start, those after it its end; tokens outside the attention
    mask are padding. Raise ValueError for a slow tokenizer whose tokens depend on the next words.
    """
    fast = getattr(tokenizer, "is_fast", False)
    asked = {"return_special_tokens_mask": True, "return_attention_mask": True}
    encoded = tokenizer(source.text, return_offsets_mapping=fast, **asked, **options)
    ids = encoded["input_ids"]
    is_special = encoded["special_tokens_mask"]
    content = [i for i, special in enumerate(is_special) if not special]
    spans = encoded["offset_mapping"] if fast else _slow_spans(tokenizer, source, ids, content)
    tokens = []
    for i, spelled in enumerate(tokenizer.convert_ids_to_tokens(ids)):
        span = None if is_special[i] else source.span(*spans[i])
        special = ""
        if not encoded["attention_mask"][i]:
            special = PAD
        elif is_special[i]:
            first = i < content[0] if content else ids[i] == tokenizer.bos_token_id
            special = SOS if first else EOS
        elif span is None and spans[i][0] < spans[i][1]:
            special = TEMPLATE
        tokens.append(Token(ids[i], spelled, *(span or (0, 0)), special))
    return tokens


def filled(max_length: int) -> dict[str, Any]:
    if max_length >= NO_LIMIT:
        return {}
    return {"padding": "max_length", "max_length": max_length, "truncation": True}


def with_vectors(tokenizer: Any, source: Source) -> Source:
    """Write out the vectors of textual inversion, as diffusers does before it tokenizes.

    "<cat-toy>" becomes "<cat-toy> <cat-toy>_1 <cat-toy>_2". Source: diffusers,
    loaders/textual_inversion.py, ``maybe_convert_prompt``.
    """
    added = tokenizer.get_added_vocab()
    for token in set(tokenizer.tokenize(source.text)):
        if token in added:
            more = takewhile(added.__contains__, (f"{token}_{i}" for i in count(1)))
            source = source.replace(token, " ".join([token, *more]))
    return source


def added_words(tokenizer: Any, source: Source) -> list[tuple[int, int]]:
    """Return the prompt's spans of tokens added to the vocabulary, without special tokens."""
    found = []
    for start, end in _added_spans(tokenizer, source.text):
        piece = source.text[start:end]
        start += len(piece) - len(piece.lstrip())  # an added token may take the space before it
        found.append(source.span(start, start + len(piece.strip())))
    return merge_spans(span for span in found if span)


def _added_spans(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    known = tokenizer.added_tokens_decoder.values()
    added = {token.content for token in known if not token.special}
    if not added:
        return []
    if not getattr(tokenizer, "is_fast", False):
        any_of = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
        return [match.span() for match in re.finditer(any_of, text)]
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    encoded = tokenizer(text, **options)
    spelled = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    pairs = zip(spelled, encoded["offset_mapping"], strict=True)
    return [(start, end) for token, (start, end) in pairs if token in added]


def _slow_spans(
    tokenizer: Any, source: Source, ids: Sequence[int], content: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the spans in the text for a tokenizer that gives none, by counting the tokens up to
    the end of each word; check that they do not change with the text after them."""
    text = source.text
    added = _added_spans(tokenizer, source.text)
    ends = {end for _, _, end in split_words(text, added)}.union(*added)
    spans = [(0, 0)] * len(ids)
    start = done = 0
    for end in sorted(ends - {0}):
        prefix = tokenizer(text[:end], add_special_tokens=False)["input_ids"]
        kept = [ids[i] for i in content[: len(prefix)]]
        if prefix[: len(kept)] != kept and not _differ_by_word_end(tokenizer, prefix, kept):
            raise InvalidValueError(
                f"{type(tokenizer).__name__} gives no character offsets, and its tokens of "
                f"{text[:end]!r} change with the text after it. Use its fast version."
            )
        for i in content[done : len(prefix)]:
            spans[i] = (end - len(text[start:end].lstrip()), end)
        start = end
        done = len(prefix)
    return spans


def _differ_by_word_end(tokenizer: Any, prefix: Sequence[int], kept: Sequence[int]) -> bool:
    """Check that the last of these tokens alone differ, and only because CLIP's says that a word
    ends there: where Chinese is not separated, a text is one word."""
    if prefix[:-1] != kept[:-1]:
        return False
    ending, going_on = tokenizer.convert_ids_to_tokens([prefix[-1], kept[-1]])
    return bool(ending == f"{going_on}</w>")
