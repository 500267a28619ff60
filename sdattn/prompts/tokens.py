"""A prompt's words and the token columns that the denoiser gets for them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from ..errors import (
    InvalidTypeError,
    InvalidValueError,
    NotFoundError,
    SdattnWarning,
    did_you_mean,
    warn,
)
from .tokenizing import EOS, SOS, Token, added_words, filled, tokenize, with_vectors
from .words import Source, empty_prompt, merge_spans, split_phrase, split_words


class TruncationWarning(SdattnWarning):
    """The text encoder reads less than the whole prompt; the message names what it never saw."""


@dataclass(frozen=True)
class Word:
    """A word of a prompt.

    Attributes:
        text: as written in the prompt.
        start, end: character span in the prompt, end exclusive.
        columns: token columns; empty if the word was cut off.
    """

    text: str
    start: int
    end: int
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the text encoder sees it.

    Attributes:
        text: the prompt.
        words: its words, in order, including truncated ones.
        tokens: the token columns, in order.
        encoded: for each text encoder the ids of all tokens that it gets, perhaps without padding
            at the end; empty if the text was read in chunks or without a tokenizer.
        encoders: text encoders that have columns of their own, in order, with their numbers of
            columns: ``(("CLIP", 77), ("T5", 256))`` for SD3; empty if all columns are of one.
    """

    text: str
    words: tuple[Word, ...]
    tokens: tuple[Token, ...]
    encoded: tuple[tuple[int, ...], ...] = field(default=(), repr=False, compare=False)
    encoders: tuple[tuple[str, int], ...] = ()

    @property
    def truncated(self) -> tuple[Word, ...]:
        """Words that the text encoder did not see at all."""
        return tuple(word for word in self.words if not word.columns)

    @property
    def seen(self) -> tuple[Word, ...]:
        """Words that the text encoder saw at least a piece of."""
        return tuple(word for word in self.words if word.columns)

    def by_encoder(self) -> dict[str, tuple["Prompt", range]]:
        """Return the columns of each of several text encoders, and the prompt with those alone."""
        found = {}
        first = 0
        for name, number in self.encoders:
            own = range(first, first + number)
            first = own.stop
            words = []
            for word in self.words:
                columns = tuple(column for column in word.columns if column in own)
                words.append(replace(word, columns=columns))
            found[name] = replace(self, words=tuple(words), encoders=()), own
        return found

    def find(self, phrase: str) -> list[tuple[int, ...]]:
        """Return the token columns of each occurrence of a word or phrase, in prompt order.

        Letter case and spaces do not matter. ``"<sos>"``, ``"<eos>"``, ``"<pad>"`` and
        ``"<template>"`` name the special columns, as does the tokenizer's own spelling of the first
        two.

        Raises:
            KeyError: the phrase is empty, not in the prompt, or was cut off.
            TypeError: it is no text.
        """
        if not isinstance(phrase, str):
            raise InvalidTypeError(f"{phrase!r} is no text: pass a word or phrase of the prompt.")
        special = self._special(phrase)
        if special:
            return [special]
        asked = split_phrase(phrase)
        if not asked:
            raise NotFoundError(f"Asked for {phrase!r}, which contains no word.")
        found = self._occurrences(asked)
        if not found:
            if all(self._occurrences([word]) for word in asked):
                raise NotFoundError(
                    f"The words of {phrase!r} are in the prompt, but not next to each other in "
                    f"this order. Ask for each alone: {', '.join(map(repr, asked))}."
                )
            known = dict.fromkeys(word.text for word in self.words)
            raise NotFoundError(
                f"{phrase!r} is not in the prompt. Its words are: "
                f"{', '.join(known)}.{did_you_mean(phrase, known)}"
            )
        found = [words for words in found if all(word.columns for word in words)]
        if not found:
            raise NotFoundError(
                f"{phrase!r} is in the prompt but was cut off: the text encoder reads "
                f"{len(self.tokens)} tokens. Shorten the prompt or move it forward."
            )
        return [_merge(word.columns for word in words) for words in found]

    def _occurrences(self, asked: list[str]) -> list[tuple[Word, ...]]:
        """Return the runs of whole words made of these parts."""
        # A word may have several parts (red-haired), so whole words are searched among all parts:
        # an occurrence must begin and end where a word does.
        parts = list[str]()
        owners = [-1]
        for i, word in enumerate(self.words):
            spelled = split_phrase(word.text)
            parts += spelled
            owners += [i] * len(spelled)
        owners.append(-1)
        found = []
        for start in range(len(parts) - len(asked) + 1):
            end = start + len(asked)
            whole = owners[start] != owners[start + 1] and owners[end] != owners[end + 1]
            if whole and parts[start:end] == asked:
                found.append(self.words[owners[start + 1] : owners[end] + 1])
        return found

    def _special(self, name: str) -> tuple[int, ...]:
        """Return the columns of a special name; CLIP's end token names only the end, not the
        padding."""
        found = []
        for i, token in enumerate(self.tokens):
            is_spelled = name == token.text and token.special in (SOS, EOS)
            if token.special and (name == token.special or is_spelled):
                found.append(i)
        return tuple(found)


