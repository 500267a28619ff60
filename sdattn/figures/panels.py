"""Small multiples on a page: panels of one size, one scale, one colour bar.

Lengths are in inches, text lengths at 8 points. pyplot is not used: it keeps its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from textwrap import wrap
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..errors import InvalidValueError
from ..maps.render import COLORMAP, fonts_for
from .lettering import DPI, fit, unit, width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec
    from matplotlib.layout_engine import LayoutEngine

Lines = tuple[str, ...]

# In inches
WIDTH = 7.0  # text area of a page
HEIGHT = 9.5
LARGEST = 1.6  # maximum width of a panel
SMALLEST = 0.12  # minimum of each of its sides
_ENOUGH = 0.5  # rows wrap into blocks until panels are this wide
_HIGH = 7.0  # on a page this high
_GAP = 0.05  # between panels
_LINE = 0.16  # from line to line
_TICKED = 0.45  # minimum side with room for numbers
_LABEL = 1.1  # maximum width of a row's label
_SURE = 0.95  # share of a panel's expected width that it certainly gets
_BESIDE = 1.2  # space for the colour bar, names and numbers, roughly
_BELOW = 0.5
_SHORTEST = 0.9  # the colour bar
_LONGEST = 3.0
_THICK = 0.1


@dataclass(frozen=True)
class Panel:
    """Values ``[rows, cols]`` or an image, uint8 ``[rows, cols, 3]``, with title and label."""

    values: np.ndarray
    title: Lines
    label: Lines = ()


@dataclass(frozen=True)
class Style:
    """How a figure looks.

    Attributes:
        cmap: name of a matplotlib colormap.
        width: width of the whole figure in inches; None for as wide as its panels need.
        show_axes: numbers and names at the axes, and frames around the panels.
        own_scale: each panel from its own smallest value to its largest, which are below it.
        colorbar: draw the colour bar.
    """

    cmap: str = COLORMAP
    width: float | None = None
    show_axes: bool = True
    own_scale: bool = False
    colorbar: bool = True


@dataclass(frozen=True)
class Page:
    """Settings shared by a figure's panels; ``size`` is the image's (width, height) in pixels."""

    size: tuple[int, int]
    scale: tuple[float, float]
    note: str
    style: Style = Style()

    @property
    def aspect(self) -> float:
        return self.size[1] / self.size[0]

    def room(self, down: int, across: int, labels: float = 0, titles: float = 0) -> float:
        """Return the approximate width of each panel, given the room for all labels and titles."""
        below = 2 * _LINE * unit() if self.style.own_scale else 0
        beside = _BESIDE if self.style.colorbar else _BESIDE / 2
        wide = (self.width - beside * unit() - labels) / across - _GAP
        high = (HEIGHT - _BELOW * unit() - titles) / down - _GAP - below
        return min(wide, high / self.aspect, self.largest)

    @property
    def width(self) -> float:
        return self.style.width or WIDTH

    @property
    def largest(self) -> float:
        """The largest width of a panel."""
        return self.style.width or LARGEST


def scale_of(drawn: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the smallest and the largest of all values, apart even if they are equal; raise
    ValueError for values that are not finite."""
    low = float(min(map(np.min, drawn)))
    high = float(max(map(np.max, drawn)))
    if not np.isfinite([low, high]).all():
        raise InvalidValueError("The maps hold values that are not finite; they cannot be drawn.")
    if low == high:  # a scale has two ends
        return (0.0, high) if high > 0 else (0.0, 1.0)
    return low, high


def flow(panels: Sequence[Panel], page: Page) -> Figure:
    """Draw panels with titles, at least five per row; raise ValueError if they do not fit."""
    number = len(panels)

    def room(across: int) -> float:
        down = math.ceil(number / across)
        return page.room(down, across, titles=down * _LINE * unit())

    # The number of columns, from five per row on, that leaves each panel the most room.
    across = max(range(math.ceil(number / math.ceil(number / 5)), number + 1), key=room)
    rows = [panels[i : i + across] for i in range(0, number, across)]
    return _Sheet(rows, page, len(rows), room(across), f"{number} panels", each=True).draw()


def table(rows: Sequence[Sequence[Panel]], page: Page, *, each: bool = False) -> Figure:
    """Draw rows and columns, many rows in blocks; with ``each`` every panel has a title, not just a
    column's first. Raise ValueError if they do not fit on a page."""
    across = max(map(len, rows))
    lines = set[str]().union(*(row[0].label for row in rows))
    fonts = fonts_for("".join(lines))
    label = min(max(width(line, fonts) for line in lines), _LABEL * unit()) + 0.3 * unit()

    def room(blocks: int, titles: float = 0) -> float:
        down = math.ceil(len(rows) / blocks)
        titles += each * down * _LINE * unit()
        return page.room(down, blocks * across, blocks * label, titles)

    blocks = max(range(1, 9), key=lambda number: min(_ENOUGH, room(number, HEIGHT - _HIGH)))
    down = math.ceil(len(rows) / blocks)
    what = f"{len(rows)} rows of {across} panels"
    return _Sheet(rows, page, down, room(blocks), what, each).draw()


