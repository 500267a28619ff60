"""Files that are written completely or not at all, and their checksums."""

import errno
import glob
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import access_error
from .addresses import AnyPath
from .paths import inside

_FORGOTTEN = 24 * 3600.0  # seconds after which another machine's temporary files are nobody's
_CLOCKS_DIFFER = 3600.0
# What systems say that cannot open or flush a folder
_FLUSHES_NO_FOLDER = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_FLUSHES_NO_FOLDER |= {errno.EACCES, errno.EPERM, errno.EBADF, errno.EISDIR}


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
    name = temporary_name(_begins(folder))
    temporary = folder.with_name(f"{name}.tmp")
    old = folder.with_name(f"{name}.old")
    temporary.mkdir()
    try:
        yield temporary
        flush_tree(temporary)
        # Two renames: in between there is no folder, which clear_leftovers repairs after a kill.
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


def clear_leftovers(folder: Path) -> None:
    """Remove what killed processes left next to ``folder``; a complete new folder, whose process
    died after moving the old one away, takes its place first."""
    begins = _begins(folder)
    for left in abandoned(folder.parent, begins):
        was_moved_away = left.with_suffix(".old").exists() and not folder.exists()
        if left.suffix == ".tmp" and was_moved_away:
            os.rename(left, folder)
    for left in abandoned(folder.parent, begins):
        if left.suffix == ".tmp" or folder.exists():
            shutil.rmtree(left, ignore_errors=True)


def _begins(folder: Path) -> str:
    """Return how names of temporary folders next to ``folder`` begin."""
    return f".{folder.name[:32]}.{sha256(folder.name.encode())[:8]}."


def flush_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))


def flush(path: Path) -> None:
    """Write a file or folder through to the disk. Windows, and network disks such as CIFS, flush no
    folders: what is in one is then as safe as that system makes it."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in _FLUSHES_NO_FOLDER:
            raise


# Temporary names, which tell the process that may still be at work on a file or folder


def temporary_name(prefix: str) -> str:
    """Return a new name, ``PREFIX HOST-PID-RANDOM`` without the space."""
    return f"{prefix}{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def abandoned(folder: Path, prefix: str) -> list[Path]:
    """Return the files and folders in ``folder`` with a :func:`temporary_name` of ``prefix`` whose
    process has ended. Another machine's cannot be asked: its own are returned once they are a day
    old."""
    paths = sorted(folder.glob(f"{glob.escape(prefix)}*"))
    return [path for path in paths if _is_left(path, prefix)]


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove what :func:`abandoned` returns."""
    for path in abandoned(folder, prefix):
        with suppress(OSError):  # another user's, or removed meanwhile
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_left(path: Path, prefix: str) -> bool:
    host, _, rest = path.name.removeprefix(prefix).partition("-")
    pid = rest.partition("-")[0]
    try:
        written = path.stat().st_mtime
    except OSError:  # removed meanwhile
        return False
    if host == _host() and pid.isdecimal():
        return not _was_running(int(pid), written)
    return time.time() - written > _FORGOTTEN


def _was_running(pid: int, then: float) -> bool:
    """Check that a process runs, and did so ``then`` already: numbers of processes are used again,
    in a container that is restarted at once. Clocks of other machines' disks may be wrong by an
    hour."""
    import psutil  # not needed to read

    try:
        return psutil.Process(pid).create_time() < then + _CLOCKS_DIFFER
    except psutil.Error:
        return psutil.pid_exists(pid)  # another user's may be hidden


def _host() -> str:
    """Return a name for the machine, or for the container: two of one machine may have one host
    name, and each its own numbers of processes."""
    numbers = ""
    with suppress(OSError):  # no Linux
        numbers = f".{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{socket.gethostname().replace('-', '_')}{numbers}"
