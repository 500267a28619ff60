"""A run's folder: written whole or not at all, and read back with checks."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..files.writing import sha256
from .imagerun import ImageRun
from .info import with_files
from .packing import USUAL, file_name, pack_run
from .targets import (
    Kind,
    at_work,
    check_apart,
    check_target,
    check_writable,
    run_around,
    working_name,
)
from .unpacking import READ, unpack_run

__all__ = [
    "SavedRun",
    "add_files",
    "check_apart",
    "check_target",
    "check_writable",
    "file_name",
    "inside",
    "load_run",
    "new_folder",
    "run_around",
    "save_run",
    "saved_run",
    "write_files",
    "write_whole",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedRun(ImageRun):
    """A run's folder, read back; its heatmaps are made anew from the saved maps.

    Attributes:
        folder: where it is.
    """

    folder: Path


def save_run(
    folder: str | Path, run: ImageRun, *, parts: Collection[str] = USUAL, force: bool = False
) -> Path:
    """Write the folder of one image's run, see :func:`sdattn.runs.packing.pack_run`.

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
        write_files(temporary, pack_run(run, parts).files)
    return Path(folder)


def inside(folder: Path, place: str) -> Path:
    """The path of a place in a folder that someone else may have made: nothing outside is reached.

    Args:
        folder: may be reached through a link itself.
        place: relative, with ``/`` between its parts, as ``run.json`` and ``metadata.jsonl`` name
            files. It need not exist.

    Raises:
        ValueError: the place is absolute or goes up, or it, or a folder on the way to it, is a
            link.
    """
    parts = PurePosixPath(place).parts
    elsewhere = PurePosixPath(place).is_absolute() or PureWindowsPath(place).anchor
    if elsewhere or not parts or ".." in PureWindowsPath(place).parts or "\0" in place:
        raise ValueError(
            f"{folder} names {place!r}, which is no place inside it. Nothing else is opened: the "
            "folder is damaged or not what it says."
        )
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise ValueError(
                f"{path} is a link, and links in a run's folder are not followed. Put what it "
                "stands for in its place: cp -rL copies a folder so."
            )
    return path


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files at their paths below ``folder``; those that are there are replaced.

    Raises:
        ValueError: one of them, or a folder on the way, is a link, see :func:`inside`; then none
            is written.
        OSError: one cannot be written.
    """
    paths = {name: inside(folder, name) for name in files}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # it may be linked from another run: see merge()
        path.write_bytes(files[name])


def add_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a run's folder and have its ``run.json`` tell of them.

    Raises as :func:`write_files` does, and where ``run.json`` is none.
    """
    document = {"run.json": inside(folder, "run.json").read_bytes()}
    sums = {name: sha256(data) for name, data in files.items()}
    changed = with_files(document, str(folder), sums)
    write_files(folder, files)
    write_whole(folder / "run.json", [changed])


def write_whole(path: Path, parts: Iterable[bytes], temporary: Path | None = None) -> None:
    """Write a file for good, whole or not at all: whatever goes wrong leaves what was there.

    Args:
        path: of the file; its folder is there.
        parts: what it holds, one after the other.
        temporary: where it lies until it is whole, on the same disk; beside it by default.

    Raises:
        OSError: it cannot be written.
    """
    made = temporary or path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with made.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    flush(path.parent)


def load_run(folder: str | Path) -> SavedRun:
    """Read a run's folder.

    Raises:
        FileNotFoundError: no such folder, or a part of it is missing.
        ValueError: it is no run of sdattn, a part is not what the run wrote, or it is a link.
    """
    folder = Path(folder)
    paths = {name: inside(folder, name) for name in READ}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    return saved_run(files, folder, str(folder))


def saved_run(files: Mapping[str, bytes], folder: Path, where: str) -> SavedRun:
    """The run whose files these are; raises as :func:`sdattn.runs.unpacking.unpack_run` does."""
    return SavedRun(**vars(unpack_run(files, where)), folder=folder)


@contextmanager
def new_folder(folder: str | Path, *, force: bool = False, kind: Kind = "run") -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its place when the block ends well.

    Whatever ends the block otherwise, Ctrl-C too, leaves nothing behind; what is left by a kill is
    cleared when the next folder is made at this place. What is at ``folder`` afterwards is on the
    disk, also if the machine then loses its power. Raises as
    :func:`sdattn.runs.targets.check_target` does.
    """
    check_target(folder, force=force, kind=kind)
    folder = Path(folder)
    name = working_name(folder)
    temporary, old = folder.parent / f"{name}.tmp", folder.parent / f"{name}.old"
    with at_work(temporary):
        try:
            yield temporary
            flush_tree(temporary)
            if force and folder.exists():
                os.rename(folder, old)
            os.rename(temporary, folder)
            flush(folder.parent)
        finally:
            if old.exists() and not folder.exists():
                os.rename(old, folder)
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(temporary, ignore_errors=True)


def flush_tree(folder: Path) -> None:
    """Have the disk hold a folder and all that is in it."""
    for place, _, names in os.walk(folder):
        for name in names:
            flush(Path(place, name))
        flush(Path(place))


def flush(path: Path) -> None:
    """Have the disk hold a file, or a folder's list of names."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folder
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
