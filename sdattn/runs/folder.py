"""Runs in folders: written whole or not at all, over nothing that is not ours, read with checks."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ExistsError
from ..files.addresses import AnyPath, path_of
from ..files.paths import check_writable, inside
from ..files.writing import clear_leftovers, sha256, whole_folder, write_files, write_whole
from .drawings import USUAL
from .imagerun import ImageRun, described
from .info import with_files
from .packing import RUN_FILE, Packed, pack_run
from .report import report
from .unpacking import READ, unpack_run

Kind = Literal["run", "edit", "diff"]
_CALLED = {"run": "run's folder", "edit": "edit's folder", "diff": "comparison's folder"}
_OF_THE_SYSTEM = {".DS_Store", "Thumbs.db", "desktop.ini"}  # made by looking into a folder
_MOST_NAMED = 3  # files


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SavedRun(ImageRun):
    """A run's folder, read back; its heatmaps are made anew from the saved maps.

    Attributes:
        folder: where it is.
    """

    folder: AnyPath

    def __repr__(self) -> str:
        return f"SavedRun({str(self.folder)!r}: {described([self])})"


def pack_with_page(
    run: ImageRun, parts: Collection[str] = USUAL, beside: Mapping[str, bytes] | None = None
) -> Packed:
    """:func:`sdattn.runs.packing.pack_run`, with ``report.html`` where ``parts`` has a report."""
    page = {"report.html": report(run)} if "report" in parts else {}
    return pack_run(run, parts, {**page, **(beside or {})})


def save_run(
    folder: str | Path, run: ImageRun, *, parts: Collection[str] = USUAL, force: bool = False
) -> Path:
    """Write the folder of one image's run, see :func:`pack_with_page`.

    Args:
        folder: must not exist yet, unless ``force``.
        force: replace a run's folder that is there already, if it holds nothing else.

    Returns:
        The folder.

    Raises:
        FileExistsError: there is something at ``folder`` already, and no ``force``, or something
            that is no run's.
        OSError: the folder cannot be written.
    """
    with new_folder(folder, force=force) as temporary:
        write_files(temporary, pack_with_page(run, parts).files)
    return Path(folder)


def add_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a run's folder and name them in its ``run.json``.

    Raises as :func:`write_files` does, and where ``run.json`` is none.
    """
    document = {"run.json": inside(folder, "run.json").read_bytes()}
    sums = {name: sha256(data) for name, data in files.items()}
    changed = with_files(document, str(folder), sums)
    write_files(folder, files)
    write_whole(folder / "run.json", [changed])


def load_run(folder: str | Path) -> SavedRun:
    """Read a run's folder, also in a storage that fsspec reaches, ``s3://bucket/run``.

    Raises:
        FileNotFoundError: no such folder, or a part of it is missing.
        ValueError: it is no run of sdattn, a part is not what the run wrote, or it is a link.
    """
    place = path_of(folder)
    paths = {name: inside(place, name) for name in READ}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    return saved_run(files, place, str(place))


def saved_run(files: Mapping[str, bytes], folder: AnyPath, where: str) -> SavedRun:
    """The run whose files these are; raises as :func:`sdattn.runs.unpacking.unpack_run` does."""
    return SavedRun(**vars(unpack_run(files, where)), folder=folder)


# Where a run may be written


def new_folder(
    folder: str | Path, *, force: bool = False, kind: Kind = "run"
) -> AbstractContextManager[Path]:
    """:func:`sdattn.files.writing.whole_folder`; raises as :func:`check_target` does."""
    check_target(folder, force=force, kind=kind)
    return whole_folder(Path(folder), replace=force)


def check_target(folder: str | Path, *, force: bool = False, kind: Kind = "run") -> None:
    """Refuse, before the work, a folder that cannot be written or is not to be replaced.

    What a killed process left of a folder at this place is cleared first, see
    :func:`sdattn.files.writing.clear_leftovers`.

    Args:
        folder: to be written.
        force: it may be replaced, if all that it holds was written by a run of this kind.
        kind: of what is to be written there.

    Raises:
        FileExistsError: there is something already, and no ``force``, or something that is not
            such a run's; the message names it.
        OSError: the folder above cannot be written.
    """
    folder = Path(folder)
    clear_leftovers(folder)
    if folder.exists() or folder.is_symlink():
        if not force:
            text = f"{folder} exists already. Choose another `folder`, or pass `force=True`."
            raise ExistsError(text)
        _check_ours(folder, kind)
    check_writable(folder.parent)


def run_around(path: Path) -> Path | None:
    """The folder of a run, an edit, a comparison or a batch run that a path is or lies in."""
    path = path.resolve()
    for up in (path, *path.parents):
        if any("format" in _document(up / name) for name in ("run.json", "batch.json")):
            return up
    return None


def _document(path: Path) -> dict[str, Any]:
    """A JSON file of ours; empty if it is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    is_ours = isinstance(found, dict) and str(found.get("format")).startswith("sdattn-")
    return found if is_ours else {}


def _check_ours(folder: Path, kind: Kind) -> None:
    if folder.is_symlink():
        raise ExistsError(f"{folder} is a link, so it is not replaced. Name the folder itself.")
    # A folder is replaced only if its run.json says that a run of this kind made it, and nothing
    # lies in it that this run did not write. An item of a batch run is the batch's to replace.
    document = _document(folder / "run.json")
    if not str(document.get("format")).startswith(f"sdattn-{kind}-") or "fingerprint" in document:
        item = "an item of a batch run" if "fingerprint" in document else f"no {_CALLED[kind]}"
        raise ExistsError(
            f"{folder} exists and is {item}, so it is not replaced. Choose another `folder`, or "
            "remove it yourself."
        )
    if foreign := sorted(set(_entries(folder)) - _own_files(folder, document, kind)):
        more = f" and {len(foreign) - _MOST_NAMED} more" if len(foreign) > _MOST_NAMED else ""
        there = ", ".join(foreign[:_MOST_NAMED]) + more
        raise ExistsError(
            f"{folder} holds what the run did not write, so it is not replaced: {there}. Move that "
            "elsewhere, or choose another `folder`."
        )


def _own_files(folder: Path, document: Mapping[str, Any], kind: Kind) -> set[str]:
    """The paths in a folder that a run of this kind writes, and that its run.json names."""
    if kind == "diff":
        return {"run.json", "diff.png", "diff.html"}
    if kind == "run":
        files = document.get("files")
        named = files if isinstance(files, dict) else {}
        return {"run.json", *(name for name in named if RUN_FILE.fullmatch(name))}
    found = {"run.json", "edit.png", "edit.html"}
    for part in document.get("runs") or ():
        if re.fullmatch(r"source|target(-\d+)?", str(part)):
            own = _own_files(folder / part, _document(folder / part / "run.json"), "run")
            found |= {f"{part}/{name}" for name in own}
    return found


def _entries(folder: Path) -> Iterator[str]:
    """The paths of all files and links below a folder."""
    for place, folders, files in os.walk(folder, onerror=_raise):
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in [*links, *files]:
            if name not in _OF_THE_SYSTEM:
                yield Path(place, name).relative_to(folder).as_posix()


def _raise(error: OSError) -> None:
    raise error  # what cannot be looked into is not to be removed
