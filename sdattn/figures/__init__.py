"""Figures of one image's run, for papers.

figure(run, "steps", ["a cat"])          a matplotlib figure
save_figure(figure, "fig.pdf")           as PDF, SVG or PNG, whole or not at all
animate(run, ["cat"])                    its maps over the steps, one image per step
save_animation(frames, "steps.gif")      as GIF or WebP
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ..errors import InvalidValueError, refuse
from ..maps.heatmap import Heatmap
from ..maps.heatmaps import Heatmaps
from ..maps.presets import Preset
from ..runs.imagerun import (
    ImageRun,
    group_heatmaps,
    head_heatmaps,
    not_kept,
    plain,
    short_name,
)
from .animation import animate, save_animation
from .choosing import chosen, format_of, kept_steps, save_file
from .lettering import DPI, settings
from .panels import Lines, Page, Panel, fill, flow, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Places = Sequence[Axes] | np.ndarray

__all__ = ["animate", "figure", "save_animation", "save_figure"]

Kind = Literal["words", "steps", "layers", "heads", "frames"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORMATS = (".pdf", ".svg", ".png")
MOST_STEPS = MOST_FRAMES = 8
TIMES = "\N{MULTIPLICATION SIGN}"
Shown = tuple[list[list[Panel]], Preset]  # panels in rows, and the preset that names their unit
_UNDATED: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


def figure(
    run: ImageRun, kind: Kind, words: Sequence[str] | None = None, *, axes: Places | None = None
) -> Figure:
    """Draw small multiples of a run's maps, at most 7 x 9.5 inches, with one colour bar for all.

    ``"words"``: the image and one panel per word. ``"steps"``: one row per word, one column per
    kept step, at most 8, evenly spaced, including the first and the last; steps are counted from 1.
    ``"layers"``: one column per group of layers, by place and grid (rows x cols), in the order in
    which they run. ``"heads"``: one row per word and layer (the preset's layers on their finest
    grid), one column per head; heads and layers have the model's numbers, from 0: ``up 3.0.1`` is
    ``up_blocks.3.attentions.0.transformer_blocks.1.attn2``. ``"frames"``, for a video: one column
    per frame, chosen likewise; one row for the video, then one per word. All other figures show its
    middle frame; for another pass ``run.frame(number)``.

    The first colour is the smallest value of all panels, the last one the largest. Text has the
    fonts and sizes of the user's rcParams, else 8 points.

    Args:
        run: from :meth:`sdattn.Run.image_run` or :func:`sdattn.load_run`.
        words: words or phrases, each occurrence by itself (default: all words).
        axes: axes from ``plt.subplots()``, one per panel, row after row, to draw into instead of a
            new figure. Their figure keeps its size and layout, and all rcParams are the user's.

    Returns:
        The figure of ``axes``, or one at 300 dpi without pyplot; its last axes are the colour bar.

    Raises:
        ValueError: no such kind, the run has not kept what it shows, frames of an image , too many
            panels for a page, or not as many as ``axes``.
        KeyError: a word that is not in the prompt.
    """
    if kind not in KINDS:
        raise refuse("kind", kind, KINDS)
    if run.video is not None and kind != "frames":
        run = run.frame(run.video.middle)
    rows, preset = _KINDS[kind](run, words)
    page = _page(run, rows, preset)
    if axes is not None:
        return fill(axes, rows, page)
    with settings():
        return flow(rows[0], page) if kind == "words" else table(rows, page)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure as ``.pdf``, ``.svg`` or ``.png`` (300 dpi), by the file's extension; raise
    ValueError for another format.

    The same figure gives the same bytes; text stays text.
    """
    kind = format_of(path, FORMATS)
    held = io.BytesIO()
    with settings():
        figure.savefig(held, format=kind, dpi=DPI, metadata=_UNDATED.get(kind))
    save_file(path, held.getvalue())


def _words(run: ImageRun, words: Sequence[str] | None) -> Shown:
    row = [_panel(word, (word.label,)) for word in chosen(run.heatmaps, words)]
    image = Panel(np.asarray(run.image.convert("RGB")), ("image",))
    return [[image, *row]], run.heatmaps.preset


def _steps(run: ImageRun, words: Sequence[str] | None) -> Shown:
    kept = kept_steps(run)
    positions = np.linspace(0, len(kept) - 1, min(len(kept), MOST_STEPS)).round().astype(int)
    shown = [kept[position] for position in positions]
    return _columns(shown, words), replace(run.heatmaps.preset, steps="mean")


def _layers(run: ImageRun, words: Sequence[str] | None) -> Shown:
    groups = group_heatmaps(run).items()
    shown = [(tuple(name.replace("x", TIMES).split()), maps) for name, maps in groups]
    return _columns(shown, words), plain(run.heatmaps.preset)


def _heads(run: ImageRun, words: Sequence[str] | None) -> Shown:
    layers = head_heatmaps(run)
    if not layers:
        raise not_kept("heads")
    rows = []
    for name, heads in layers.items():
        shown = [((f"head {number}",), head) for number, head in heads.items()]
        rows.append(_columns(shown, words, short_name(run, name)))
    by_word = [row for of_word in zip(*rows, strict=True) for row in of_word]
    return by_word, plain(run.heatmaps.preset)


def _frames(run: ImageRun, words: Sequence[str] | None) -> Shown:
    if run.video is None:
        raise InvalidValueError(
            "This run made an image, which has no frames. Choose a figure of its words."
        )
    numbers = run.video.key_frames(MOST_FRAMES)
    frames = [run.frame(number) for number in numbers]
    titles = [(f"frame {number + 1}",) for number in numbers]
    video = [
        Panel(np.asarray(frame.image.convert("RGB")), title, ("video",))
        for frame, title in zip(frames, titles, strict=True)
    ]
    shown = list(zip(titles, (frame.heatmaps for frame in frames), strict=True))
    return [video, *_columns(shown, words)], run.heatmaps.preset


_KINDS = dict(zip(KINDS, (_words, _steps, _layers, _heads, _frames), strict=True))


def _columns(
    shown: Sequence[tuple[Lines, Heatmaps]], words: Sequence[str] | None, *label: str
) -> list[list[Panel]]:
    """Arrange panels with one row per word, labelled with it and ``label``, and one column each."""
    columns = [
        [_panel(word, title, (word.label, *label)) for word in chosen(maps, words)]
        for title, maps in shown
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _panel(word: Heatmap, title: Lines, label: Lines = ()) -> Panel:
    return Panel(word.map.numpy(), title, label)


def _page(run: ImageRun, rows: Sequence[Sequence[Panel]], preset: Preset) -> Page:
    drawn = [panel.values for row in rows for panel in row if panel.values.ndim == 2]
    low, high = float(min(map(np.min, drawn))), float(max(map(np.max, drawn)))
    if not np.isfinite([low, high]).all():
        raise InvalidValueError("The maps hold values that are not finite; they cannot be drawn.")
    if low == high:  # a scale has two ends
        low, high = (0.0, high) if high > 0 else (0.0, 1.0)
    return Page(run.image.size, (low, high), preset.unit)
