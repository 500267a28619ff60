"""Files that are written completely or not at all, and their checksums."""

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import access_error
from .addresses import AnyPath
from .paths import inside


def to_json(document: Any) -> bytes:
    """Return readable JSON, with a newline at the end; raise ValueError for NaN or infinity."""
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: AnyPath) -> str:
    """Return the checksum of a file, read in blocks."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(partial(file.read, 2**20), b""):
            found.update(block)
    return found.hexdigest()


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files at their paths below ``folder``; raise ValueError for a link."""
    paths = {name: inside(folder, name) for name in files}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(files[name])


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, completely or not at all."""
    made = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        made.write_bytes(data)
        flush(made)
        os.replace(made, path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    flush(path.parent)


@contextmanager
def whole_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to ``folder`` that takes its place when the block succeeds.

    After an error or Ctrl-C nothing is left; leftovers of a kill are cleared next time. The
    contents survive a loss of power. An existing folder is replaced, or else an OSError is raised.
    """
    name = f"{_begins(folder)}{uuid.uuid4().hex[:8]}"
    temporary, old = folder.parent / f"{name}.tmp", folder.parent / f"{name}.old"
    with at_work(temporary):
        try:
            yield temporary
            flush_tree(temporary)
            # Two renames: in between there is no folder, which clear_leftovers repairs after a
            # kill.
            if replace and folder.exists():
                os.rename(folder, old)
            os.rename(temporary, folder)
            flush(folder.parent)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise access_error(error, folder) from error
            raise
        finally:
            if old.exists() and not folder.exists():
                os.rename(old, folder)
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(temporary, ignore_errors=True)


def flush_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))


def flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _begins(folder: Path) -> str:
    """Return how names of temporary folders next to ``folder`` begin on this machine."""
    digest = sha256(f"{socket.gethostname()}/{folder.name}".encode())[:8]
    return f".{folder.name[:40]}.{digest}."


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Make a folder that stays locked by the kernel as long as this process lives."""
    first = folder.with_suffix(".new")
    first.mkdir()
    lock = _lock(first)
    os.rename(first, folder)  # it never exists without its lock
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock, or None if that cannot be had."""
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
    """Remove incomplete folders of dead processes on this machine next to ``folder``; a complete
    one, whose process died after moving the old one away, takes its place."""
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
        # The holder of the lock is alive and still working.
        if (lock := _lock(left)) is None:
            continue
        try:
            if old.exists() and not folder.exists():
                os.rename(left, folder)
            shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            os.close(lock)
