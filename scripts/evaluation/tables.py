"""The figures as tables in Markdown, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .causes import SPANS
from .variants import DEFAULT, PARTS, PEERS

MEASURES = {
    "iou": "IoU, best threshold",
    "fixed": "IoU, half of the range",
    "otsu": "IoU, Otsu",
    "pointing": "pointing game",
    "precision": "average precision",
}
TITLES = {
    "generated": "Images that the model drew (masks by colour)",
    "noised": "Given images, noised to a few timesteps (exact masks)",
    "inverted": "Given images, inverted (exact masks)",
}
Figures = Mapping[str, Any]


CALLED = {"generated": "drawn", "noised": "noised", "inverted": "inverted"}
OWN = "word on its own object"


def all_tables(figures: Figures, options: Mapping[str, str]) -> str:
    """All of them; ``options`` are those of the run."""
    right = figures["generated"]["image"][DEFAULT]["right"]
    parts = [
        f"{options['scenes']} scenes that training never saw (seed {options['seed']}), "
        f"{options['noises']} seeds of noise each; {options['causes']} scenes with knockouts, one "
        f"seed. {right[0]:.1%} of the drawn images have the objects that were asked for, and no "
        "others; the rest is left out. Intervals are 95 %, by resampling scenes.\n"
    ]
    for setting, title in TITLES.items():
        parts.append(f"**{title}**\n")
        parts.append(table(figures[setting]["shape"], PEERS, MEASURES))
    parts.append("**Lead of the default preset, map by map**\n")
    parts += [_ahead(figures)]
    parts.append("**Words on their own object, out of two; agreement of maps with causes**\n")
    parts.append(_words(figures))
    parts.append("**Layers and steps**, averaged over all others, in drawn images\n")
    parts.append(table(figures["generated"]["shape"], PARTS, {**MEASURES, "own": OWN}))
    return "\n".join(parts)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*names: str) -> list[str]:
    return [_row(*names), "|---" * len(names) + "|"]


def _cell(figure: Sequence[float] | None, sign: str = "") -> str:
    """A mean and how far the farther end of its interval is."""
    if figure is None:
        return "-"
    mean, low, high = figure
    return f"{mean:{sign}.3f} ± {max(mean - low, high - mean):.3f}"


def table(by_variant: Figures, names: Iterable[str], measures: Mapping[str, str]) -> str:
    """A line a variant, as far as there are figures of it."""
    lines = _head("", *measures.values())
    for name in names:
        entry = by_variant.get(name)
        if entry is not None:
            cells = [_cell(entry[measure]) for measure in measures]
            cells[0] += f" at {entry['level']:.2f}"
            lines.append(_row(name, *cells))
    return "\n".join(lines) + "\n"


def _ahead(figures: Figures) -> str:
    lines = _head("ahead of", "images", *MEASURES.values())
    for name in [one for one in PEERS if one != DEFAULT]:
        for setting in TITLES:
            entry = figures[setting]["shape"].get(name)
            if entry is not None:
                cells = [_cell(entry["ahead"][measure], "+") for measure in MEASURES]
                lines.append(_row(name, CALLED[setting], *cells))
    return "\n".join(lines) + "\n"


def _words(figures: Figures) -> str:
    keys, told = _causes()
    lines = _head("", f"shape {OWN}", f"colour {OWN}", *told)
    drawn, causes = figures["generated"], figures["causes"]["shape"]
    for name in PEERS:
        own = [_cell(drawn[kind][name]["own"]) for kind in ("shape", "colour")]
        lines.append(_row(name, *own, *[_cell(causes[name][key]) for key in keys]))
    lines += ["", "The control is the map of the other object's word.", "", *_head("", *told[::2])]
    for name in [one for one in PEERS if one != DEFAULT]:
        ahead = [_cell(causes[name]["ahead"][span], "+") for span in SPANS]
        lines.append(_row(f"default ahead of {name}", *ahead))
    return "\n".join(lines) + "\n"


def _causes() -> tuple[list[str], list[str]]:
    """Keys of the measures of agreement with a cause, and what they are called."""
    keys = [key for span in SPANS for key in (span, f"{span}, control")]
    return keys, [f"rank correlation with the change, word removed in {key}" for key in keys]


def causes_table(by_variant: Figures) -> str:
    """A line a variant: how far its maps rank cells as the change does, with the control."""
    keys, told = _causes()
    lines = _head("", *told)
    lines += [_row(name, *[_cell(of[key]) for key in keys]) for name, of in by_variant.items()]
    return "\n".join(lines) + "\n"


def plot(figures: Figures, path: Path) -> None:
    """IoU of presets in each setting, and of layers and steps in drawn images."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), constrained_layout=True)
    colours = {"generated": "#1b6ca8", "noised": "#d1495b", "inverted": "#8f7a2e"}
    for i, setting in enumerate(TITLES):
        entries = figures[setting]["shape"]
        names = [name for name in PEERS if name in entries]
        places = [list(PEERS).index(name) + 0.22 * (i - 1) for name in names]
        means = [entries[name]["iou"] for name in names]
        _points(left, places, means, colours[setting], CALLED[setting])
    left.set_yticks(range(len(PEERS)), list(PEERS))
    left.set_title("Presets")
    left.legend(title="images", loc="lower left", frameon=False)
    entries = figures["generated"]["shape"]
    _points(right, range(len(PARTS)), [entries[n]["iou"] for n in PARTS], colours["generated"], "")
    right.set_yticks(range(len(PARTS)), list(PARTS))
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
