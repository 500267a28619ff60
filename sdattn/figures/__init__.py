"""Figures of one image's run, for papers.

figure(run, "steps", ["a cat"])          a matplotlib figure
save_figure(figure, "fig.pdf")           as PDF, SVG or PNG, whole or not at all
card(run, ["cat"])                       one image to share, 1200 x 630
animate(run, ["cat"])                    its maps over the steps, a card per step
save_animation(frames, "steps.gif")      as GIF, WebP or MP4
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ..errors import InvalidValueError, refuse, refuse_calls
from ..maps.heatmap import Heatmap
from ..maps.heatmaps import Heatmaps
from ..maps.presets import Preset
from ..maps.render import COLORMAP, check_colormap, check_proportions
from ..runs.imagerun import (
    ImageRun,
    group_heatmaps,
    head_heatmaps,
    not_kept,
    plain,
    short_name,
)
from ..runs.run import Run
from .animation import animate, save_animation
from .card import card
from .choosing import chosen, format_of, kept_steps, one_image, save_file
from .lettering import DPI, settings
from .lettering import plain as plain_text
from .panels import Lines, Page, Panel, Style, fill, flow, scale_of, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Places = Sequence[Axes] | np.ndarray

__all__ = ["animate", "card", "figure", "save_animation", "save_figure"]

refuse_calls(__name__, "sdattn.figures.figure(run, kind)")

Kind = Literal["words", "steps", "layers", "heads", "frames", "compare"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORMATS = (".pdf", ".svg", ".png")
MOST_STEPS = MOST_FRAMES = 8
WIDEST = 40  # inches
TIMES = "\N{MULTIPLICATION SIGN}"
Shown = tuple[list[list[Panel]], Preset]  # panels in rows, and the preset that names their unit
_UNDATED: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


def figure(
    run: ImageRun | Run,
    kind: Kind,
    words: Sequence[str] | None = None,
    *,
    others: Sequence[ImageRun | Run] = (),
    cmap: str = COLORMAP,
    width: float | None = None,
    show_axes: bool = True,
    own_scale: bool | None = None,
    colorbar: bool = True,
    axes: Places | None = None,
) -> Figure:
    """Draw small multiples of a run's maps, at most 7 x 9.5 inches, with one colour bar for all.

    ``"words"``: the image and one panel per word. ``"steps"``: one row per word, one column per
    kept step, at most 8, evenly spaced, including the first and the last; steps are counted from 1.
    ``"layers"``: one column per group of layers, by place and grid (rows x cols), in the order in
    which they run. ``"heads"``: one row per word and layer (the preset's layers on their finest
    grid), one column per head; heads and layers have the model's numbers, from 0: ``up 3.0.1`` is
    ``up_blocks.3.attentions.0.transformer_blocks.1.attn2``. ``"frames"``, for a video: one column
    per frame, chosen likewise; one row for the video, then one per word. All other figures show its
    middle frame; for another pass ``run.frame(number)``. ``"compare"``: one row per run, this one
    and ``others``, each with its image and its words.

    The first colour is the smallest value of all panels, the last one the largest. Layers differ
    too much for that: a coarse grid's values are many times a fine one's, so each of their panels
    has its own scale, whose ends are written below it. Text has the fonts and sizes of the user's
    rcParams, else 8 points.

    Args:
        run: a run of one image, from :func:`sdattn.generate` or :func:`sdattn.load_run`; of several
            images one, ``run[0]``.
        words: words or phrases, each occurrence by itself (default: all words).
        others: further runs for ``"compare"``, of images in the same proportions.
        cmap: name of a matplotlib colormap.
        width: width of the figure in inches, whatever the number of panels (default: as wide as
            they need, at most 7).
        show_axes: draw frames, and the sides in pixels.
        own_scale: give each panel its own scale, or all the same (default: own for ``"layers"``).
        colorbar: draw the colour bar.
        axes: axes from ``plt.subplots()``, one per panel, row after row, to draw into instead of a
            new figure. Their figure keeps its size and layout, and all rcParams are the user's.

    Returns:
        The figure of ``axes``, or one at 300 dpi without pyplot; its last axes are the colour bar,
        if there is one.

    Raises:
        ValueError: no such kind, colormap or width, the run has not kept what it shows, frames of
            an image, too many panels for a page, or not as many as ``axes``; runs that cannot be
            compared.
        KeyError: a word that is not in the prompt.
    """
    if kind not in KINDS:
        raise refuse("kind", kind, KINDS)
    if bool(others) != (kind == "compare"):
        text = "Pass the further runs as `others`, for the figure that compares them."
        raise InvalidValueError(text)
    check_colormap(cmap)
    if width is not None and not (isinstance(width, (int, float)) and 1 <= width <= WIDEST):
        raise refuse("width", width, f"inches, from 1 to {WIDEST}")
    if own_scale is None:
        own_scale = kind == "layers"
    style = Style(cmap, width, show_axes, own_scale, colorbar)
    runs = []
    for shown in map(one_image, (run, *others)):
        if kind != "frames" and shown.video is not None:
            shown = shown.frame(shown.video.middle)
        runs.append(shown)
    rows, preset = _compared(runs, words) if others else _KINDS[kind](runs[0], words)
    drawn = []
    for row in rows:
        drawn += [panel.values for panel in row if panel.values.ndim == 2]
    unit = f"{preset.unit}, each panel on its own scale" if own_scale else preset.unit
    page = Page(runs[0].image.size, scale_of(drawn), unit, style)
    if axes is not None:
        return fill(axes, rows, page)
    with settings():
        if kind == "words":
            return flow(rows[0], page)
        return table(rows, page, each=kind == "compare")


def save_figure(figure: Figure, path: str | Path, *, dpi: float = DPI) -> None:
    """Write a figure as ``.pdf``, ``.svg`` or ``.png``, by the file's extension; raise ValueError
    for another format, or a resolution that is not from 20 to 2400 pixels an inch.

    The same figure gives the same bytes; text stays text, with its fonts (Type 42) in a PDF.
    """
    kind = format_of(path, FORMATS)
    if not 20 <= dpi <= 2400:
        raise refuse("dpi", dpi, "pixels per inch, from 20 to 2400")
    buffer = io.BytesIO()
    with settings():
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=_UNDATED.get(kind))
    save_file(path, buffer.getvalue())


def _words(run: ImageRun, words: Sequence[str] | None, *label: str) -> Shown:
    row = [_panel(word, (word.label,), label) for word in chosen(run.heatmaps, words)]
    image = Panel(np.asarray(run.image.convert("RGB")), ("image",), label)
    return [[image, *row]], run.heatmaps.preset


def _compared(runs: Sequence[ImageRun], words: Sequence[str] | None) -> Shown:
    """Return a row for each run: its image, and the maps of the ``words`` in its prompt."""
    first = runs[0]
    for run in runs[1:]:
        if run.heatmaps.preset != first.heatmaps.preset:
            names = f"{first.heatmaps.preset.title} and {run.heatmaps.preset.title}"
            raise InvalidValueError(f"Maps of two presets do not compare: {names}. Choose one.")
        check_proportions(run.image, first.image.size[::-1])
    rows = []
    for run, label in zip(runs, _told_apart(runs), strict=True):
        its_words = words if words is None else [word for word in words if word in run.heatmaps]
        rows += _words(run, its_words, label)[0] if its_words or words is None else []
    for word in words or ():
        if not any(word in run.heatmaps for run in runs):
            first.heatmaps.find(word)  # says that it is not there
    return rows, first.heatmaps.preset


def _told_apart(runs: Sequence[ImageRun]) -> list[str]:
    """Return what tells the runs apart, for each of them: seed, model or scheduler, else a
    number."""
    for name in ("seed", "model", "scheduler"):
        values = [getattr(run.settings, name) for run in runs]
        if len(set(values)) == len(runs):
            if name == "seed":
                return [f"seed {value}" for value in values]
            return [plain_text(str(value)) for value in values]
    return [f"run {number}" for number in range(1, len(runs) + 1)]


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
    by_word: list[list[Panel]] = []
    for of_word in zip(*rows, strict=True):
        by_word += of_word
    return by_word, plain(run.heatmaps.preset)


def _frames(run: ImageRun, words: Sequence[str] | None) -> Shown:
    if run.video is None:
        raise InvalidValueError(
            "This run made an image, which has no frames. Choose a figure of its words."
        )
    video = []
    shown = []
    for number in run.video.key_frames(MOST_FRAMES):
        frame = run.frame(number)
        title = (f"frame {number + 1}",)
        video.append(Panel(np.asarray(frame.image.convert("RGB")), title, ("video",)))
        shown.append((title, frame.heatmaps))
    return [video, *_columns(shown, words)], run.heatmaps.preset


_KINDS = {  # of one run
    "words": _words,
    "steps": _steps,
    "layers": _layers,
    "heads": _heads,
    "frames": _frames,
}


def _columns(
    shown: Sequence[tuple[Lines, Heatmaps]], words: Sequence[str] | None, *label: str
) -> list[list[Panel]]:
    """Arrange panels with one row per word, labelled with it and ``label``, and one column each."""
    columns = []
    for title, maps in shown:
        columns.append([_panel(word, title, (word.label, *label)) for word in chosen(maps, words)])
    return [list(row) for row in zip(*columns, strict=True)]


def _panel(word: Heatmap, title: Lines, label: Lines = ()) -> Panel:
    return Panel(word.map.numpy(), title, label)
