"""Text before tokenizing: its words, and the rewriting from a prompt to the tokenizer's input."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import InvalidValueError

_CLOSED_CLASSES = """
a an the this that these those some any each every no all both such
i you he she it we they me him her us them my your his its our their
who whom whose which what
of in on at by with without within from to into onto upon off out over under above below
between among through across behind beside beneath around near for about against along as
than like up down before after during until
and or but nor so yet if while when where because though not very
is are was were be been being am has have had having do does did doing
will would can could shall should may might must there here
"""
FUNCTION_WORDS = frozenset(_CLOSED_CLASSES.split())  # in English
_COLOURS_AND_PLACES = """
red orange yellow green blue purple violet pink brown black white gray grey golden gold silver
beige cyan magenta teal turquoise crimson scarlet maroon navy olive colorful colourful
left right top bottom front back side middle center centre next close far
photo photograph image drawing painting illustration background foreground
"""
_NOT_THINGS = frozenset(("picture", *_COLOURS_AND_PLACES.split()))
_JOINERS = "'\u2019-\u2010"  # apostrophes and hyphens, inside a word only: "girl's", "red-haired"

ZERO_WIDTH_SPACE = "\u200b"  # between words of scripts that are written without spaces


@dataclass(frozen=True)
class Source:
    """A prompt on its way to the tokenizer: rewritten, perhaps with a text around it.

    Attributes:
        prompt: the prompt as written.
        text: the tokenizer's input.
        origins: for each character of ``text``, the index of the prompt's character that it came
            from, -1 around the prompt.

    >>> source = Source.of(" Red cat").strip().lower().within("draw: ", "!")
    >>> source.text, source.span(6, 9)
    ('draw: red cat!', (1, 4))
    """

    prompt: str
    text: str
    origins: tuple[int, ...]

    @classmethod
    def of(cls, prompt: str) -> Source:
        return cls(prompt, prompt, tuple(range(len(prompt))))

    def lower(self) -> Source:
        """Return it in lower case, which can be longer: "İ" becomes two characters."""
        # Only the final sigma looks at its neighbours, and it stays one character.
        origins = list[int]()
        for origin, char in zip(self.origins, self.text, strict=True):
            origins += [origin] * len(char.lower())
        return Source(self.prompt, self.text.lower(), tuple(origins))

    def strip(self) -> Source:
        start = len(self.text) - len(self.text.lstrip())
        text = self.text.strip()
        return Source(self.prompt, text, self.origins[start : start + len(text)])

    def replace(self, old: str, new: str) -> Source:
        """Replace every ``old`` by ``new``, which begins with it; the rest belongs to its end."""
        origins: list[int] = []
        start = 0
        while (found := self.text.find(old, start)) >= 0:
            behind = found + len(old)
            origins += self.origins[start:behind]
            origins += [self.origins[behind - 1]] * (len(new) - len(old))
            start = behind
        origins += self.origins[start:]
        return Source(self.prompt, self.text.replace(old, new), tuple(origins))

    def within(self, before: str, after: str) -> Source:
        around = (-1,) * len(before), (-1,) * len(after)
        origins = around[0] + self.origins + around[1]
        return Source(self.prompt, before + self.text + after, origins)

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the span in the prompt that ``text[start:end]`` came from, or None."""
        found = [origin for origin in self.origins[start:end] if origin >= 0]
        return (min(found), max(found) + 1) if found else None


def is_content_word(text: str) -> bool:
    """Check whether a word has a letter or a digit and is not one of :data:`FUNCTION_WORDS`
    (English).

    >>> [word for word in ("A", "cat", ",", "of", "8k") if is_content_word(word)]
    ['cat', '8k']
    """
    return any(map(str.isalnum, text)) and text.casefold() not in FUNCTION_WORDS


def name_things(words: Sequence[str]) -> list[int]:
    """Return the numbers of a prompt's words that likely name a thing in the image (English).

    No part of speech is known. A thing is the last of consecutive content words, since adjectives
    come before their noun; words for colours, places and kinds of images do not count, and a word
    in "-ing" after another counts as a verb.

    >>> words = "a photo of a big red cat sitting left of a blue star".split()
    >>> [words[i] for i in name_things(words)]
    ['cat', 'star']
    """
    things: list[int] = []
    before = False  # whether only content words stand between the last of ``things`` and this word
    for i, word in enumerate(map(str.casefold, words)):
        if not is_content_word(word):
            before = False
        elif word not in _NOT_THINGS and not (before and word.endswith("ing")):
            things[len(things) - before :] = [i]
            before = True
    return things