def _merge(columns: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted(set[int]().union(*columns)))


_SPECIAL_PIECE = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|")


def read_prompt(tokenizer: Any, prompt: str, *, max_length: int | None = None) -> Prompt:
    """Tokenize a prompt as Stable Diffusion pipelines do and find its words.

    Args:
        tokenizer: any tokenizer of transformers, fast or slow. A token that was added to it is one
            word, ``"<cat-toy>"``, even if it has several vectors, ``"<cat-toy>_1"`` and so on.
        prompt: the text.
        max_length: token columns, including special tokens and padding (default:
            ``tokenizer.model_max_length``).

    Raise ValueError if the prompt has no word; warn with :class:`TruncationWarning` of words cut
    off.
    """
    source = with_vectors(tokenizer, Source.of(prompt))
    read = read_source(tokenizer, source, **filled(max_length or tokenizer.model_max_length))
    warn_of_truncation(read)
    return read


def warn_of_truncation(prompt: Prompt) -> None:
    """Warn with :class:`TruncationWarning` of the words that were cut off, if any."""
    if prompt.truncated:
        lost = ", ".join(word.text for word in prompt.truncated)
        warn(
            f"The text encoder reads {len(prompt.tokens)} tokens and the prompt has more. It never "
            f"saw: {lost[:300] + '…' if len(lost) > 300 else lost}",
            TruncationWarning,
        )


def read_source(
    tokenizer: Any,
    source: Source,
    *,
    keep: Callable[[int], Sequence[int]] | None = None,
    **options: Any,
) -> Prompt:
    """Tokenize a text that contains a prompt and find the prompt's words; raise ValueError if it
    has none. ``keep(n)`` returns which of ``n`` tokens become columns (default: all)."""
    tokens = tokenize(tokenizer, source, **options)
    encoded = tuple(token.id for token in tokens)
    if keep is not None:
        tokens = [tokens[i] for i in keep(len(tokens))]
    return replace(place_words(tokenizer, source, tokens), encoded=(encoded,))


def place_words(tokenizer: Any, source: Source, tokens: Sequence[Token]) -> Prompt:
    """Place a prompt's words on its columns, see :func:`place`."""
    return place(source.prompt, tokens, added_words(tokenizer, source))


def place(text: str, tokens: Sequence[Token], whole: Sequence[tuple[int, int]] = ()) -> Prompt:
    """Place a text's words on its columns: a word owns the tokens that share a character with it.
    ``whole`` are spans that are one word."""
    words = split_words(text, whole)
    if not words:
        raise empty_prompt(text)
    # The word of each character; a token belongs to every word that it shares a character with.
    owner: dict[int, int] = {}
    for i, (_, start, end) in enumerate(words):
        for char in range(start, end):
            if not text[char].isspace():
                owner[char] = i
    columns: list[list[int]] = [[] for _ in words]
    for column, token in enumerate(tokens):
        if not token.special:
            for i in {owner[char] for char in range(token.start, token.end) if char in owner}:
                columns[i].append(column)
    placed = (Word(*word, tuple(own)) for word, own in zip(words, columns, strict=True))
    return Prompt(text, tuple(placed), tuple(tokens))


