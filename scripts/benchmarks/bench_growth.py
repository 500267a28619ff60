"""How the price of watching a layer grows: time, bytes held and peak, against what theory says.

Single layers with random weights run in the middle of a pass: SD 1.5's finest cross-attention and
the self-attention that refines its maps, a block of SD3, and the layers of Wan and CogVideoX for
videos. Each point is the least of some rounds in the thread's own time, in one thread, so that a
machine with other work tells the same. Watching is making maps and adding them up.

    python -m scripts.benchmarks.bench_growth --out growth.json --plot growth.png
    python -m scripts.benchmarks.bench_growth --quick            a minute at most
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

import sdattn
from sdattn.batch.drawing import trim_heap
from sdattn.keep.sums import Sum
from sdattn.look.attended import Attended

from .growth_layers import LAYERS, OneLayer, Shape, video_bytes
from .machine import forget_peak, peak_bytes, processor_name

COLUMNS = 32  # that are refined: the words of a prompt and the special tokens around them
LONG = 1.0  # seconds of a call that is measured once
VALUES = {  # of each axis, and with --quick
    "side": ((512, 768, 1024, 1536, 2048), (256, 512)),
    "tokens": ((77, 154, 256, 512), (77, 154)),
    "images": ((1, 2, 4, 8), (1, 2)),
    "steps": ((10, 20, 50, 100), (2, 4)),
    "frames": ((1, 17, 41, 81), (1, 9)),
}
LARGEST = 5_000  # cells of a layer whose time grows with their square
IMAGE = ("cross", "cross, refined", "joint", "joint, refined")
WAYS = {  # that are measured along an axis
    "side": IMAGE,
    "tokens": ("cross", "joint", "joint, refined"),
    "images": IMAGE,
    "steps": ("cross", "cross, each step", "joint"),
    "frames": ("cross", "joint", "joint, refined"),
}
THEORY = {  # exponents of (cells, tokens, images, steps): of the time that is added, of the bytes
    "cross": ((1, 1, 1, 1), (1, 1, 1, 0)),
    "cross, each step": ((1, 1, 1, 1), (1, 1, 1, 1)),
    "cross, refined": ((2, 0, 1, 1), (2, 0, 1, 0)),
    "joint": ((1, 1, 1, 1), (1, 1, 1, 0)),
    "joint, refined": ((2, 1, 1, 1), (1, 1, 1, 0)),
}
POWER = {"side": 0, "frames": 0, "tokens": 1, "images": 2, "steps": 3}  # their places in it


@dataclass(frozen=True)
class Point:
    """A measurement.

    Attributes:
        axis, way: what grows, and how it is watched.
        shape: the call.
        cells: queries of an image or video.
        layer, watching: seconds of its own, and of making maps and adding them up, in all steps.
        held: bytes held at the end.
        peak: bytes at most, over those of the layer unwatched.
    """

    axis: str
    way: str
    shape: Shape
    cells: int
    layer: float
    watching: float
    held: int
    peak: int


class TakeClock:
    """Seconds of the thread in which captures make maps and add them up, inside the block."""

    def __enter__(self) -> "TakeClock":
        self.seconds, take = 0.0, Sum.take

        def timed(held: Sum, attended: Attended) -> None:
            before = thread_time()
            take(held, attended)
            self.seconds += thread_time() - before

        self._patch = patch.object(Sum, "take", timed)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@cache
def layer_of(name: str) -> OneLayer:
    torch.manual_seed(0)
    return LAYERS[name]()


def shape_of(axis: str, way: str, value: int) -> Shape:
    """Return what a layer is called for where one quantity has a value; the others are small."""
    base = {"side": 256} if axis == "steps" else {}
    if axis == "frames":
        base = {"tokens": 512 if way == "cross" else 226}
    return Shape(**{**base, axis: value})


@torch.no_grad()
def measure(axis: str, way: str, shape: Shape, rounds: int, most: int) -> Point | None:
    """Measure a layer; None if it is too large and its time grows with the square of its cells."""
    kind = "self" if way == "cross, refined" else way.partition(",")[0]
    one = layer_of(f"video, {kind}" if shape.frames else kind)
    cells = one.prepare(shape)
    if cells > most and not kind.startswith("cross"):
        return None
    options: dict[str, Any] = {"layers": one.layer.name, "kinds": (one.layer.kind,)}
    if way == "cross, each step":
        options["steps"] = "all"
    if way == "joint, refined":
        options |= {
            "refine": "self",
            "tokens": range(shape.tokens if axis == "tokens" else COLUMNS),
        }
    plain = run(one, nullcontext(), [shape.steps] if axis == "steps" else [1])
    # a first pass checks what is not checked again, and refines in another way
    passes = [shape.steps] if axis == "steps" else [1, 1]
    watched = run(one, sdattn.capture(one.model, **options), passes)
    for _ in range(rounds - 1 if watched.layer < LONG else 0):
        again = run(one, sdattn.capture(one.model, **options), passes)
        watched = min(watched, again, key=lambda found: found.watching)
    layer = watched.layer - watched.watching
    more = watched.peak - plain.peak
    return Point(axis, way, shape, cells, layer, watched.watching, watched.held, more)


class Found(NamedTuple):
    layer: float
    watching: float
    peak: int
    held: int


def run(one: OneLayer, watch: AbstractContextManager[Any], passes: Sequence[int]) -> Found:
    """Return the seconds of the last ``passes`` in the layer and of watching in it, the peak, and
    what is held."""
    trim_heap()
    forget_peak("cpu")
    before = peak_bytes("cpu")
    with TakeClock() as clock, watch as store:
        for number in passes:
            clock.seconds = 0.0
            layer = sum(one.call() for _ in range(number))
        peak = peak_bytes("cpu") - before
        return Found(layer, clock.seconds, peak, 0 if store is None else store.nbytes)


def growth(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the exponents along each axis, beside the theory's: slopes in logarithms, by least
    squares. In cells along sides and frames."""
    found = []
    for axis, ways in WAYS.items():
        for way in ways:
            own = [one for one in points if (one.axis, one.way) == (axis, way)]
            cells = POWER[axis] == 0
            sizes = [one.cells if cells else getattr(one.shape, axis) for one in own]
            series = {
                name: [getattr(one, name) for one in own]
                for name in ("layer", "watching", "held", "peak")
            }
            slopes = {name: slope(sizes, values) for name, values in series.items()}
            watching, held = (theory[POWER[axis]] for theory in THEORY[way])
            said = {"axis": axis, "way": way, "in": "cells" if cells else axis}
            found.append({**said, **slopes, "theory": {"watching": watching, "held": held}})
    return found


