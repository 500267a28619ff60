"""Small multiples on a page: panels of one size, one scale, one colour bar.

Rows, columns and the figure's size are chosen here; matplotlib's constrained layout places what is
drawn. Lengths are in inches, those of text at 8 points. pyplot is not used: it keeps its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..errors import InvalidValueError
from ..maps.render import COLORMAP
from .lettering import DPI, fit, fonts_for, unit, width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec
    from matplotlib.layout_engine import LayoutEngine

Lines = tuple[str, ...]

PAGE = WIDTH, HEIGHT = 7.0, 9.5  # of a page's text
LARGEST, SMALLEST = 1.6, 0.12  # a panel's width at most; each of its sides at least
_ENOUGH, _HIGH = 0.5, 7.0  # rows go on beside each other until panels are so wide on so high a page
_GAP, _LINE = 0.05, 0.16  # between panels; from line to line
_TICKED = 0.45  # a side that has room for numbers
_LABEL = 1.1  # a row's label at most
_SURE = 0.95  # the share of a panel's expected width that it is sure to have
_BESIDE, _BELOW = 1.2, 0.5  # what the colour bar, names and numbers take of the page, about
_SHORTEST, _LONGEST, _THICK = 0.9, 3.0, 0.1  # the colour bar


@dataclass(frozen=True)
class Panel:
    """Values ``[rows, cols]`` or an image, uint8 ``[rows, cols, 3]``; the lines of its column's
    title or its own, and of its row's label, which has as many in all rows."""

    values: np.ndarray
    title: Lines
    label: Lines = ()


@dataclass(frozen=True)
class Page:
    """What the panels of a figure share.

    Attributes:
        size: (width, height) of the image in pixels, which the sides of each panel count.
        scale: the values of the first and of the last colour.
        note: what the values are, beside the colour bar.
    """

    size: tuple[int, int]
    scale: tuple[float, float]
    note: str

    @property
    def aspect(self) -> float:
        """Height by width."""
        return self.size[1] / self.size[0]

    def room(self, down: int, across: int, labels: float = 0, titles: float = 0) -> float:
        """About the width of each panel, where labels and titles take so much in all."""
        wide = (WIDTH - _BESIDE * unit() - labels) / across - _GAP
        high = (HEIGHT - _BELOW * unit() - titles) / down - _GAP
        return min(wide, high / self.aspect, LARGEST)


def flow(panels: Sequence[Panel], page: Page) -> Figure:
    """Panels with their titles above, five a row, or more where a page has no room else.

    Raises:
        ValueError: there are more than a page has room for.
    """
    number = len(panels)

    def room(across: int) -> float:
        down = math.ceil(number / across)
        return page.room(down, across, titles=down * _LINE * unit())

    # From five a row on, the number of columns that leaves each panel the most room.
    across = max(range(math.ceil(number / math.ceil(number / 5)), number + 1), key=room)
    rows = [panels[i : i + across] for i in range(0, number, across)]
    return _Sheet(rows, page, len(rows), room(across), f"{number} panels", each=True).draw()


def table(rows: Sequence[Sequence[Panel]], page: Page) -> Figure:
    """Panels in rows and columns; many rows go on beside each other, in at most eight blocks.

    Raises:
        ValueError: there are more than a page has room for.
    """
    across, lines = max(map(len, rows)), {line for row in rows for line in row[0].label}
    fonts = fonts_for("".join(lines))
    label = min(max(width(line, fonts) for line in lines), _LABEL * unit()) + 0.3 * unit()

    def room(blocks: int, titles: float = 0) -> float:
        return page.room(math.ceil(len(rows) / blocks), blocks * across, blocks * label, titles)

    blocks = max(range(1, 9), key=lambda number: min(_ENOUGH, room(number, HEIGHT - _HIGH)))
    down, what = math.ceil(len(rows) / blocks), f"{len(rows)} rows of {across} panels"
    return _Sheet(rows, page, down, room(blocks), what).draw()


