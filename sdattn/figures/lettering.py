"""Lettering of figures: the user's fonts and sizes, fonts that have the glyphs, text that fits."""

import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DPI = 300
_SETTINGS: dict[str, Any] = {
    "pdf.fonttype": 42,  # TrueType: text stays text, and journals take it
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sdattn",  # the same names in the file each time
    "font.size": 8.0,
    "axes.titlesize": "medium",
    "axes.labelsize": "medium",
    "axes.linewidth": 0.5,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-99, 99),  # numbers are written out
    "figure.labelsize": "medium",
    "xtick.labelsize": "small",
    "ytick.labelsize": "small",
}


@contextmanager
def settings() -> Iterator[None]:
    """matplotlib's own settings and those of figures, for as long as the block runs; of the user's
    the fonts and the sizes of text that differ from matplotlib's own.

    Its warning of glyphs that no installed font has is left out: there is nothing to be done about
    it, a box stands in the letter's place, and PDF and SVG hold the letter itself.
    """
    from matplotlib import rcParams, rcParamsDefault, style

    sizes: Any = rcParams.find_all(r"^font\.|\.(title|label)size$")
    theirs = {key: value for key, value in sizes.items() if value != rcParamsDefault[key]}
    with style.context(["default", _SETTINGS, theirs]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        yield


def plain(text: str) -> str:
    """One line of characters that a file can hold: no control characters, no halves of a pair."""
    shown = (c if c.isprintable() or unicodedata.category(c) == "Cf" else "\ufffd" for c in text)
    return "".join(shown) if text.isprintable() else " ".join("".join(shown).split())


def unit() -> float:
    """The size of the settings' text, by 8 points."""
    from matplotlib import rcParams

    return float(rcParams["font.size"]) / 8


def width(text: str, fonts: list[str]) -> float:
    """Of one line in the size of the settings, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=fonts)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def fit(text: str, inches: float, fonts: list[str]) -> str:
    """One line, shortened with an ellipsis where it is wider."""
    if width(text, fonts) <= inches:
        return text
    text = text[:80]
    while text and width(text + "…", fonts) > inches:
        text = text[:-1]
    return text + "…"


def fonts_for(text: str) -> list[str]:
    """The families that have the glyphs of a text: the font of the settings, DejaVu Sans by
    default, and of those that are installed what it lacks. A letter that none of them has is left
    to the first, which draws a box."""
    from matplotlib import font_manager

    first = font_manager.findfont(font_manager.FontProperties())
    families = [font_manager.get_font(first).family_name]
    missing = _lacks(first, {c for c in text if not c.isspace()})
    fonts = font_manager.fontManager.ttflist if missing else []
    usual = [font for font in fonts if font.style == "normal" and font.weight == 400]
    usual = [font for font in usual if not font.name.startswith("Last Resort")]  # has boxes only
    for font in sorted(usual, key=lambda f: (not f.name.startswith("Noto Sans"), f.name, f.fname)):
        if missing and len(lacks := _lacks(font.fname, missing)) < len(missing):
            families.append(font.name)
            missing = lacks
    return list(dict.fromkeys(families))


def _lacks(path: str, letters: set[str]) -> set[str]:
    """The letters that a font has no glyph of."""
    from matplotlib.ft2font import FT2Font

    font = FT2Font(path)
    return {letter for letter in letters if not font.get_char_index(ord(letter))}
