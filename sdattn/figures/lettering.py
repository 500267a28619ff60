"""The lettering of figures: fonts that have the glyphs, widths in inches, words that fit.

with settings():                matplotlib as figures are made and saved, whatever its user has set
pen = Pen(texts)                the fonts that these texts need
pen.width("circle")             inches
pen.fit("circle", 0.3)          "cir…"
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

FONT = "DejaVu Sans"  # comes with matplotlib: the same figure everywhere
SIZE, SMALL = 8.0, 6.5  # points
DPI = 300
_SETTINGS = {
    "pdf.fonttype": 42,  # TrueType: text stays text, and journals take it
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sdattn",  # the same names in the file each time
    "font.size": SIZE,
    "axes.linewidth": 0.5,
}


@contextmanager
def settings() -> Iterator[None]:
    """matplotlib's own settings and those of figures, for as long as the block runs.

    Its warning of glyphs that no installed font has is left out: there is nothing to be done about
    it, a box stands in the letter's place, and PDF and SVG hold the letter itself.
    """
    from matplotlib import style

    with style.context(["default", _SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        yield


class Pen:
    """Measures lines of text as a figure shows them.

    To be used inside :func:`settings`.

    Attributes:
        fonts: the families that the texts need, in the order in which a letter is looked up.
    """

    def __init__(self, texts: Iterable[str]):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.fonts = fonts_for("".join(texts))
        self._figure = Figure(dpi=DPI)
        FigureCanvasAgg(self._figure)
        self._widths: dict[tuple[str, float], float] = {}

    def width(self, text: str, size: float = SIZE) -> float:
        """Of one line, in inches; ``size`` in points."""
        if (text, size) not in self._widths:
            drawn = self._figure.text(0, 0, text, size=size, family=self.fonts, parse_math=False)
            self._widths[text, size] = drawn.get_window_extent().width / DPI
            drawn.remove()
        return self._widths[text, size]

    def fit(self, text: str, inches: float) -> str:
        """The text, shortened with an ellipsis where it is wider."""
        if self.width(text) <= inches:
            return text
        text = text[:80]
        while text and self.width(text + "…") > inches:
            text = text[:-1]
        return text + "…"


def plain(text: str) -> str:
    """One line of characters that a file can hold: no control characters, no halves of a pair."""
    shown = (c if c.isprintable() or unicodedata.category(c) == "Cf" else "\ufffd" for c in text)
    return "".join(shown) if text.isprintable() else " ".join("".join(shown).split())


def fonts_for(text: str) -> list[str]:
    """The families that have the glyphs of a text: ``FONT``, and of those that are installed what
    it lacks. A letter that none of them has is left to ``FONT``, which draws a box."""
    from matplotlib import font_manager

    families = [FONT]
    missing = _lacks(font_manager.findfont(FONT), {c for c in text if not c.isspace()})
    fonts = font_manager.fontManager.ttflist if missing else []
    usual = [one for one in fonts if one.style == "normal" and one.weight == 400]
    usual = [one for one in usual if not one.name.startswith("Last Resort")]  # has boxes only
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