def split_words(text: str, whole: Sequence[tuple[int, int]] = ()) -> list[tuple[str, int, int]]:
    """Return the words of a text with their character spans, ``(word, start, end)``.

    A word is a run of letters and digits, with apostrophes and hyphens inside it, a run of other
    signs, an ideograph, or one of the ``whole`` spans with the letters adjoining it. Text without
    spaces (Thai, Lao, Khmer, Burmese) is one word, unless zero-width spaces (U+200B) divide it.

    >>> [word for word, _, _ in split_words("a girl's red-haired cat, 8k!")]
    ['a', "girl's", 'red-haired', 'cat', ',', '8k', '!']
    >>> [word for word, _, _ in split_words("a <cat-toy>, red", whole=[(2, 11)])]
    ['a', '<cat-toy>', ',', 'red']
    """
    kinds = _character_kinds(text)
    inner = set[int]().union(*(range(start + 1, end) for start, end in whole))
    edges = set[int]().union(*whole)
    words = []
    start = 0
    for i in range(1, len(text) + 1):
        if i < len(text):
            is_one = kinds[i] != "ideograph" or _kind(text[i]) == "mark"
            alike = kinds[i] == kinds[i - 1] and is_one
            cut = i in edges and not kinds[i] == kinds[i - 1] == "letter"
            if i in inner or (alike and not cut):
                continue
        if kinds[start] != "space":
            words.append((text[start:i], start, i))
        start = i
    return words


def split_phrase(text: str) -> list[str]:
    """Return the parts by which a phrase is looked up: words :func:`folded`, other signs one by
    one.

    >>> split_phrase("Red <cat-toy>!!")
    ['red', '<', 'cat-toy', '>', '!', '!']
    """
    parts: list[str] = []
    for word, _, _ in split_words(text):
        whole = _kind(word[0]) in ("letter", "ideograph")
        parts += [folded(word)] if whole else list(folded(word))
    return parts


def folded(text: str) -> str:
    """Return a text as words are compared: neither letter case counts, nor whether accents are
    written as signs of their own (NFC, NFD), which text encoders read alike.

    >>> folded("Caf\u00e9") == folded("CAFE\u0301")
    True
    """
    return unicodedata.normalize("NFC", _decomposed(text))


def find_part(text: str, part: str) -> list[tuple[int, int]]:
    """Return the character spans of a part of a text, :func:`folded`, that may begin and end inside
    words, but not between a letter and its marks.

    >>> find_part("A dog's doghouse", "Dog"), find_part("cafe\u0301", "cafe")
    ([(2, 5), (8, 11)], [])
    """
    signs = [_decomposed(char) for char in text]
    origins = [i for i, sign in enumerate(signs) for _ in sign]
    whole = "".join(signs)
    asked = _decomposed(part)
    found = []
    start = whole.find(asked)
    while start >= 0 and asked:
        end = start + len(asked)
        if not any(_kind(sign) == "mark" for sign in (whole[start], whole[end : end + 1]) if sign):
            found.append((origins[start], origins[end - 1] + 1))
        start = whole.find(asked, start + 1)
    return found


def _decomposed(text: str) -> str:
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping spans, in order.

    >>> merge_spans([(4, 6), (0, 2), (1, 3), (6, 7)])
    [(0, 3), (4, 6), (6, 7)]
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _character_kinds(text: str) -> list[str]:
    kinds = [_kind(char) for char in text]
    for i, char in enumerate(text):
        if kinds[i] == "mark":  # accents, vowel signs, variation selectors, joiners: as their base
            kinds[i] = kinds[i - 1] if i and kinds[i - 1] != "space" else "other"
        inside = 0 < i < len(text) - 1 and kinds[i - 1] == "letter" == _kind(text[i + 1])
        if char in _JOINERS and inside:
            kinds[i] = "letter"
    return kinds


def _kind(char: str) -> str:
    if char.isspace() or char == ZERO_WIDTH_SPACE:
        return "space"
    category = unicodedata.category(char)
    if category[0] == "M" or category == "Cf":
        return "mark"
    if category == "Lo" and unicodedata.name(char, "").startswith(("CJK", "HIRAGANA", "KATAKANA")):
        return "ideograph"
    return "letter" if category[0] in "LN" else "other"


def empty_prompt(prompt: str) -> InvalidValueError:
    """Return the error for a prompt without a word."""
    return InvalidValueError(f"The prompt {prompt!r} is empty. Write at least one word.")
