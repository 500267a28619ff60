"""Where a command may write: over nothing that is not ours, and beside what it reads.

check_target(out, force=True)      refuse now what would be refused after the work
check_apart(out, run_a, run_b)     an output is none of the inputs, nor around or inside one
run_around(path)                   the run's folder that a path lies in
leftovers                          what a killed process left is finished or removed
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ..files.writing import sha256
from .packing import RUN_FILE

Kind = Literal["run", "edit", "diff"]
_CALLED = {"run": "run's folder", "edit": "edit's folder", "diff": "comparison's folder"}
_OF_THE_SYSTEM = {".DS_Store", "Thumbs.db", "desktop.ini"}  # made by looking into a folder
_MOST_NAMED = 3  # files


def check_target(folder: str | Path, *, force: bool = False, kind: Kind = "run") -> None:
    """Refuse, before the work, a folder that cannot be written or is not to be replaced.

    What a killed process left of a folder at this place is cleared first, see
    :func:`clear_leftovers`.

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
            raise FileExistsError(f"{folder} exists already. Choose another --out, or --force.")
        _check_ours(folder, kind)
    check_writable(folder.parent)


def check_writable(folder: Path) -> None:
    """Make a folder where there is none, and raise if nothing can be written into it."""
    check_local(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"Cannot write to {folder}: {error.strerror}.") from error


def check_local(path: Path) -> None:
    """Refuse an address, ``s3://bucket/run``, of which a path would make the folder ``s3:``.

    Raises:
        OSError: it is one.
    """
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+:", next(iter(path.parts), "")):
        address = path.as_posix().replace(":/", "://", 1)
        raise OSError(
            f"{address} is an address, and only folders of this machine can be written. Mount it, "
            "or write here and copy the folder there."
        )


def check_apart(out: Path, *inputs: Path) -> None:
    """Refuse an output that is an input, holds one or lies in one, links resolved.

    Raises:
        FileExistsError: it does.
    """
    for one in inputs:
        if _same(out, one):
            how = f"is the input {one}"
        elif _holds(out, one):
            how = f"holds the input {one}"
        elif _holds(one, out):
            how = f"lies in the input {one}"
        else:
            continue
        raise FileExistsError(f"{out} {how}, which stays as it is. Choose another --out.")


def run_around(path: Path) -> Path | None:
    """The folder of a run, an edit, a comparison or a batch run that a path is or lies in."""
    path = path.resolve()
    for up in (path, *path.parents):
        if any("format" in _told(up / name) for name in ("run.json", "batch.json")):
            return up
    return None


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _holds(folder: Path, path: Path) -> bool:
    return any(_same(folder, up) for up in path.resolve().parents)


def _told(path: Path) -> dict[str, Any]:
    """A JSON file of ours; empty if it is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    is_ours = isinstance(found, dict) and str(found.get("format")).startswith("sdattn-")
    return found if is_ours else {}


def _check_ours(folder: Path, kind: Kind) -> None:
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link, so it is not replaced. Name the folder itself.")
    told = _told(folder / "run.json")
    if not str(told.get("format")).startswith(f"sdattn-{kind}-") or "fingerprint" in told:
        item = "an item of a batch run" if "fingerprint" in told else f"no {_CALLED[kind]}"
        raise FileExistsError(
            f"{folder} exists and is {item}, so it is not replaced. Choose another --out, or "
            "remove it yourself."
        )
    if foreign := sorted(set(_entries(folder)) - _own_files(folder, told, kind)):
        more = f" and {len(foreign) - _MOST_NAMED} more" if len(foreign) > _MOST_NAMED else ""
        raise FileExistsError(
            f"{folder} holds what the run did not write, so it is not replaced: "
            f"{', '.join(foreign[:_MOST_NAMED])}{more}. Move that elsewhere, or choose another "
            "--out."
        )


def _own_files(folder: Path, told: Mapping[str, Any], kind: Kind) -> set[str]:
    """The paths in a folder that a run of this kind writes, and that its run.json names."""
    if kind == "diff":
        return {"run.json", "diff.png"}
    if kind == "run":
        files = told.get("files")
        named = files if isinstance(files, dict) else {}
        return {"run.json", *(name for name in named if RUN_FILE.fullmatch(name))}
    found = {"run.json", "edit.png"}
    for part in told.get("runs") or ():
        if re.fullmatch(r"source|target(-\d+)?", str(part)):
            own = _own_files(folder / part, _told(folder / part / "run.json"), "run")
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


# What a killed process leaves


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
    for left in sorted(one for one in found if name.fullmatch(one.name)):
        if left.is_symlink() or not left.is_dir():
            continue
        old = left.with_suffix(".old")
        if left == old:
            if not left.with_suffix(".tmp").exists() and folder.exists():
                shutil.rmtree(old, ignore_errors=True)
            continue
        if (lock := _lock(left)) is None:
            continue
        try:
            if old.exists() and not folder.exists():
                os.rename(left, folder)
            shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            os.close(lock)
