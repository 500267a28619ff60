"""A prompt in pieces, as a page shows it."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from ...maps.heatmap import Heatmap
from ...prompts.tokens import Prompt

MOST_CUT_OFF = 100  # words after the last one seen; the others are one piece


class Piece(NamedTuple):
    """A part of a prompt's text.

    Attributes:
        text: the text.
        number: number of its words' map, or None.
        cut: the text encoder never saw this part.
    """

    text: str
    number: int | None
    cut: bool


def pieces(prompt: Prompt, spans: Mapping[tuple[int, int], int]) -> list[Piece]:
    """Split the text at ``spans`` ((start, end) to a map's number) and at words that were cut
    off."""
    seen = max((i for i, word in enumerate(prompt.words) if word.columns), default=-1) + 1
    unseen = [word for word in prompt.words[: seen + MOST_CUT_OFF] if not word.columns]
    marks: list[tuple[int, int, int | None, bool]]
    marks = [(*span, number, False) for span, number in spans.items()]
    marks += [(word.start, word.end, None, True) for word in unseen]
    parts: list[Piece] = []
    at = 0
    for start, end, number, cut in sorted(marks, key=itemgetter(0)):
        parts.append(Piece(prompt.text[at:start], None, False))
        parts.append(Piece(prompt.text[start:end], number, cut))
        at = end
    parts.append(Piece(prompt.text[at:], None, len(prompt.words) > seen + MOST_CUT_OFF))
    return [part for part in parts if part.text]


def indices_by_span(prompt: Prompt, maps: Sequence[Heatmap]) -> dict[tuple[int, int], int]:
    """Map the (start, end) of words in a prompt to the number of their map.

    Leaves out maps whose words are not consecutive in the text or lie inside another map's words.
    """
    spans: dict[tuple[int, int], int] = {}
    at = 0
    for number in sorted(range(len(maps)), key=lambda i: maps[i].columns):
        columns = set(maps[number].columns)
        ends = ((first, _end(prompt, first, columns)) for first in range(at, len(prompt.words)))
        first, end = next(((first, end) for first, end in ends if end), (0, 0))
        if end:
            spans[prompt.words[first].start, prompt.words[end - 1].end] = number
            at = end
    return spans


def _end(prompt: Prompt, first: int, columns: set[int]) -> int:
    """Return the end of the words from ``first`` on that have exactly these columns, or 0."""
    covered: set[int] = set()
    for number, word in enumerate(prompt.words[first:], start=first + 1):
        if not word.columns or not columns.issuperset(word.columns):
            return 0
        covered.update(word.columns)
        if covered == columns:
            return number
    return 0
