"""Small multiples on a page: panels of one size, one scale, one colour bar.

flow(named, page)                       a panel a name, row after row
table(rows, labels, titles, page)       a row a label, a column a title

All lengths are in inches. The figures are matplotlib's, made without pyplot: it would keep them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from ..maps.render import COLORMAP
from .lettering import DPI, SIZE, SMALL, Pen
from .placing import EDGE, LINE, PAD, Layout, Lines, place_flow, place_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "0.15"  # a grey
_TICK: dict[str, Any] = {
    "length": 2, "width": 0.5, "pad": 1.5, "labelsize": SMALL, "color": _INK, "labelcolor": _INK,
}  # fmt: skip
_BESIDE, _THICK, _BAR = 0.1, 0.1, 3.0  # the colour bar: from the panels, its width, its height
_NOTE = (24, 17, 11)  # characters a line, beside the colour bar; fewer where it is short


@dataclass(frozen=True)
class Page:
    """What the panels of a figure share.

    Attributes:
        size: (width, height) of the picture in pixels, which the sides of each panel count.
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


@dataclass(frozen=True)
class _Panel:
    """Values ``[rows, cols]``, or a picture ``[rows, cols, 3]``, and where it is in the figure."""

    values: np.ndarray
    row: int
    column: int
    title: str = ""
    label: str = ""


def flow(named: Sequence[tuple[str, np.ndarray]], page: Page) -> Figure:
    """Panels with their names above, row after row.

    Args:
        named: a name and values ``[rows, cols]`` each, or a picture, uint8 ``[rows, cols, 3]``.
        page: what they share.

    Raises:
        ValueError: there are more than a page has room for.
    """
    pen = Pen([name for name, _ in named])
    layout, note = _beside_bar(lambda right: place_flow(len(named), page.aspect, right), page, pen)
    panels = [
        _Panel(values, *divmod(i, layout.across), pen.fit(name, layout.pitch[0] - PAD))
        for i, (name, values) in enumerate(named)
    ]
    return _draw(panels, layout, replace(page, note=note), pen)


def table(
    rows: Sequence[Sequence[np.ndarray]],
    labels: Sequence[Lines],
    titles: Sequence[Lines],
    page: Page,
) -> Figure:
    """Panels in rows and columns; many rows go on beside each other.

    Args:
        rows: values ``[rows, cols]`` of each panel; a row may be shorter than others.
        labels: of each row, lines of text, the same number each.
        titles: of each column, likewise.
        page: what they share.

    Raises:
        ValueError: there are more than a page has room for.
    """
    pen = Pen([line for lines in (*labels, *titles) for line in lines])
    layout, note = _beside_bar(
        lambda right: place_table(labels, titles, page.aspect, right, pen), page, pen
    )
    panels = []
    for i, row in enumerate(rows):
        block, at = divmod(i, layout.down)
        for j, values in enumerate(row):
            title = layout.title(titles[j]) if at == 0 else ""
            label = layout.label(labels[i], pen) if j == 0 else ""
            panels.append(_Panel(values, at, block * layout.across + j, title, label))
    return _draw(panels, layout, replace(page, note=note), pen)


def _beside_bar(place: Callable[[float], Layout], page: Page, pen: Pen) -> tuple[Layout, str]:
    """The layout that leaves room for the colour bar, and the bar's note in lines that fit it."""
    written = [number for height in (0, _BAR) for number in _numbers(page.scale, height)[1]]
    numbers = max(pen.width(number, SMALL) for number in written)
    for letters in _NOTE:
        number = len(wrap(page.note, letters))
        even = next(n for n in range(1, letters + 1) if len(wrap(page.note, n)) == number)
        lines = wrap(page.note, even)
        layout = place(_BESIDE + _THICK + 2 * PAD + numbers + len(lines) * LINE + EDGE)
        if max(map(pen.width, lines)) <= layout.size[1] - abs(layout.head - layout.foot):
            break
    return layout, "\n".join(lines)