def fill(axes: Sequence[Axes] | np.ndarray, rows: Sequence[Sequence[Panel]], page: Page) -> Figure:
    """Panels, row after row, in axes that are there; their figure keeps its size and layout.

    Raises:
        ValueError: there are not as many axes as panels.
    """
    drawn = [*np.ravel(np.array(axes, dtype=object))]
    cells = [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
    if len(drawn) != len(cells):
        raise InvalidValueError(f"Got {len(drawn)} axes for {len(cells)} panels. Pass one a panel.")
    sheet = _Sheet(rows, page, len(rows), math.inf, "panels")
    for panel, cell in zip(drawn, cells, strict=True):
        sheet.show(panel, *cell)
        panel.set_aspect("equal")
    return cast("Figure", sheet.bar(drawn, page.note).ax.get_figure())


@dataclass(frozen=True)
class _Sheet:
    """A figure to be drawn: blocks of ``down`` rows beside each other.

    Attributes:
        width: of a panel, about.
        what: the panels in words, for an error.
        each: every panel has its title, not only the first of a column.
    """

    rows: Sequence[Sequence[Panel]]
    page: Page
    down: int
    width: float
    what: str
    each: bool = False

    @cached_property
    def fonts(self) -> list[str]:
        """The families that titles and labels need."""
        panels = [panel for row in self.rows for panel in row]
        return fonts_for("".join("".join(panel.title + panel.label) for panel in panels))

    @cached_property
    def upright(self) -> bool:
        """Columns have their titles upright, in one line."""
        lines = {line for row in self.rows for panel in row for line in panel.title}
        return not self.each and max(width(line, self.fonts) for line in lines) > _SURE * self.width

    def draw(self) -> Figure:
        """The figure, with its layout frozen: the same text in the same place in every file."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        self._check(self.width)
        across = max(map(len, self.rows))
        # Rows go down the page, then on beside it: row i is in block i // down, at line i % down.
        columns = max(i // self.down * across + len(row) for i, row in enumerate(self.rows))
        layout = ConstrainedLayoutEngine(w_pad=_GAP / 2, h_pad=_GAP / 2, wspace=0, hspace=0)
        # Begun larger than any page: the layout then has room for all text, and _place shrinks it.
        figure = Figure((2 * WIDTH, 2 * HEIGHT), DPI, layout=layout)  # whatever text there is
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(self.down, columns)
        # Numbers stand at the outer panels only, where a side is long enough for them.
        ticked = self.width * min(1, self.page.aspect) >= _TICKED * unit()
        for i, row in enumerate(self.rows):
            block, at = divmod(i, self.down)
            for j in range(len(row)):
                axes = figure.add_subplot(grid[at, block * across + j])
                self._tick(axes, ticked, lowest=at + 1 == self.down, first=j == 0)
                self.show(axes, i, j)
        wide, high = self.page.size
        figure.supxlabel("x (pixels)" if ticked else f"x (0 to {wide} pixels)")
        figure.supylabel("y (pixels)" if ticked else f"y (0 to {high})")
        self._place(figure, np.array([columns, self.down]))
        return figure

    def show(self, axes: Axes, row: int, column: int) -> None:
        """Draw a panel with its title and label."""
        panel, (wide, high) = self.rows[row][column], self.page.size
        options: dict[str, Any] = {"extent": (0, wide, high, 0), "origin": "upper"}
        if panel.values.ndim == 2:  # a cell is a square of one colour: it was measured once
            first, last = self.page.scale
            options |= {"cmap": COLORMAP, "vmin": first, "vmax": last, "interpolation": "nearest"}
        axes.imshow(panel.values, aspect="auto", **options)
        text: dict[str, Any] = {"family": self.fonts, "parse_math": False}
        if (self.each or row % self.down == 0) and self.upright:
            axes.set_title(", ".join(panel.title), rotation=90, va="bottom", **text)
        elif self.each or row % self.down == 0:
            title = [fit(line, _SURE * self.width, self.fonts) for line in panel.title]
            axes.set_title("\n".join(title), **text)
        if column == 0 and panel.label:
            low = len(panel.label) * _LINE * unit() > self.width * self.page.aspect + _GAP
            # A panel too low for a label of two lines has both in one.
            lines = (", ".join(reversed(panel.label)),) if low else panel.label
            label = "\n".join(fit(line, _LABEL * unit(), self.fonts) for line in lines)
            axes.set_ylabel(label, rotation=0, ha="right", va="center", **text)

    def bar(self, axes: Sequence[Axes], note: str, **options: Any) -> Colorbar:
        """One colour bar for all panels."""
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        colours = ScalarMappable(Normalize(*self.page.scale), COLORMAP)
        bar: Colorbar = axes[0].figure.colorbar(colours, ax=list(axes), label=note, **options)
        return bar

    def _tick(self, axes: Axes, ticked: bool, *, lowest: bool, first: bool) -> None:
        """Numbers at both ends of a side, within it: the next panel's begin beside them."""
        axes.xaxis.set_visible(lowest)
        axes.yaxis.set_visible(first)
        axes.set_xticks([0, self.page.size[0]] if ticked and lowest else [])
        axes.set_yticks([0, self.page.size[1]] if ticked and first else [])
        for text, side in zip(axes.get_xticklabels(), ("left", "right"), strict=False):
            text.set(ha=side)
        for text, side in zip(axes.get_yticklabels(), ("top", "bottom"), strict=False):
            text.set(va=side)

    def _place(self, figure: Figure, shape: np.ndarray) -> None:
        """Lay out the panels, then with the colour bar, and keep everything where it is."""
        panels = figure.axes[:]
        # Twice, since the colour bar takes room from the panels, and its length follows from
        # theirs.
        bar = self._bar_beside(panels, *(shape * self._resized(figure, shape)))
        self._check(self._resized(figure, shape)[0])
        first, last = self.page.scale
        bar.set_ticks([tick for tick in bar.get_ticks() if first <= tick <= last])
        cast("LayoutEngine", figure.get_layout_engine()).execute(figure)
        figure.set_layout_engine("none")
        for axes in panels:
            axes.set_aspect("equal")

    def _resized(self, figure: Figure, shape: np.ndarray) -> tuple[float, float]:
        """Make panels as large as a page allows, in the image's proportions, but leave a colour
        bar its shortest length; the (width, height) that each has then."""
        cast("LayoutEngine", figure.get_layout_engine()).execute(figure)
        size = figure.get_size_inches()
        # What the text around the panels takes stays as it is, whatever size these have.
        around = size - shape * size * figure.axes[0].get_position().size
        wide, high = (PAGE - around) / shape
        wide = max(min(wide, high / self.page.aspect, LARGEST), SMALLEST / 2)  # too small
        high = max(wide * self.page.aspect, _SHORTEST * unit() / self.down)
        figure.set_size_inches(around + shape * (wide, high))
        return wide, high

    def _bar_beside(self, panels: Sequence[Axes], wide: float, high: float) -> Colorbar:
        """The colour bar, as long as all panels are high at most, its note in lines that fit; it
        spans the outer columns, which is quicker to lay out than all."""
        length = min(high, _LONGEST * unit())
        note = "\n".join(wrap(self.page.note, int(15 * length / unit())))
        sides = {"shrink": length / high, "aspect": length / _THICK, "pad": _THICK / wide}
        spans = [cast("SubplotSpec", axes.get_subplotspec()).colspan for axes in panels]
        ends = 0, max(span.start for span in spans)
        outer = [axes for axes, span in zip(panels, spans, strict=True) if span.start in ends]
        return self.bar(outer, note, fraction=0.5, panchor=False, **sides)

    def _check(self, width: float) -> None:
        if min(width, width * self.page.aspect) < SMALLEST:
            raise InvalidValueError(
                f"{self.what} have no room on a page of {WIDTH:g} x {HEIGHT:g} inches, each of "
                f"whose sides is {SMALLEST} inches or more. Name fewer words if they are many, or "
                "keep fewer steps or heads."
            )
