"""The figures as tables in Markdown, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .causes import SPANS
from .records import KINDS
from .variants import CANDIDATES, DEFAULT, PARTS, PEERS

MEASURES = {
    "iou": "IoU, best threshold",
    "fixed": "IoU, half of the range",
    "otsu": "IoU, Otsu",
    "pointing": "pointing game",
    "precision": "average precision",
}
TITLES = {
    "drawn": "Images that the model drew (masks by the checker)",
    "noised": "Given images, noised to a few timesteps (exact masks)",
    "inverted": "Given images, inverted (exact masks)",
}
OWN = "word on its own object"
NAMES = {"noun": "Nouns", "colour": "Colour words", "ground": "Background words"}
Figures = Mapping[str, Any]


def all_tables(figures: Figures, options: Mapping[str, str], checker: Figures) -> str:
    """Return all of them; ``options`` are those of the run, ``checker`` what is known of it."""
    drawn = [figures[f"drawn, {split}"]["image"][DEFAULT] for split in ("for choosing", "reported")]
    right = np.average([one["right"][0] for one in drawn], weights=[one["n"] for one in drawn])
    parts = [
        f"{options['scenes']} scenes that training never saw (seed {options['seed']}), "
        f"{options['noises']} seeds of noise each; {options['inverted']} scenes inverted, "
        f"{options['causes']} with knockouts. {right:.1%} of the drawn images have the objects "
        "that were asked for, and no others; the rest is left out. Scenes with even numbers are to "
        "choose by, those with odd ones are in all other tables. Intervals are 95 %, by resampling "
        "scenes.\n"
    ]
    if checker:
        parts.append(
            f"The checker's own IoU on composed scenes is {checker['overlap']:.3f}; it reads the "
            f"objects of {checker['objects']:.1%} of them, and their colours in "
            f"{checker['colours']:.1%}, as they are.\n"
        )
    for way, title in TITLES.items():
        parts.append(f"**{title}**\n")
        for kind in KINDS:
            parts.append(f"{NAMES[kind]}:\n")
            parts.append(table(reported(figures, way, kind), PEERS, measures_of(kind)))
    parts.append("**How far the default preset is ahead, noun by noun**\n")
    parts.append(_ahead(figures))
    parts.append("**To choose the default by**: means over the three kinds of images\n")
    parts.append(choices(figures))
    parts.append("**How much of a noun's map is on the other object, of two**\n")
    parts.append(_leakage(figures))
    parts.append("**Which map agrees with the cause**\n")
    parts.append(causes_table(figures.get("causes", {}).get("noun", {})))
    parts.append("**What stays without a word**\n")
    parts.append(without_table(figures))
    parts.append("**Layers and steps**, each the mean of all others, nouns in drawn images\n")
    parts.append(table(reported(figures, "drawn", "noun"), PARTS, measures_of("noun")))
    return "\n".join(parts)


def reported(figures: Figures, way: str, kind: str, split: str = "reported") -> Figures:
    """Return the figures of a kind of words in a kind of images, by variant."""
    found: Figures = figures.get(f"{way}, {split}", {}).get(kind, {})
    return found


def measures_of(kind: str) -> Mapping[str, str]:
    """Return the measures of a kind of words: the background is no word's own object."""
    return MEASURES if kind == "ground" else {**MEASURES, "own": OWN}


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*names: str) -> list[str]:
    return [_row(*names), "|---" * len(names) + "|"]


def _cell(figure: Sequence[float] | None, sign: str = "") -> str:
    """Return a mean and how far the farther end of its interval is."""
    if figure is None:
        return "-"
    mean, low, high = figure
    return f"{mean:{sign}.3f} ± {max(mean - low, high - mean):.3f}"


def table(by_variant: Figures, names: Iterable[str], measures: Mapping[str, str]) -> str:
    """Return a line a variant, as far as there are figures of it."""
    lines = _head("", *measures.values())
    for name in names:
        entry = by_variant.get(name)
        if entry is not None:
            cells = [_cell(entry.get(measure)) for measure in measures]
            cells[0] += f" at {entry['level']:.2f}"
            lines.append(_row(name, *cells))
    return "\n".join(lines) + "\n"


def _ahead(figures: Figures) -> str:
    lines = _head("ahead of", "images", *MEASURES.values())
    for name in [one for one in PEERS if one != DEFAULT]:
        for way in TITLES:
            entry = reported(figures, way, "noun").get(name)
            if entry is not None:
                cells = [_cell(entry["ahead"][measure], "+") for measure in MEASURES]
                lines.append(_row(name, way, *cells))
    return "\n".join(lines) + "\n"


