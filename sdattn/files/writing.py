"""Files written whole or not at all, and their checksums."""

import glob
import hashlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .addresses import Address, AnyPath
from .paths import inside


def to_json(document: Any) -> bytes:
    """JSON for people to read too, with a newline at the end.

    Raises:
        ValueError: a number in it is not finite.
    """
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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


def write_whole(path: AnyPath, parts: Iterable[bytes], temporary: AnyPath | None = None) -> None:
    """Write a file for good, whole or not at all: whatever goes wrong leaves what was there.

    Args:
        path: of the file; its folder is there. An address is written at once.
        parts: what it holds, one after the other.
        temporary: where it lies until it is whole, on the same disk; beside it by default.

    Raises:
        OSError: it cannot be written.
    """
    if isinstance(path, Address):
        path.write_parts(parts)
        return
    made = temporary if isinstance(temporary, Path) else path.with_name(f".{uuid.uuid4().hex}.tmp")
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


@contextmanager
def whole_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its place when the block ends well.

    Whatever ends the block otherwise, Ctrl-C too, leaves nothing behind; what is left by a kill is
    cleared when the next folder is made at this place. What is at ``folder`` afterwards is on the
    disk, also if the machine then loses its power. What is there before is replaced, or else an
    OSError is raised.
    """
    name = working_name(folder)
    temporary, old = folder.parent / f"{name}.tmp", folder.parent / f"{name}.old"
    with at_work(temporary):
        try:
            yield temporary
            flush_tree(temporary)
            # Two renames: between them there is no folder, which clear_leftovers mends after a
            # kill.
            if replace and folder.exists():
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
    for parent, _, names in os.walk(folder):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))


def flush(path: Path) -> None:
    """Have the disk hold a file, or a folder's list of names."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folder
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def working_name(folder: Path) -> str:
    """What the folders beside ``folder`` are called, without their ending, until they take its
    place: known by the name and this machine."""
    return f"{_begins(folder)}{uuid.uuid4().hex[:8]}"


def _begins(folder: Path) -> str:
    digest = sha256(f"{socket.gethostname()}/{folder.name}".encode())[:8]
    return f".{folder.name[:40]}.{digest}."


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Make a folder that the kernel holds locked for as long as this process lives."""
    first = folder.with_suffix(".new")
    first.mkdir()
    lock = _lock(first)
    os.rename(first, folder)  # it is never there without its lock
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where another process holds it, or where
    that cannot be known."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def clear_leftovers(folder: Path) -> None:
    """Clear what processes of this machine that are dead have left beside ``folder``.

    A new folder that was not whole is removed. One that was whole, whose process died after it had
    moved the old one away, takes its place.
    """
    name = re.compile(re.escape(_begins(folder)) + r"[0-9a-f]{8}\.(tmp|old)")
    found = folder.parent.glob(glob.escape(_begins(folder)) + "*")
    for left in sorted(path for path in found if name.fullmatch(path.name)):
        if left.is_symlink() or not left.is_dir():
            continue
        old = left.with_suffix(".old")
        if left == old:
            if not left.with_suffix(".tmp").exists() and folder.exists():
                shutil.rmtree(old, ignore_errors=True)
            continue
        # Whoever holds the lock lives, and is still at it.
        if (lock := _lock(left)) is None:
            continue
        try:
            if old.exists() and not folder.exists():
                os.rename(left, folder)
            shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            os.close(lock)