def _draw(panels: Sequence[_Panel], layout: Layout, page: Page, pen: Pen) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=layout.size, dpi=DPI)
    FigureCanvasAgg(figure)
    taken = {(one.row, one.column) for one in panels}
    text: dict[str, Any] = {"family": pen.fonts, "parse_math": False, "color": _INK}
    text["size"] = SIZE if min(layout.pitch) >= LINE else SMALL
    above: dict[str, Any] = {"rotation": 90, "va": "bottom"} if layout.upright else {}
    for one in panels:
        axes = _axes(figure, *layout.corner(one.row, one.column), *layout.panel)
        _show(axes, one.values, page)
        if layout.ticked:
            lowest = (one.row + 1, one.column) not in taken
            _tick(axes, page.size, x=lowest, y=one.column % layout.across == 0)
        axes.set_title(one.title, pad=3, **above, **text)
        axes.set_ylabel(one.label, labelpad=3, rotation=0, ha="right", va="center", **text)
    _name_axes(figure, layout, page.size)
    _bar(figure, layout, page)
    return figure


def _axes(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """Axes at a place from the figure's upper left corner."""
    across, down = figure.get_size_inches()
    axes = figure.add_axes(
        (x / across, 1 - (y + height) / down, width / across, height / down),
        xticks=[],
        yticks=[],
    )
    axes.spines[:].set_color(_INK)
    return axes


def _show(axes: Axes, values: np.ndarray, page: Page) -> None:
    width, height = page.size
    options: dict[str, Any] = {"extent": (0, width, height, 0), "aspect": "auto"}
    if values.ndim == 2:  # a cell is a square of one colour: it was measured once
        low, high = page.scale
        options |= {"cmap": COLORMAP, "vmin": low, "vmax": high, "interpolation": "nearest"}
    axes.imshow(values, **options)


def _tick(axes: Axes, size: tuple[int, int], *, x: bool, y: bool) -> None:
    """Numbers at both ends of a side, within it: the next panel's begin beside them."""
    axes.tick_params(**_TICK)
    if x:
        axes.set_xticks([0, size[0]])
        first, last = axes.get_xticklabels()
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
    if y:
        axes.set_yticks([0, size[1]])
        first, last = axes.get_yticklabels()
        first.set_verticalalignment("top")
        last.set_verticalalignment("bottom")


def _name_axes(figure: Figure, layout: Layout, size: tuple[int, int]) -> None:
    """Once for all panels; where they have no numbers, with what their sides count."""
    across, down = layout.size
    left, top = layout.corner(0, 0)
    x, y = (left + across - layout.right) / 2, (top + down - layout.foot) / 2
    names = [f"{one} (pixels)" for one in "xy"]
    if not layout.ticked:
        names = [f"x (0 to {size[0]} pixels)", f"y (0 to {size[1]})"]
    text: dict[str, Any] = {"size": SIZE, "color": _INK}
    figure.text(x / across, EDGE / down, names[0], ha="center", va="bottom", **text)
    name = figure.text(EDGE / across, 1 - y / down, names[1], va="center", rotation=90, **text)
    least = name.get_window_extent().height / DPI / 2 + EDGE  # in a low figure: not beyond its top
    name.set_y(1 - max(y, least) / down)


def _bar(figure: Figure, layout: Layout, page: Page) -> None:
    """The colour bar, right of all panels and in their middle."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    across, down = layout.size
    top, low = layout.corner(0, 0)[1], down - layout.foot
    height = min(low - top, _BAR)
    axes = _axes(figure, across - layout.right + _BESIDE, (top + low - height) / 2, _THICK, height)
    bar = figure.colorbar(ScalarMappable(Normalize(*page.scale), COLORMAP), cax=axes)
    bar.outline.set_edgecolor(_INK)
    numbers, texts = _numbers(page.scale, height)
    bar.set_ticks(numbers, labels=texts)
    bar.ax.tick_params(**_TICK)
    bar.set_label(page.note, size=SIZE, labelpad=3, color=_INK)


def _numbers(scale: tuple[float, float], height: float) -> tuple[list[float], list[str]]:
    """What stands along a bar of so many inches and how it is written: round values with as many
    digits as they differ in, or both ends where there is no room for two of those."""
    from matplotlib.ticker import MaxNLocator

    low, high = scale
    for most in (5, 4, 3, 2):
        found = [float(x) for x in MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)]
        shown, step = [x for x in found if low <= x <= high], found[1] - found[0]
        if len(shown) > 1 and step * height >= LINE * (high - low):
            digits = max(0, -math.floor(math.log10(step) + 1e-6))
            return shown, [f"{x:.{digits}f}" for x in shown]
    return [low, high], [f"{x:.2g}" for x in scale]