def slope(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the slope of log(value) over log(size); None where fewer than two are above 0."""
    pairs = [(math.log(x), math.log(y)) for x, y in zip(sizes, values, strict=True) if y > 0]
    if len({x for x, _ in pairs}) < 2:
        return None
    return round(float(np.polyfit(*zip(*pairs, strict=True), 1)[0]), 3) + 0.0  # no -0.0


def print_tables(points: Sequence[Point], slopes: Sequence[dict[str, Any]]) -> None:
    columns = ("watched", "along", "the layer", "watching", "theory", "held", "theory", "peak")
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for one in slopes:
        numbers = [one["layer"], one["watching"], one["theory"]["watching"]]
        numbers += [one["held"], one["theory"]["held"], one["peak"]]
        texts = [
            "-" if n is None else f"{n:.2f}" if isinstance(n, float) else str(n) for n in numbers
        ]
        print(f"| {one['way']} | {one['in']} ({one['axis']}) | {' | '.join(texts)} |")
    print("\n| watched | of | the layer | watching | held | peak |\n|---|---|---|---|---|---|")
    for point in largest(points):
        held, peak = point.held / 1e6, point.peak / 1e6
        value = f"{getattr(point.shape, point.axis)} {point.axis}"
        texts = f"{point.layer:.2f} s | {point.watching:.3f} s | {held:,.1f} MB | {peak:+,.0f} MB"
        print(f"| {point.way} | {value}, {point.cells:,} cells | {texts} |")


def largest(points: Sequence[Point]) -> list[Point]:
    """Return the last point of each axis and way."""
    return list({(point.axis, point.way): point for point in points}.values())


def plot(points: Sequence[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = {axis: ways for axis, ways in WAYS.items() if axis in {one.axis for one in points}}
    figure, panels = pyplot.subplots(
        2, len(measured), figsize=(3 * len(measured), 6), layout="constrained", squeeze=False
    )
    colours = dict(zip(THEORY, ("C0", "C2", "C1", "C3", "C4"), strict=True))
    for column, (axis, ways) in enumerate(measured.items()):
        for way in ways:
            own = [one for one in points if (one.axis, one.way) == (axis, way)]
            sizes = [getattr(one.shape, axis) for one in own]
            style = {"color": colours[way], "label": way, "marker": "o", "markersize": 3}
            panels[0, column].plot(sizes, [one.watching for one in own], **style)
            panels[1, column].plot(sizes, [one.held / 1e6 for one in own], **style)
        for row, title in enumerate(("seconds of watching", "MB held")):
            panels[row, column].set(xscale="log", yscale="log", xlabel=axis)
            panels[row, column].set_title(title, fontsize=10)
            panels[row, column].minorticks_off()
            values = sorted({getattr(one.shape, axis) for one in points if one.axis == axis})
            panels[row, column].set_xticks(values, values)
            panels[row, column].grid(alpha=0.3)
    handles = {
        name: line
        for panel in panels[0]
        for line, name in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few small sizes, once each")
    parser.add_argument(
        "--largest",
        type=int,
        default=LARGEST,
        metavar="CELLS",
        help="of layers whose time grows with their square; 17000 takes an hour",
    )
    parser.add_argument("--axes", nargs="+", choices=VALUES, default=list(VALUES))
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("--plot", type=Path, help="draw them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {processor_name()}, float32")
    points, rounds = [], 1 if options.quick else 2
    for axis in options.axes:
        for way in WAYS[axis]:
            for value in VALUES[axis][options.quick]:
                found = measure(axis, way, shape_of(axis, way, value), rounds, options.largest)
                if found:
                    points.append(found)
                    print(found, file=sys.stderr)
    slopes, video = growth(points), video_bytes()
    print_tables(points, slopes)
    print(f"\n81 frames of 720x1280, Wan 2.1 14B: {video}")
    if options.out:
        machine = {"torch": torch.__version__, "processor": processor_name()}
        held = {"points": [asdict(one) for one in points], "exponents": slopes, "video": video}
        options.out.write_text(json.dumps({**machine, **held}, indent=1) + "\n")
    if options.plot:
        plot(points, options.plot)


if __name__ == "__main__":
    main()
