"""A run's folder: written whole or not at all, and read back with checks."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from .imagerun import ImageRun
from .packing import USUAL, file_name, pack_run
from .unpacking import READ, unpack_run

__all__ = [
    "SavedRun",
    "check_target",
    "file_name",
    "inside",
    "load_run",
    "new_folder",
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
    """Write the folder of one image's run, see :func:`sdattn.packing.pack_run`.

    Args:
        folder: must not exist yet, unless ``force``.
        force: replace a run folder that is there already.

    Returns:
        The folder.

    Raises:
        FileExistsError: there is something at ``folder`` already.
        OSError: the folder cannot be written.
    """
    with new_folder(folder, force=force) as temporary:
        write_files(temporary, pack_run(run, parts))
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
        ValueError: one of them, or a folder on the way, is a link, see :func:`inside`.
        OSError: one cannot be written.
    """
    for name, data in files.items():
        path = inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # it may be linked from another run: see merge()
        path.write_bytes(data)


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
    """The run whose files these are; raises as :func:`sdattn.unpacking.unpack_run` does."""
    return SavedRun(**vars(unpack_run(files, where)), folder=folder)


def check_target(folder: str | Path, *, force: bool = False) -> None:
    """Raise now what :func:`new_folder` would raise after the work is done."""
    folder = Path(folder)
    if folder.exists() or folder.is_symlink():
        if not force:
            raise FileExistsError(f"{folder} exists already. Choose another --out, or --force.")
        if not (folder / "run.json").is_file():
            raise FileExistsError(
                f"{folder} exists and is no run's folder, so it is not replaced. Choose another "
                "--out, or remove it yourself."
            )
    check_writable(folder.parent)


def check_writable(folder: Path) -> None:
    """Make a folder where there is none, and raise if nothing can be written into it, or if it is
    an address, ``s3://bucket/run``, of which a path would make the folder ``s3:``."""
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+:", next(iter(folder.parts), "")):
        address = folder.as_posix().replace(":/", "://", 1)
        raise OSError(
            f"{address} is an address, and only folders of this machine can be written. Mount it, "
            "or write here and copy the folder there."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"Cannot write to {folder}: {error.strerror}.") from error


@contextmanager
def new_folder(folder: str | Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its place when the block ends well.

    Whatever ends the block otherwise, Ctrl-C too, leaves nothing behind. What is at ``folder``
    afterwards is on the disk, also if the machine then loses its power.
    """
    check_target(folder, force=force)
    folder = Path(folder)
    mark = f"{folder.name[:40]}.{uuid.uuid4().hex[:8]}"
    temporary, old = folder.parent / f".{mark}.tmp", folder.parent / f".{mark}.old"
    temporary.mkdir()
    try:
        yield temporary
        flush_tree(temporary)
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
        flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
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