def fill(axes: Sequence[Axes] | np.ndarray, rows: Sequence[Sequence[Panel]], page: Page) -> Figure:
    """Draw panels, row after row, in as many existing axes; else raise ValueError."""
    drawn = [*np.ravel(np.array(axes, dtype=object))]
    cells = []
    for i, shown in enumerate(rows):
        cells += [(i, j) for j in range(len(shown))]
    if len(drawn) != len(cells):
        raise InvalidValueError(
            f"Got {len(drawn)} axes for {len(cells)} panels. Pass one per panel."
        )
    sheet = _Sheet(rows, page, len(rows), math.inf, "panels")
    for panel, (row, column) in zip(drawn, cells, strict=True):
        sheet.show(panel, row, column)
        panel.set_aspect("equal")
    if page.style.colorbar:
        sheet.bar(drawn, page.note)
    return cast("Figure", drawn[0].get_figure())


@dataclass(frozen=True)
class _Sheet:
    """A figure to be drawn: blocks of ``down`` rows next to each other, panels about ``width``
    wide; with ``each`` every panel has a title, not just a column's first."""

    rows: Sequence[Sequence[Panel]]
    page: Page
    down: int
    width: float
    what: str
    each: bool = False

    @cached_property
    def panels(self) -> list[Panel]:
        """All panels, row after row."""
        return list(chain.from_iterable(self.rows))

    @cached_property
    def fonts(self) -> list[str]:
        return fonts_for("".join("".join(panel.title + panel.label) for panel in self.panels))

    @cached_property
    def upright(self) -> bool:
        lines = set[str]().union(*(panel.title for panel in self.panels))
        return not self.each and max(width(line, self.fonts) for line in lines) > _SURE * self.width

    def ends_of(self, panel: Panel) -> str:
        """Return the ends of a panel's own scale, on two lines if some panel is too narrow."""
        return self._ends[id(panel)]

    @cached_property
    def _ends(self) -> dict[int, str]:
        texts: dict[int, str] = {}
        for panel in self.panels:
            if panel.values.ndim == 2:
                low, high = scale_of([panel.values])
                texts[id(panel)] = f"{low:.2g} to {high:.2g}"
        if max(width(text, self.fonts) for text in texts.values()) > _SURE * self.width:
            return {one: text.replace(" to ", "\nto ") for one, text in texts.items()}
        return texts

    def draw(self) -> Figure:
        """Return the figure with a frozen layout: the same text in the same place in every file."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        self._check(self.width)
        across = max(map(len, self.rows))
        # Rows wrap into blocks: row i is in block i // down, at line i % down.
        columns = max(i // self.down * across + len(row) for i, row in enumerate(self.rows))
        layout = ConstrainedLayoutEngine(w_pad=_GAP / 2, h_pad=_GAP / 2, wspace=0, hspace=0)
        # Starts larger than any page: the layout then has room for all text; _place shrinks it.
        start = 2 * max(WIDTH, self.page.width), 2 * HEIGHT
        figure = Figure(start, DPI, layout=layout)  # whatever text there is
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(self.down, columns)
        # Only the outer panels have numbers, if a side is long enough for them.
        ticked = self.width * min(1, self.page.aspect) >= _TICKED * unit()
        ticked = ticked and not self.page.style.own_scale  # the scale's ends are there
        for i, row in enumerate(self.rows):
            block, at = divmod(i, self.down)
            for j in range(len(row)):
                axes = figure.add_subplot(grid[at, block * across + j])
                self._tick(axes, ticked, lowest=at + 1 == self.down, first=j == 0)
                self.show(axes, i, j)
        wide, high = self.page.size
        if self.page.style.show_axes:
            figure.supxlabel("x (pixels)" if ticked else f"x (0 to {wide} pixels)")
            figure.supylabel("y (pixels)" if ticked else f"y (0 to {high})")
        self._place(figure, np.array([columns, self.down]))
        return figure

    def show(self, axes: Axes, row: int, column: int) -> None:
        panel = self.rows[row][column]
        wide, high = self.page.size
        options: dict[str, Any] = {"extent": (0, wide, high, 0), "origin": "upper"}
        if panel.values.ndim == 2:  # a cell is a square of one colour: it was measured once
            style = self.page.style
            first, last = scale_of([panel.values]) if style.own_scale else self.page.scale
            options |= {"cmap": style.cmap, "vmin": first, "vmax": last, "interpolation": "nearest"}
            if style.own_scale:
                axes.set_xlabel(self.ends_of(panel), fontsize="small", labelpad=2)
        axes.imshow(panel.values, aspect="auto", **options)
        text: dict[str, Any] = {"family": self.fonts, "parse_math": False}
        if (self.each or row % self.down == 0) and self.upright:
            axes.set_title(", ".join(panel.title), rotation=90, va="bottom", **text)
        elif self.each or row % self.down == 0:
            title = [fit(line, _SURE * self.width, self.fonts) for line in panel.title]
            axes.set_title("\n".join(title), **text)
        if column == 0 and panel.label:
            low = len(panel.label) * _LINE * unit() > self.width * self.page.aspect + _GAP
            # A panel too low for a label of two lines has both in one line.
            lines = (", ".join(reversed(panel.label)),) if low else panel.label
            label = "\n".join(fit(line, _LABEL * unit(), self.fonts) for line in lines)
            axes.set_ylabel(label, rotation=0, ha="right", va="center", **text)

    def bar(self, axes: Sequence[Axes], note: str, **options: Any) -> Colorbar:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        is_own = self.page.style.own_scale
        colours = ScalarMappable(
            Normalize(*(0.0, 1.0) if is_own else self.page.scale), self.page.style.cmap
        )
        bar: Colorbar = axes[0].figure.colorbar(colours, ax=list(axes), label=note, **options)
        if is_own:
            bar.set_ticks([0, 1], labels=["lowest", "highest"])
        return bar

    def _tick(self, axes: Axes, ticked: bool, *, lowest: bool, first: bool) -> None:
        """Put numbers at both ends of a side, inside it. Only the first panel of the lowest row
        has them across: the next one's would touch them."""
        style = self.page.style
        axes.xaxis.set_visible(lowest or style.own_scale)
        axes.yaxis.set_visible(first)
        numbered = ticked and style.show_axes and first
        axes.set_xticks([0, self.page.size[0]] if numbered and lowest else [])
        axes.set_yticks([0, self.page.size[1]] if numbered else [])
        axes.spines[:].set_visible(style.show_axes)
        for text, side in zip(axes.get_xticklabels(), ("left", "right"), strict=False):
            text.set(ha=side)
        for text, side in zip(axes.get_yticklabels(), ("top", "bottom"), strict=False):
            text.set(va=side)

    def _place(self, figure: Figure, shape: np.ndarray) -> None:
        """Lay out the panels, then with the colour bar, and freeze the layout."""
        panels = figure.axes[:]
        # Twice, since the colour bar takes room from the panels, and its length depends on
        # theirs.
        size = shape * self._resized(figure, shape)
        style = self.page.style
        bar = self._bar_beside(panels, *size) if style.colorbar else None
        self._check(self._resized(figure, shape)[0])
        if bar is not None and not style.own_scale:
            first, last = self.page.scale
            bar.set_ticks([tick for tick in bar.get_ticks() if first <= tick <= last])
        if style.width is not None:
            figure.set_figwidth(style.width)
        cast("LayoutEngine", figure.get_layout_engine()).execute(figure)
        figure.set_layout_engine("none")
        for axes in panels:
            axes.set_aspect("equal")

    def _resized(self, figure: Figure, shape: np.ndarray) -> tuple[float, float]:
        """Enlarge panels as far as page and colour bar allow; return their (width, height)."""
        cast("LayoutEngine", figure.get_layout_engine()).execute(figure)
        size = figure.get_size_inches()
        # The text around the panels takes the same room at any panel size.
        around = size - shape * size * figure.axes[0].get_position().size
        wide, high = ((self.page.width, HEIGHT) - around) / shape
        wide = max(min(wide, high / self.page.aspect, self.page.largest), SMALLEST / 2)  # too small
        high = max(wide * self.page.aspect, _SHORTEST * unit() / self.down)
        figure.set_size_inches(around + shape * (wide, high))
        return wide, high

    def _bar_beside(self, panels: Sequence[Axes], wide: float, high: float) -> Colorbar:
        """Draw the colour bar; it spans only the outer columns, which is quicker to lay out."""
        length = min(high, _LONGEST * unit())
        note = "\n".join(wrap(self.page.note, int(15 * length / unit())))
        sides = {"shrink": length / high, "aspect": length / _THICK, "pad": _THICK / wide}
        spans = [cast("SubplotSpec", axes.get_subplotspec()).colspan for axes in panels]
        ends = 0, max(span.start for span in spans)
        outer = [axes for axes, span in zip(panels, spans, strict=True) if span.start in ends]
        return self.bar(outer, note, fraction=0.5, panchor=False, **sides)

    def _check(self, width: float) -> None:
        if min(width, width * self.page.aspect) < SMALLEST:
            wider = "Choose a larger `width`. " if self.page.style.width else ""
            raise InvalidValueError(
                f"{self.what} do not fit on a page of {self.page.width:g} x {HEIGHT:g} inches with "
                f"sides of at least {SMALLEST} inches each. {wider}Choose fewer words if there are "
                "many, or keep fewer steps or heads."
            )
