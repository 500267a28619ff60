"""Run folders: written whole or not at all, and checked when read; `targets` says where."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import InvalidValueError, MissingFileError, did_you_mean
from ..files.addresses import AnyPath, path_of
from ..files.paths import inside
from ..files.records import sealed
from ..files.terminal import shorter
from ..files.writing import sha256, write_files, write_whole
from ..maps.masks import MaskSettings
from .drawings import EVERY_MASK
from .imagerun import ImageRun, described
from .info import read_info
from .packing import Packed, pack_run
from .parts import READ, USUAL
from .report import report
from .targets import new_folder
from .unpacking import unpack_run


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SavedRun(ImageRun):
    """A run's folder, read back; its heatmaps are made again from the saved maps.

    Attributes:
        folder: the folder.
    """

    folder: AnyPath

    def __repr__(self) -> str:
        return f"SavedRun({str(self.folder)!r}: {described([self])})"


def pack_with_page(
    run: ImageRun,
    parts: Collection[str] = USUAL,
    beside: Mapping[str, bytes] | None = None,
    masks: MaskSettings = EVERY_MASK,
) -> Packed:
    """Return :func:`sdattn.runs.packing.pack_run`, with ``report.html`` if ``parts`` has a
    report."""
    page = {"report.html": report(run)} if "report" in parts else {}
    return pack_run(run, parts, {**page, **(beside or {})}, masks)


def save_run(
    folder: str | Path, run: ImageRun, *, parts: Collection[str] = USUAL, force: bool = False
) -> Path:
    """Write the folder of one image's run and return it, see :func:`pack_with_page`.

    Args:
        folder: must not exist yet, unless ``force``.
        force: replace a run's folder, if it holds nothing else.

    Raises:
        FileExistsError: ``folder`` exists and ``force`` is not set, or it holds something other
            than a run.
    """
    with new_folder(folder, force=force) as temporary:
        write_files(temporary, pack_with_page(run, parts).files)
    return Path(folder)


def add_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a run's folder and name them in its ``run.json``."""
    info = read_info({"run.json": inside(folder, "run.json").read_bytes()}, str(folder))
    sums = {name: sha256(data) for name, data in files.items()}
    changed = replace(info, files={**info.files, **sums})
    write_files(folder, files)
    write_whole(folder / "run.json", sealed(changed.to_json()))


def load_run(folder: str | Path) -> SavedRun:
    """Read a run's folder, also from a storage that fsspec reaches: ``s3://bucket/run``.

    Raises:
        FileNotFoundError: the folder or a part of it is missing.
        ValueError: it is no run of sdattn, a part was changed, or it is a link.
    """
    place = path_of(folder)
    if isinstance(place, Path):
        _check_run_folder(place)
    paths = {name: inside(place, name) for name in READ}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    return saved_run(files, place, str(place))


def _check_run_folder(place: Path) -> None:
    """Refuse a path that is plainly no run's folder: missing, a file, or a folder of runs."""
    if not place.exists():
        near = did_you_mean(
            place.name, (run.parent.name for run in place.parent.glob("*/run.json"))
        )
        raise MissingFileError(f"There is no folder {place}.{near}")
    if place.is_file():
        raise InvalidValueError(f"{place} is a file. Name the folder of its run.")
    is_edit = (place / "edit.html").is_file()
    inner = sorted(str(run.parent) for run in place.glob("*/run.json"))
    if inner and (is_edit or not (place / "run.json").is_file()):
        raise InvalidValueError(
            f"{place} is no run, but holds some. Name one: {shorter(', '.join(inner), 200)}."
        )


def saved_run(files: Mapping[str, bytes], folder: AnyPath, where: str) -> SavedRun:
    """Return the run that these files are."""
    return SavedRun(**vars(unpack_run(files, where)), folder=folder)
