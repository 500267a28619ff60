"""Parts of a run that a figure shows: words, and the steps that were kept."""

from collections.abc import Sequence
from dataclasses import replace

from ..errors import InvalidValueError, refuse
from ..maps.heatmap import Heatmap
from ..maps.heatmaps import Heatmaps
from ..runs.imagerun import ImageRun, not_kept, step_heatmaps, step_names
from .lettering import plain
from .panels import Lines


def chosen(heatmaps: Heatmaps, words: Sequence[str] | None) -> list[Heatmap]:
    """Return the maps of words or phrases, each occurrence by itself, or of all; raise ValueError
    for one text instead of a list, and if no word has a map."""
    if isinstance(words, str):
        raise refuse("words", words, "a list of words and phrases")
    found = [heatmap for word in words or () for heatmap in heatmaps.find(word)]
    found = found or heatmaps.occurrences()
    if not found:
        raise InvalidValueError(
            f"No word of {heatmaps.prompt.text!r} has a map. Name token columns."
        )
    return [replace(heatmap, label=plain(heatmap.label)) for heatmap in found]


def kept_steps(run: ImageRun) -> list[tuple[Lines, Heatmaps]]:
    found = step_heatmaps(run)
    if not found:
        raise not_kept("steps")
    return list(zip(step_names(run), found, strict=True))