def choices(figures: Figures) -> str:
    """Return a line for each preset and candidate, in the half to choose by: the means of its
    figures over the kinds of images, for each kind of words; the highest IoU of nouns and colour
    words together first."""
    measures = {name: MEASURES[name] for name in ("iou", "fixed", "pointing", "precision")}
    rows: dict[str, list[float]] = {}
    for name in {**PEERS, **CANDIDATES}:
        cells = []
        for kind in KINDS:
            held = [reported(figures, way, kind, "for choosing").get(name) for way in TITLES]
            known = [entry for entry in held if entry]
            cells += [
                float(np.mean([entry[one][0] for entry in known])) if known else float("nan")
                for one in measures
            ]
        rows[name] = cells
    lines = _head("", *(f"{kind}: {told}" for kind in KINDS for told in measures.values()))
    by_both = sorted(rows, key=lambda name: -(rows[name][0] + rows[name][len(measures)]))
    lines += [_row(name, *(f"{one:.3f}" for one in rows[name])) for name in by_both]
    return "\n".join(lines) + "\n"


def _leakage(figures: Figures) -> str:
    lines = _head("", "in", "pairs", "on the other", "on its own", "the other's share of the image")
    for name in PEERS:
        for way in TITLES:
            for kind in ("alike", "others"):
                entry = figures.get(f"pairs {way}", {}).get(kind, {}).get(name)
                if entry is not None:
                    cells = [_cell(entry[one]) for one in ("leaked", "own", "area")]
                    lines.append(_row(name, way, kind, *cells))
    return "\n".join(lines) + "\n"


def without_table(figures: Figures) -> str:
    measures = {"noun": "its object", "colour": "that in its colour", "others": "other objects"}
    """Return how often an object, its colour and the others stay without a word."""
    lines = _head("without", "for", "words", *measures.values())
    for kind, by_span in figures.get("without", {}).items():
        for span, entry in by_span.items():
            cells = [_cell(entry.get(one)) for one in measures]
            lines.append(_row(f"a {kind}", span, str(entry["n"]), *cells))
    return "\n".join(lines) + "\n"


def causes_table(by_variant: Figures) -> str:
    """Return a line a variant: how far its maps rank cells as the change does, with the control."""
    keys = [key for span in SPANS for key in (span, f"{span}, control")]
    lines = _head("", *(f"rank correlation with the change, word gone for {key}" for key in keys))
    lines += [_row(name, *[_cell(of.get(key)) for key in keys]) for name, of in by_variant.items()]
    lines += ["", "The control is the map of the other object's word."]
    return "\n".join(lines) + "\n"


def plot(figures: Figures, path: Path) -> None:
    """Draw the IoU of nouns: presets in each kind of images, layers and steps in drawn ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), constrained_layout=True)
    colours = {"drawn": "#1b6ca8", "noised": "#d1495b", "inverted": "#8f7a2e"}
    for i, way in enumerate(TITLES):
        entries = reported(figures, way, "noun")
        names = [name for name in PEERS if name in entries]
        places = [list(PEERS).index(name) + 0.22 * (i - 1) for name in names]
        means = [entries[name]["iou"] for name in names]
        _points(left, places, means, colours[way], way)
    left.set_yticks(range(len(PEERS)), list(PEERS))
    left.set_title("Presets")
    left.legend(title="images", loc="lower left", frameon=False)
    entries = reported(figures, "drawn", "noun")
    known = [name for name in PARTS if name in entries]
    _points(right, range(len(known)), [entries[n]["iou"] for n in known], colours["drawn"], "")
    right.set_yticks(range(len(known)), known)
    right.set_title("Layers and steps, in drawn images")
    for one in (left, right):
        one.invert_yaxis()
        one.set_xlim(0, 1)
        one.set_xlabel("mean IoU at the best threshold, with 95 % intervals")
        one.grid(axis="x", alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _points(
    axes: Any, places: Sequence[float], found: Sequence[Any], colour: str, label: str
) -> None:
    means = [one[0] for one in found]
    errors = [[one[0] - one[1] for one in found], [one[2] - one[0] for one in found]]
    axes.errorbar(means, places, xerr=errors, fmt="o", color=colour, label=label, markersize=5)
