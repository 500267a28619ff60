"""Where the panels of a figure lie on a page, and what text has room around them. In inches.

place_flow(9, 1.0, right)                      panels with names above, row after row
place_table(labels, titles, 1.0, right, pen)   a row a label, a column a title
Layout.corner(row, column), .panel, .size      what is drawn where
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from .lettering import Pen

WIDTH, HEIGHT = 7.0, 9.5  # of a page's text
LARGEST, SMALLEST = 1.6, 0.12  # a panel's width at most; each of its sides at least
EDGE, LINE, PAD = 0.04, 0.14, 0.05  # around the figure, from line to line, around text
_ENOUGH, _HIGH = 0.5, 7.0  # a panel's width, a figure's height: a sensible size
_GAP = 0.12  # between panels, of a panel's side
_TICKED = 0.4  # a side that has room for numbers
_TICKS = 0.25  # the numbers left of a panel
_LABEL = 1.1  # a row's label at most
_MOST_BLOCKS = 8
_BESIDE = 5  # panels a row, where each has its name above

Lines = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Blocks beside each other, each of rows of panels; the panels are as large as can be.

    Attributes:
        down, across: rows, and panels a row, of a block.
        aspect: a panel's height by its width.
        side: left of each block.
        head: above the first row, or above ``each``.
        right: of all panels.
        blocks: how many.
        joined: the lines of a row's label are one.
        upright: columns have their titles upright, in one line.
    """

    down: int
    across: int
    aspect: float
    side: float
    head: float
    right: float
    blocks: int = 1
    each: bool = False
    joined: bool = False
    upright: bool = False

    @property
    def panel(self) -> tuple[float, float]:
        """(width, height) of a panel."""
        columns = self.blocks * self.across
        wide = WIDTH - EDGE - LINE - self.blocks * self.side - self.right
        high = HEIGHT - self.foot - self.head * (self.down if self.each else 1)
        width = wide / (columns + _GAP * (columns - 1))
        height = high / (self.down + _GAP * (self.down - 1))
        width = min(width, height / self.aspect, LARGEST)
        return width, width * self.aspect

    @property
    def pitch(self) -> tuple[float, float]:
        """From panel to panel, across and down."""
        width, height = self.panel
        return width * (1 + _GAP), height * (1 + _GAP)

    @property
    def ticked(self) -> bool:
        """Whether numbers along a panel's sides have room."""
        return min(self.panel) >= _TICKED

    @property
    def foot(self) -> float:
        """Below the last row: numbers, and the name of the axis."""
        return EDGE + 2 * LINE + PAD

    @property
    def size(self) -> tuple[float, float]:
        """(width, height) of the figure."""
        x, y = self.corner(self.down - 1, self.blocks * self.across - 1)
        width, height = self.panel
        return x + width + self.right, y + height + self.foot

    def corner(self, row: int, column: int) -> tuple[float, float]:
        """(x, y) of a panel's upper left corner from the figure's; columns count on from block to
        block."""
        across, down = self.pitch
        x = EDGE + LINE + (column // self.across + 1) * self.side + column * across
        return x, (row + 1 if self.each else 1) * self.head + row * down

    def label(self, lines: Lines, pen: Pen) -> str:
        """A row's label as it is written: below each other, or in one line, whose end is the first
        of them; that may be shortened."""
        shown = [", ".join(reversed(lines))] if self.joined else lines
        return "\n".join(pen.fit(line, _LABEL) for line in shown)

    def title(self, lines: Lines) -> str:
        """A column's title as it is written."""
        return (", " if self.upright else "\n").join(lines)


def place_flow(number: int, aspect: float, right: float) -> Layout:
    """Five panels a row, or more where else the page would not hold them.

    Raises:
        ValueError: the panels have no room on a page.
    """
    least = math.ceil(number / math.ceil(number / _BESIDE))
    layouts = [
        Layout(math.ceil(number / n), n, aspect, _TICKS, LINE + PAD, right, each=True)
        for n in range(least, number + 1)
    ]
    return _with_room(max(layouts, key=lambda one: one.panel), f"{number} panels")


def place_table(
    labels: Sequence[Lines], titles: Sequence[Lines], aspect: float, right: float, pen: Pen
) -> Layout:
    """As few blocks as a sensible size allows; where none does, the largest panels.

    Raises:
        ValueError: the panels have no room on a page.
    """
    found = []
    for joined, upright in product((False, True), repeat=2):
        kind = Layout(1, len(titles), aspect, 0, 0, right, joined=joined, upright=upright)
        beside = [line for one in labels for line in kind.label(one, pen).split("\n")]
        above = [line for one in titles for line in kind.title(one).split("\n")]
        side = max(map(pen.width, beside)) + PAD + _TICKS
        widest, lines = max(map(pen.width, above)) + PAD, len(above) // len(titles)
        deep = len(beside) // len(labels)
        for blocks in range(1, _MOST_BLOCKS + 1):
            down = math.ceil(len(labels) / blocks)
            head = (widest if upright else lines * LINE) + PAD
            one = replace(kind, down=down, blocks=blocks, side=side, head=head)
            across, high = one.pitch
            if (upright or widest <= across) and (deep == 1 or deep * LINE <= high):
                found.append(one)
    sensible = [one for one in found if one.panel[0] >= _ENOUGH and one.size[1] <= _HIGH]
    fewest = min((one.blocks for one in sensible), default=0)
    best = [one for one in sensible if one.blocks == fewest] or found
    what = f"{len(labels)} rows of {len(titles)} panels"
    return _with_room(max(best, key=lambda one: one.panel), what)


def _with_room(layout: Layout, what: str) -> Layout:
    if min(layout.panel) < SMALLEST:
        raise ValueError(
            f"{what} have no room on a page of {WIDTH:g} x {HEIGHT:g} inches, each of whose sides "
            f"is {SMALLEST} inches or more. Name fewer words if they are many, or keep fewer "
            "steps or heads."
        )
    return layout
