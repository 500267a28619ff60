"""Lettering of figures: the user's fonts and sizes, fonts that have the glyphs, text that fits."""

import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DPI = 300
_SETTINGS: dict[str, Any] = {
    "pdf.fonttype": 42,  # TrueType: text stays text, and journals accept it
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sdattn",  # the same ids in the file each time
    "font.size": 8.0,
    "axes.titlesize": "medium",
    "axes.labelsize": "medium",
    "axes.linewidth": 0.5,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-99, 99),  # no exponents
    "figure.labelsize": "medium",
    "xtick.labelsize": "small",
    "ytick.labelsize": "small",
}


@contextmanager
def settings() -> Iterator[None]:
    """Apply matplotlib's defaults and the settings of figures inside the block, but keep fonts and
    text sizes that the user has set; hide the warning of glyphs that no installed font has."""
    from matplotlib import rcParams, rcParamsDefault, style

    sizes: Any = rcParams.find_all(r"^font\.|\.(title|label)size$")
    theirs = {key: value for key, value in sizes.items() if value != rcParamsDefault[key]}
    with style.context(["default", _SETTINGS, theirs]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        yield


def plain(text: str) -> str:
    """Return one line of printable characters: no control characters, no lone surrogates."""
    shown = (c if c.isprintable() or unicodedata.category(c) == "Cf" else "\ufffd" for c in text)
    return "".join(shown) if text.isprintable() else " ".join("".join(shown).split())


def unit() -> float:
    from matplotlib import rcParams

    return float(rcParams["font.size"]) / 8


def width(text: str, fonts: list[str]) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=fonts)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def fit(text: str, inches: float, fonts: list[str]) -> str:
    """Return one line, shortened with an ellipsis if it is too wide."""
    if width(text, fonts) <= inches:
        return text
    text = text[:80]
    while text and width(text + "…", fonts) > inches:
        text = text[:-1]
    return text + "…"