def read_labels(labels: Mapping[str, Sequence[int]], n_columns: int) -> Prompt:
    """Return a prompt known only by its columns, for text states that were made elsewhere.

    ``labels`` are token columns by name, counted from 0, of ``n_columns`` in all.

    Each label is a word. Raise ValueError for none, or one without a letter or with a bad column.

    >>> read_labels({"cat": [2], "red dog": [4, 5]}, 77).find("red dog")
    [(4, 5)]
    """
    if not labels:
        raise InvalidValueError(
            'There are no labels. Pass some, for example {"cat": [2], "red dog": [4, 5]}.'
        )
    words: list[Word] = []
    tokens = [Token(-1, f"[{column}]", 0, 0, "") for column in range(n_columns)]
    for label, columns in labels.items():
        text, own = _checked_label(label, columns, n_columns)
        start = words[-1].end + 1 if words else 0
        words.append(Word(text, start, start + len(text), own))
        for column in own:
            tokens[column] = Token(-1, text, start, start + len(text), "")
    return Prompt(" ".join(word.text for word in words), tuple(words), tuple(tokens))


def read_pieces(pieces: Sequence[str]) -> Prompt:
    """Return a prompt known only by its pieces, one for each token column.

    They are spelled as tokenizers do: ``"▁cat"`` and ``"Ġcat"`` begin a word, ``"cat</w>"`` ends
    one, ``"##s"`` goes on with one; if no piece has such a mark, each is a word. Pieces in ``<>``
    or ``[]`` are special.

    For a model whose tokenizer is none of transformers', see :func:`sdattn.heatmaps`.

    >>> read_pieces(["<s>", "▁a", "▁red", "▁umb", "rella", "</s>"]).find("umbrella")
    [(3, 4)]

    Raises:
        ValueError: no piece is of a word.
    """
    plain = [piece for piece in pieces if not _SPECIAL_PIECE.fullmatch(piece)]
    ends = any(piece.endswith("</w>") for piece in plain)
    begins = any(piece.startswith(("▁", "Ġ")) for piece in plain)
    goes_on = any(piece.startswith("##") for piece in plain)
    text = ""
    tokens: list[Token] = []
    is_open = False  # the word of the piece before goes on
    for piece in pieces:
        if piece not in plain:
            tokens.append(Token(-1, piece, len(text), len(text), piece))
            is_open = False
            continue
        if begins:
            is_open = not piece.startswith(("▁", "Ġ"))
        elif goes_on:
            is_open = piece.startswith("##")
        bare = piece.lstrip("▁Ġ").removeprefix("##").removesuffix("</w>")
        text += bare if is_open or not text else f" {bare}"
        tokens.append(Token(-1, piece, len(text) - len(bare), len(text), ""))
        is_open = ends and not piece.endswith("</w>")
    return place(text, tokens)


def _checked_label(label: Any, columns: Any, n_columns: int) -> tuple[str, tuple[int, ...]]:
    try:
        own = _merge([[-1 if isinstance(column, bool) else index(column) for column in columns]])
    except TypeError:
        own = ()
    text = " ".join(label.split()) if isinstance(label, str) else ""
    if not text or not own or own[0] < 0 or own[-1] >= n_columns:
        raise InvalidValueError(
            f"The label {label!r} has the token columns {columns!r}. Pass a word or phrase and a "
            f"list of whole numbers from 0 to {n_columns - 1}, for text states of {n_columns} "
            "columns."
        )
    return text, own


def join_prompts(parts: Sequence[Prompt], encoders: Sequence[str] = ()) -> Prompt:
    """Join readings of one text that follow each other on the token axis, without a warning; raise
    ValueError if the texts differ. ``encoders`` name the text encoder of each part, if they differ.

    SD3's text states are 77 columns of CLIP and then 256 of T5: a word owns columns of both.
    """
    texts = list(dict.fromkeys(part.text for part in parts))
    if len(texts) != 1:
        raise InvalidValueError(f"Asked to join readings of {texts}. Pass readings of one text.")
    (text,) = texts
    # All words of all parts, with their columns shifted to the part's position; then overlapping
    # words become one.
    words = []
    tokens: tuple[Token, ...] = ()
    encoded: tuple[tuple[int, ...], ...] = ()
    for part in parts:
        shift = len(tokens)
        for word in part.words:
            words.append((word.start, word.end, [shift + column for column in word.columns]))
        tokens += part.tokens
        encoded += part.encoded
    joined = []
    for start, end in merge_spans((start, end) for start, end, _ in words):
        columns = _merge(own for s, e, own in words if start <= s and e <= end)
        joined.append(Word(text[start:end], start, end, columns))
    of = tuple((name, len(part.tokens)) for name, part in zip(encoders, parts, strict=False))
    return Prompt(text, tuple(joined), tokens, encoded, of)
