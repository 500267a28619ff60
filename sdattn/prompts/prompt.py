"""`Prompt`: a prompt as the text encoder sees it, with its columns by name."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..errors import InvalidTypeError, NotFoundError, did_you_mean
from .tokenizing import EOS, SOS, Token
from .words import find_part, split_phrase

_PART = re.compile(r"<(?P<kind>characters|columns) (?P<first>\d+):(?P<end>\d+)>", re.ASCII)


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
        own: columns that count; None for all.
    """

    text: str
    words: tuple[Word, ...]
    tokens: tuple[Token, ...]
    encoded: tuple[tuple[int, ...], ...] = field(default=(), repr=False, compare=False)
    encoders: tuple[tuple[str, int], ...] = ()
    own: range | None = field(default=None, repr=False, compare=False)

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
            found[name] = replace(self, words=tuple(words), encoders=(), own=own), own
        return found

    def find(self, phrase: str) -> list[tuple[int, ...]]:
        """Return the token columns of each occurrence of a word or phrase, in prompt order.

        Letter case and spaces do not matter, nor how accents are written (NFC, NFD). ``"<sos>"``,
        ``"<eos>"``, ``"<pad>"`` and ``"<template>"`` name the special columns, as does the
        tokenizer's own spelling of the first two.

        For a part of a word: ``"<characters 2:5>"`` are all tokens with one of these characters of
        the prompt, counted from 0, and ``"<columns 2:4>"`` the token columns 2 and 3.

        Raises:
            KeyError: the phrase is empty, not in the prompt, only a part of a word, or was cut off;
                characters or columns that do not exist.
            TypeError: it is no text.
        """
        if not isinstance(phrase, str):
            raise InvalidTypeError(f"{phrase!r} is no text: pass a word or phrase of the prompt.")
        named = self._special(phrase) or self._part(phrase)
        if named:
            return [named]
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
            inside = find_part(self.text, phrase.strip())
            how = self._parts(inside) if inside else did_you_mean(phrase, known).strip()
            which = "only a part of a word of" if inside else "not in"
            words = ", ".join(known)
            text = f"{phrase!r} is {which} the prompt. Its words are: {words}. {how}"
            raise NotFoundError(text.strip())
        found = [words for words in found if all(word.columns for word in words)]
        if not found:
            raise NotFoundError(
                f"{phrase!r} is in the prompt but was cut off: the text encoder reads "
                f"{len(self.tokens)} tokens. Shorten the prompt or move it forward."
            )
        return [merged(word.columns for word in words) for words in found]

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

    def label(self, phrase: str) -> str:
        """Return what a phrase is called next to its map: itself, or the characters that it
        names."""
        part = _PART.fullmatch(phrase)
        if part is None or part["kind"] == "columns":
            return phrase
        return self.text[int(part["first"]) : int(part["end"])].strip()

    def _part(self, name: str) -> tuple[int, ...]:
        """Return the columns of a name of characters or of columns; none for any other name."""
        part = _PART.fullmatch(name)
        if part is None:
            return ()
        kind = part["kind"]
        first = int(part["first"])
        end = int(part["end"])
        number = len(self.text if kind == "characters" else self.tokens)
        if not first < end <= number:
            raise NotFoundError(
                f"Asked for {name!r} of a prompt with {number} {kind}. They count from 0, and the "
                f"second number is the first after them: '<{kind} 0:{number}>' are all."
            )
        if kind == "columns":
            found = [column for column in range(first, end) if self._counts(column)]
        else:
            found = self._with_characters(first, end)
        if not found:
            raise NotFoundError(
                f"Asked for {name!r}, {self.text[first:end]!r}, of which no token has any: it is a "
                f"space or was cut off, since the text encoder reads {len(self.tokens)} tokens."
            )
        return tuple(found)

    def _with_characters(self, first: int, end: int) -> list[int]:
        found = []
        for i, token in enumerate(self.tokens):
            has_some = token.start < end and first < token.end
            if has_some and not token.special and self._counts(i):
                found.append(i)
        return found

    def _parts(self, spans: Sequence[tuple[int, int]]) -> str:
        """Return how to ask for parts of words."""
        parts = []
        for start, end in spans:
            columns = self._with_characters(start, end)
            parts.append(f"'<characters {start}:{end}>' (token columns {columns or 'cut off'})")
        return (
            f"Ask for all tokens that have one of its characters, {' or '.join(parts)}; for token "
            "columns, as in '<columns 1:3>'; or for a whole word."
        )

    def _counts(self, column: int) -> bool:
        return self.own is None or column in self.own

    def _special(self, name: str) -> tuple[int, ...]:
        """Return the columns of a special name; CLIP's end token names only the end, not the
        padding."""
        found = []
        for i, token in enumerate(self.tokens):
            if not self._counts(i):
                continue
            is_spelled = name == token.text and token.special in (SOS, EOS)
            if token.special and (name == token.special or is_spelled):
                found.append(i)
        return tuple(found)


def merged(columns: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Return columns of several words, each once, in order."""
    return tuple(sorted(set[int]().union(*columns)))
