"""Figures of one image's run, for papers.

figure(run, "steps", ["red circle"])     a figure of matplotlib
save_figure(figure, "fig.pdf")           as PDF, SVG or PNG, whole or not at all
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..maps.heatmaps import Heatmaps
from ..maps.presets import Preset
from ..runs.imagerun import ImageRun
from ..runs.views import group_heatmaps, head_heatmaps, plain
from .choosing import chosen, kept_steps, not_kept
from .lettering import DPI, settings
from .panels import Page, flow, table
from .placing import Lines
from .saving import format_of, save_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["words", "steps", "layers", "heads"]
KINDS: tuple[Kind, ...] = ("words", "steps", "layers", "heads")
FORMATS = (".pdf", ".svg", ".png")
MOST_STEPS = 8
TIMES = "\N{MULTIPLICATION SIGN}"
_UNDATED: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


def figure(run: ImageRun, kind: Kind, words: Sequence[str] | None = None) -> Figure:
    """Small multiples of a run's maps, at most 7 x 9.5 inches, with one colour bar for all.

    ``"words"``: the picture and a panel a word. ``"steps"``: a row a word, a column a step of those
    that were kept, at most 8 of them, evenly, the first and the last included; steps are counted
    from 1. ``"layers"``: a column a group of layers, by place and grid (rows x cols), in the order
    in which they run. ``"heads"``: a row a word and layer, of the layers that the preset reads on
    their finest grid, a column a head; heads and layers have the model's numbers, from 0, so that
    ``up 3.0.1`` is the ``attn2`` of ``up_blocks.3.attentions.0.transformer_blocks.1``.

    A cell has one colour, as it was measured. The first colour is the smallest value of all panels,
    the last one the largest: panels of one figure can be compared.

    Args:
        run: of :meth:`sdattn.Run.image_run` or :func:`sdattn.load_run`.
        kind: which figure.
        words: words or phrases, each occurrence by itself; all words by default.

    Returns:
        A figure at 300 dpi that pyplot knows nothing of; its last axes are the colour bar.

    Raises:
        ValueError: no such kind, the run has not kept what it shows, or there are more panels than
            a page has room for.
        KeyError: a word that is not in the prompt.
    """
    if kind not in KINDS:
        raise ValueError(f"Asked for a figure of {kind!r}: choose one of {', '.join(KINDS)}.")
    draw = {"words": _words, "steps": _steps, "layers": _layers, "heads": _heads}[kind]
    with settings():
        return draw(run, words)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure as the file's name says, ``.pdf``, ``.svg`` or ``.png`` of 300 dpi.

    The same figure gives the same bytes. Text stays text. A file that is there is replaced once
    the new one is whole.

    Raises:
        ValueError: another format.
        OSError: it cannot be written.
    """
    kind = format_of(path, FORMATS)
    held = io.BytesIO()
    with settings():
        figure.savefig(held, format=kind, dpi=DPI, metadata=_UNDATED.get(kind))
    save_file(path, held.getvalue())


def _words(run: ImageRun, words: Sequence[str] | None) -> Figure:
    maps = chosen(run.heatmaps, words)
    page = _page(run, [one.values.numpy() for one in maps], run.heatmaps.preset)
    named = [(one.label, one.values.numpy()) for one in maps]
    return flow([("image", np.asarray(run.image.convert("RGB"))), *named], page)


def _steps(run: ImageRun, words: Sequence[str] | None) -> Figure:
    kept = kept_steps(run)
    places = np.linspace(0, len(kept) - 1, min(len(kept), MOST_STEPS)).round().astype(int)
    shown = [kept[place] for place in places]
    return _columns(run, shown, words, replace(run.heatmaps.preset, steps="mean"))


def _layers(run: ImageRun, words: Sequence[str] | None) -> Figure:
    groups = group_heatmaps(run)
    shown = [((*name.replace("x", TIMES).split(),), one) for name, one in groups.items()]
    return _columns(run, shown, words, plain(run.heatmaps.preset))


def _heads(run: ImageRun, words: Sequence[str] | None) -> Figure:
    layers = head_heatmaps(run)
    if not layers:
        raise not_kept("heads")
    found = {
        _short(run.layers.layers[name].place, name): [chosen(one, words) for one in heads]
        for name, heads in layers.items()
    }
    labels: list[Lines] = []
    rows: list[list[np.ndarray]] = []
    for i, word in enumerate(chosen(run.heatmaps, words)):
        for layer, heads in found.items():
            labels.append((word.label, layer))
            rows.append([one[i].values.numpy() for one in heads])
    most, numbers = max(map(len, rows)), run.details.head_numbers
    titles = [(f"head {n}",) for n in (range(most) if numbers == "all" else numbers)]
    every = [one for row in rows for one in row]
    return table(rows, labels, titles, _page(run, every, plain(run.heatmaps.preset)))


def _columns(
    run: ImageRun,
    shown: Sequence[tuple[Lines, Heatmaps]],
    words: Sequence[str] | None,
    preset: Preset,
) -> Figure:
    """A row a word, a column each of what is shown."""
    columns = [chosen(one, words) for _, one in shown]
    rows = [[one.values.numpy() for one in row] for row in zip(*columns, strict=True)]
    labels = [(one.label,) for one in columns[0]]
    page = _page(run, [one for row in rows for one in row], preset)
    return table(rows, labels, [title for title, _ in shown], page)


def _short(place: str, name: str) -> str:
    """``up 3.0.1`` of ``up_blocks.3.attentions.0.transformer_blocks.1.attn2``."""
    return f"{place} {'.'.join(part for part in name.split('.') if part.isdigit())}"


def _page(run: ImageRun, drawn: Sequence[np.ndarray], preset: Preset) -> Page:
    low, high = float(min(map(np.min, drawn))), float(max(map(np.max, drawn)))
    if not np.isfinite([low, high]).all():
        raise ValueError("The maps hold values that are not finite; they cannot be drawn.")
    if low == high:  # a scale has two ends
        low, high = (0.0, high) if high > 0 else (0.0, 1.0)
    return Page(run.image.size, (low, high), preset.unit)
