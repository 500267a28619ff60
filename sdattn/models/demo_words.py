"""The words that the demo model knows: what it makes of any other means nothing."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from functools import cache
from pathlib import Path

WORDS = Path(__file__).parent / "demo" / "words.json"


def unlearnt(words: Iterable[str]) -> str:
    """Which of the words no picture of the demo's training was described with, and which words
    there are; "" if all are known. Punctuation counts for nothing, nor do capitals, which the
    tokenizer writes small."""
    kinds = _kinds()
    known = {"", *(word for kind in kinds for word in kind)}
    strange = [
        word for word in dict.fromkeys(words) if word.strip(string.punctuation).lower() not in known
    ]
    if not strange:
        return ""
    learnt = "; ".join(", ".join(kind) for kind in kinds)
    return (
        f"The demo model never learnt {', '.join(map(repr, strange))}: what it draws for that, and "
        f"its heatmaps, mean nothing. It knows only: {learnt}."
    )


@cache
def _kinds() -> tuple[tuple[str, ...], ...]:
    """Colours, shapes, backgrounds and further words, as the model's training wrote them."""
    return tuple(map(tuple, json.loads(WORDS.read_text(encoding="utf-8")).values()))
