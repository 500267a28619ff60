"""A prompt's words and the token columns they own. No torch.

    read_prompt(tokenizer, prompt)  ->  Prompt: its words, its token columns, what was cut off
    Prompt.find("red circle")       ->  one tuple of columns for each occurrence

The columns are those the text encoder sees: special tokens first and last, then padding. Words are
found in the text itself; the tokenizer's character offsets tell which tokens belong to which.
"""

import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SOS, EOS, PAD = "<sos>", "<eos>", "<pad>"
_NO_LIMIT = 10**6  # tokenizers without a limit say 10**30
_JOINERS = "'\u2019-\u2010"  # apostrophes and hyphens, inside a word only: "girl's", "red-haired"


class TruncationWarning(UserWarning):
    """The text encoder reads less than the whole prompt; the message names what it never saw."""


@dataclass(frozen=True)
class Word:
    """A word of a prompt.

    Attributes:
        text: as written in the prompt.
        start, end: character span in the prompt, end exclusive.
        columns: its token columns; empty if the word was cut off.
    """

    text: str
    start: int
    end: int
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Token:
    """A token column.

    Attributes:
        id: the vocabulary's number.
        text: the vocabulary's spelling, ``"circle</w>"``.
        start, end: character span in the prompt; equal for special tokens.
        special: ``"<sos>"``, ``"<eos>"``, ``"<pad>"``, or ``""`` for a piece of the prompt.
    """

    id: int
    text: str
    start: int
    end: int
    special: str = ""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the text encoder sees it.

    Attributes:
        text: the prompt.
        words: its words, in order, also those that were cut off.
        tokens: the token columns, in order.
    """

    text: str
    words: tuple[Word, ...]
    tokens: tuple[Token, ...]

    @property
    def truncated(self) -> tuple[Word, ...]:
        """The words of which the text encoder saw nothing."""
        return tuple(word for word in self.words if not word.columns)

    @property
    def seen(self) -> tuple[Word, ...]:
        """The words of which the text encoder saw at least a piece."""
        return tuple(word for word in self.words if word.columns)

    def find(self, phrase: str) -> list[tuple[int, ...]]:
        """The token columns of each occurrence of a word or phrase, in prompt order.

        Letter case and the spaces between words do not matter. ``"<sos>"``, ``"<eos>"`` and
        ``"<pad>"`` name the special columns, as does the tokenizer's own spelling of them.

        Raises:
            KeyError: the phrase is empty, not in the prompt, or was cut off.
        """
        special = self._special(phrase)
        if special:
            return [special]
        wanted = [part.casefold() for part, _, _ in split_words(phrase)]
        if not wanted:
            raise KeyError(f"Asked for {phrase!r}, which has no word in it.")
        spelled = [word.text.casefold() for word in self.words]
        starts = [i for i in range(len(spelled)) if spelled[i : i + len(wanted)] == wanted]
        if not starts:
            raise KeyError(
                f"{phrase!r} is not in the prompt. Its words are: "
                f"{', '.join(dict.fromkeys(word.text for word in self.words))}."
            )
        found = [self.words[i : i + len(wanted)] for i in starts]
        found = [words for words in found if all(word.columns for word in words)]
        if not found:
            raise KeyError(
                f"{phrase!r} is in the prompt but was cut off: the text encoder reads "
                f"{len(self.tokens)} tokens. Shorten the prompt or move it forward."
            )
        return [_merge(word.columns for word in words) for words in found]

    def _special(self, name: str) -> tuple[int, ...]:
        """Columns of a special name; CLIP pads with the token that it ends with, so the spelling
        ``<|endoftext|>`` names the end only."""
        return tuple(
            i
            for i, token in enumerate(self.tokens)
            if token.special
            and (name == token.special or (name == token.text and token.special != PAD))
        )


def _merge(columns: Any) -> tuple[int, ...]:
    return tuple(sorted({column for group in columns for column in group}))


def split_words(text: str) -> list[tuple[str, int, int]]:
    """The words of a text with their character spans, ``(word, start, end)``.

    A word is a run of letters and digits, with apostrophes and hyphens inside it; a run of other
    signs is a word too; each ideograph is a word of its own.

    >>> [word for word, _, _ in split_words("a girl's red-haired cat, 8k!")]
    ['a', "girl's", 'red-haired', 'cat', ',', '8k', '!']
    """
    kinds = _character_kinds(text)
    words = []
    start = 0
    for i in range(1, len(text) + 1):
        if i < len(text) and kinds[i] == kinds[i - 1] != "ideograph":
            continue
        if kinds[start] != "space":
            words.append((text[start:i], start, i))
        start = i
    return words


def _character_kinds(text: str) -> list[str]:
    kinds = [_kind(char) for char in text]
    for i, char in enumerate(text):
        if kinds[i] == "mark":  # accents, vowel signs, variation selectors, joiners: as before them
            kinds[i] = kinds[i - 1] if i and kinds[i - 1] != "space" else "other"
        inside = 0 < i < len(text) - 1 and kinds[i - 1] == "letter" == _kind(text[i + 1])
        if char in _JOINERS and inside:
            kinds[i] = "letter"
    return kinds


def _kind(char: str) -> str:
    if char.isspace():
        return "space"
    category = unicodedata.category(char)
    if category[0] == "M" or category == "Cf":
        return "mark"
    if category == "Lo" and unicodedata.name(char, "").startswith(("CJK", "HIRAGANA", "KATAKANA")):
        return "ideograph"
    return "letter" if category[0] in "LN" else "other"


def read_prompt(tokenizer: Any, prompt: str, *, max_length: int | None = None) -> Prompt:
    """Tokenize a prompt as Stable Diffusion pipelines do and find its words.

    Args:
        tokenizer: any tokenizer of transformers, fast or slow.
        prompt: the text.
        max_length: token columns, special tokens and padding included;
            ``tokenizer.model_max_length`` by default.

    Returns:
        Prompt: with ``max_length`` tokens.

    Raises:
        ValueError: the prompt has no word in it.

    Warns:
        TruncationWarning: words were cut off; the message names them.
    """
    words = split_words(prompt)
    if not words:
        raise ValueError(f"The prompt {prompt!r} is empty. Write at least one word.")
    max_length = max_length or tokenizer.model_max_length
    tokens = _tokens(tokenizer, prompt, max_length)
    placed = tuple(
        Word(text, start, end, _columns(tokens, prompt, start, end)) for text, start, end in words
    )
    read = Prompt(prompt, placed, tuple(tokens))
    if read.truncated:
        lost = ", ".join(word.text for word in read.truncated)
        warnings.warn(
            f"The text encoder reads {max_length} tokens and the prompt has more. It never saw: "
            f"{lost[:300] + '…' if len(lost) > 300 else lost}",
            TruncationWarning,
            stacklevel=2,
        )
    return read


def _columns(tokens: Sequence[Token], text: str, start: int, end: int) -> tuple[int, ...]:
    """The columns of the tokens that share a character, not a space, with a span."""
    return tuple(
        i
        for i, token in enumerate(tokens)
        if not token.special and text[max(start, token.start) : min(end, token.end)].strip()
    )


def _tokens(tokenizer: Any, prompt: str, max_length: int) -> list[Token]:
    options: dict[str, Any] = {"return_special_tokens_mask": True}
    if max_length < _NO_LIMIT:
        options |= {"padding": "max_length", "max_length": max_length, "truncation": True}
    fast = getattr(tokenizer, "is_fast", False)
    encoded = tokenizer(prompt, return_offsets_mapping=fast, **options)
    ids, is_special = encoded["input_ids"], encoded["special_tokens_mask"]
    spans = encoded["offset_mapping"] if fast else _slow_spans(tokenizer, prompt, ids, is_special)
    spelled = tokenizer.convert_ids_to_tokens(ids)
    content = [i for i, special in enumerate(is_special) if not special]
    first, last = (content[0], content[-1]) if content else (1, 0)
    tokens = []
    for i, number in enumerate(ids):
        special = ""
        if is_special[i]:
            is_eos = i == last + 1 and number == tokenizer.eos_token_id
            special = SOS if i < first else EOS if is_eos else PAD
        start, end = (0, 0) if special else spans[i]
        tokens.append(Token(number, spelled[i], start, end, special))
    return tokens


def _slow_spans(
    tokenizer: Any, prompt: str, ids: Sequence[int], is_special: Sequence[int]
) -> list[tuple[int, int]]:
    """Character spans where the tokenizer tells none, word by word.

    The tokens of the prompt up to the end of each word are counted. That is exact as long as they
    do not change with what follows, which is checked.
    """
    spans = [(0, 0)] * len(ids)
    content = [i for i, special in enumerate(is_special) if not special]
    done = 0
    for _, start, end in split_words(prompt):
        prefix = tokenizer(prompt[:end], add_special_tokens=False)["input_ids"]
        kept = [ids[i] for i in content[: len(prefix)]]
        if prefix[: len(kept)] != kept:
            raise ValueError(
                f"{type(tokenizer).__name__} tells no character offsets, and its tokens of "
                f"{prompt[:end]!r} change with what follows. Use its fast version."
            )
        for i in content[done : len(prefix)]:
            spans[i] = (start, end)
        done = len(prefix)
    return spans
