"""Paths inside a folder, outputs separate from inputs, names for folders."""

import errno
import os
import tempfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

from ..errors import AccessError, DeniedError, ExistsError, InvalidValueError
from .addresses import Address, AnyPath, is_address

P = TypeVar("P", bound=AnyPath)


def inside(folder: P, name: str) -> P:
    """Return the path of a relative name in an untrusted folder. Raise ValueError if it is absolute
    or goes up, or it, or a folder on the way to it, is a link."""
    parts = PurePosixPath(name).parts
    elsewhere = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
    if elsewhere or not parts or ".." in PureWindowsPath(name).parts or "\0" in name:
        raise InvalidValueError(
            f"{folder} names {name!r}, which is not inside it, so nothing was opened. The "
            "folder is damaged or is not a run's."
        )
    path: P = folder
    for part in parts:
        path = path / part  # type: ignore[assignment]
        if path.is_symlink():
            raise InvalidValueError(
                f"{path} is a link, and links in a run's folder are not followed. Replace it by "
                "its target: cp -rL copies a folder that way."
            )
    return path


def refuse(error: OSError) -> None:
    """Raise an error that :func:`os.walk` would pass over."""
    raise error


def files_below(folder: Path) -> list[str]:
    """Return the paths of all files and links below a folder; raise OSError if a part of it cannot
    be looked into."""
    found = []
    for place, folders, files in os.walk(folder, onerror=refuse):
        links = [name for name in folders if Path(place, name).is_symlink()]
        found += [Path(place, name).relative_to(folder).as_posix() for name in [*files, *links]]
    return sorted(found)


def check_writable(folder: AnyPath) -> None:
    """Create a folder if needed, and raise if nothing can be written to it: PermissionError, or
    another OSError if the disk is full."""
    if isinstance(folder, Address):
        folder.check_writable()
        return
    if is_address(folder):  # the path s3://bucket/run would create a folder s3:
        address = folder.as_posix().replace(":/", "://", 1)
        raise InvalidValueError(
            f"{address} is an address, and only batches are written to storage. Write into a "
            "folder and copy it there."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        text = f"Cannot write to {folder}: {error.strerror}. Choose another `folder`."
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (AccessError if is_full else DeniedError)(text) from error


def check_apart(out: AnyPath, *inputs: AnyPath) -> None:
    """Raise FileExistsError for an output that is, contains or is inside an input, by any link."""
    for path in inputs:
        if _same(out, path):
            how = f"is the input {path}"
        elif _holds(out, path):
            how = f"contains the input {path}"
        elif _holds(path, out):
            how = f"is inside the input {path}"
        else:
            continue
        raise ExistsError(f"{out} {how}, which stays as it is. Choose another `folder`.")


def _same(path: AnyPath, other: AnyPath) -> bool:
    if isinstance(path, Path) and isinstance(other, Path):
        return path.exists() and other.exists() and path.samefile(other)
    return path == other


def _holds(folder: AnyPath, path: AnyPath) -> bool:
    return any(_same(folder, up) for up in path.resolve().parents)


def file_name(word: str) -> str:
    """Return a word as part of a file name: letters, digits and ``-``, 1 to 40 characters."""
    safe = "".join(char if char.isalnum() else "-" for char in word)
    return "-".join(part for part in safe.split("-") if part)[:40].strip("-") or "sign"
