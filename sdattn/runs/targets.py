"""Checks of a run's folder before any work. No torch."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from ..errors import ExistsError
from ..files.paths import check_writable, files_below
from ..files.records import read_object
from ..files.writing import clear_leftovers, whole_folder
from .parts import RUN_FILE

Kind = Literal["run", "edit", "diff"]
_CALLED = {"run": "run's folder", "edit": "edit's folder", "diff": "comparison's folder"}
_OF_THE_SYSTEM = {".DS_Store", "Thumbs.db", "desktop.ini"}  # made by looking into a folder


def new_folder(
    folder: str | Path, *, force: bool = False, kind: Kind = "run"
) -> AbstractContextManager[Path]:
    """Open a new run's folder, see :func:`sdattn.files.writing.whole_folder` and
    :func:`check_target`."""
    check_target(folder, force=force, kind=kind)
    return whole_folder(Path(folder), replace=force)


def run_folders(folder: str | Path, number: int) -> list[Path]:
    """Return the folders of a run's images: ``folder``, or ``folder-0``, ``folder-1`` and so on."""
    return [Path(folder)] if number == 1 else [Path(f"{folder}-{i}") for i in range(number)]


def check_target(folder: str | Path, *, force: bool = False, kind: Kind = "run") -> None:
    """Refuse, before any work, a folder that cannot be written (OSError) or must not be replaced:
    it exists and ``force`` is not set, or holds what no run of this kind wrote (FileExistsError).

    Leftovers of a killed process at this place are cleared first, see
    :func:`sdattn.files.writing.clear_leftovers`.
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
    """Return the folder of a run, edit, comparison or batch that a path is or lies in."""
    path = path.resolve()
    for up in (path, *path.parents):
        if any("format" in _document(up / name) for name in ("run.json", "batch.json")):
            return up
    return None


def _document(path: Path) -> dict[str, Any]:
    """Read a JSON file of ours; {} for any other file."""
    document = read_object(path)
    return document if str(document.get("format")).startswith("sdattn-") else {}


def _check_ours(folder: Path, kind: Kind) -> None:
    if folder.is_symlink():
        raise ExistsError(f"{folder} is a link, so it is not replaced. Name the folder itself.")
    # A folder is replaced only if its run.json says that a run of this kind made it, and nothing
    # lies in it that this run did not write. An item of a batch run is the batch's to replace.
    document = _document(folder / "run.json")
    if not str(document.get("format")).startswith(f"sdattn-{kind}-") or "fingerprint" in document:
        item = "an item of a batch run" if "fingerprint" in document else f"no {_CALLED[kind]}"
        raise ExistsError(
            f"{folder} exists and is {item}, so it is not replaced. Choose another `folder`."
        )
    ours = _own_files(folder, document, kind)
    files = [name for name in files_below(folder) if Path(name).name not in _OF_THE_SYSTEM]
    foreign = sorted(name for name in files if name not in ours)
    if foreign:
        raise ExistsError(
            f"{folder} holds what the run did not write, so it is not replaced: "
            f"{', '.join(foreign[:3])}. Move that elsewhere, or choose another `folder`."
        )


def _own_files(folder: Path, document: Mapping[str, Any], kind: Kind) -> set[str]:
    """Return the paths in a folder that a run of this kind writes and its run.json names."""
    if kind == "diff":
        return {"run.json", "diff.png", "diff.html"}
    if kind == "run":
        named = document.get("files")
        named = named if isinstance(named, dict) else {}
        return {"run.json", *(name for name in named if RUN_FILE.fullmatch(name))}
    files = {"run.json", "edit.png", "edit.html"}
    for name in document.get("runs") or ():
        if re.fullmatch(r"source|target(-\d+)?", str(name)):
            of_run = _own_files(folder / name, _document(folder / name / "run.json"), "run")
            files |= {f"{name}/{file}" for file in of_run}
    return files
