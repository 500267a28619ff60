"""Words and steps that figures and animations show, and the files that they are saved to."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import InvalidTypeError, InvalidValueError, IsFolderError, refuse
from ..files.paths import check_writable
from ..files.writing import write_whole
from ..maps.heatmap import Heatmap
from ..maps.heatmaps import Heatmaps
from ..runs.imagerun import ImageRun, not_kept, step_heatmaps, step_names
from ..runs.run import Run
from .lettering import plain
from .panels import Lines


def one_image(run: object) -> ImageRun:
    """Return the run of one image, also from a :class:`sdattn.Run` of one; raise ValueError for one
    of several images, TypeError for anything else."""
    if isinstance(run, Run):
        if len(run) != 1:
            raise InvalidValueError(
                f"This run has {len(run)} images, and one is shown. Pass one of them, run[0]."
            )
        return run[0]
    if not isinstance(run, ImageRun):
        raise InvalidTypeError(
            f"A {type(run).__name__} is no run. Pass what `generate()` returned, or "
            "sdattn.load_run(folder)."
        )
    return run


def chosen(heatmaps: Heatmaps, words: Sequence[str] | None) -> list[Heatmap]:
    """Return the maps of words or phrases, each occurrence by itself, or of all; raise ValueError
    for one text instead of a list, and if no word has a map."""
    if isinstance(words, str):
        raise refuse("words", words, "a list of words and phrases")
    found: list[Heatmap] = []
    for word in words or ():
        found += heatmaps.find(word)
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


def format_of(path: str | Path, formats: Collection[str]) -> str:
    """Return the file's extension without the dot; raise ValueError if it is not in ``formats``."""
    suffix = Path(path).suffix.lower()
    if suffix not in formats:
        raise InvalidValueError(f"{path}: choose a file name that ends in {' or '.join(formats)}.")
    return suffix[1:]


def save_file(path: str | Path, data: bytes) -> None:
    """Write a file, with its folders; after an error the previous file is still there."""
    path = Path(path)
    if path.is_dir():
        raise IsFolderError(f"{path} is a folder. Name a file.")
    check_writable(path.parent)
    write_whole(path, data)
