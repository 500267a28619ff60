"""Text from elsewhere, made safe to print."""

import re
import sys
from typing import Any

# Terminals obey C0 and C1; the next ranges reverse the writing direction; surrogates are invalid.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return the text with all that a terminal would obey, or cannot print, escaped as in Python.

    >>> visible("a \x1b]0;title\x07red\r\ncat")
    'a \\x1b]0;title\\x07red\\r\ncat'
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str) -> None:
    """Print a line on stderr, at once."""
    print(f"sdattn: {visible(text)}", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "item"), counted(1200, "item")
    ('1 item', '1,200 items')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorter(text: str, most: int) -> str:
    """Return the text on one line, in at most ``most`` letters.

    >>> shorter("a red\\n cat", 20), shorter("a red\\n cat", 6)
    ('a red cat', 'a red…')
    """
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shown(value: Any, most: int = 80) -> str:
    """Return a value's repr, shortened, for messages."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def two_digits(value: float, sign: str = "") -> str:
    """Return a number to two digits; below 1e-9 is rounding, and 0.

    >>> two_digits(0.0814), two_digits(0.5, "+"), two_digits(-4.3e-18, "+")
    ('0.081', '+0.5', '0')
    """
    return "0" if abs(value) < 1e-9 else f"{value:{sign}.2g}"
