"""Where files lie: paths inside a folder, outputs apart from inputs, names for folders."""

import tempfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

from ..errors import AccessError, ExistsError, InvalidValueError
from .addresses import Address, AnyPath, is_address

P = TypeVar("P", bound=AnyPath)


def inside(folder: P, name: str) -> P:
    """The path of a name in a folder that someone else may have made: nothing outside is reached.

    Args:
        folder: may be reached through a link itself.
        name: relative, with ``/`` between its parts, as ``run.json`` and ``metadata.jsonl`` name
            files. It need not exist.

    Raises:
        ValueError: the name is absolute or goes up, or it, or a folder on the way to it, is a
            link.
    """
    parts = PurePosixPath(name).parts
    elsewhere = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
    if elsewhere or not parts or ".." in PureWindowsPath(name).parts or "\0" in name:
        raise InvalidValueError(
            f"{folder} names {name!r}, which is no place inside it. Nothing else is opened: the "
            "folder is damaged or not what it says."
        )
    path: P = folder
    for part in parts:
        path = path / part  # type: ignore[assignment]
        if path.is_symlink():
            raise InvalidValueError(
                f"{path} is a link, and links in a run's folder are not followed. Put what it "
                "stands for in its place: cp -rL copies a folder so."
            )
    return path


def check_writable(folder: AnyPath) -> None:
    """Make a folder where there is none, and raise if nothing can be written into it."""
    if isinstance(folder, Address):
        folder.check_writable()
        return
    check_local(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise AccessError(f"Cannot write to {folder}: {error.strerror}.") from error


def check_local(path: Path) -> None:
    """Refuse an address, ``s3://bucket/run``, of which a path would make the folder ``s3:``.

    Raises:
        OSError: it is one.
    """
    if is_address(path):
        address = path.as_posix().replace(":/", "://", 1)
        raise AccessError(
            f"{address} is an address, and only batches are written to storage. Write into a "
            "folder and copy that there."
        )


def check_apart(out: AnyPath, *inputs: AnyPath) -> None:
    """Refuse an output that is an input, holds one or lies in one, links resolved.

    Raises:
        FileExistsError: it does.
    """
    for path in inputs:
        if _same(out, path):
            how = f"is the input {path}"
        elif _holds(out, path):
            how = f"holds the input {path}"
        elif _holds(path, out):
            how = f"lies in the input {path}"
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
    """A word as part of a file name: letters, digits and ``-``, 1 to 40 characters."""
    safe = "".join(char if char.isalnum() else "-" for char in word)
    return "-".join(part for part in safe.split("-") if part)[:40].strip("-") or "sign"
