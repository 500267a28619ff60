"""Texts printed for errors that end a command."""

import re
import sys
import traceback
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from ..errors import (
    DeniedError,
    ExistsError,
    InvalidTypeError,
    InvalidValueError,
    IsFolderError,
    MissingFileError,
    MissingPackageError,
    NotFiniteError,
    NotFoundError,
    RunError,
    SdattnError,
    access_error,
    is_bug,
    is_out_of_memory,
    size_text,
)
from ..files.terminal import visible
from .flags import spelled

_REPORT = (
    "This is a bug in sdattn or in a library that it uses. Please report it with the lines above "
    "and what `sdattn info` prints."
)


def exit_code(error: Exception) -> int:
    """Return a command's exit code: 2 for a wrong value or option, which includes a name of
    something that is not there, is in the way, may not be read or written, or needs a package that
    is missing; 1 for a run that failed."""
    if isinstance(error, OSError):
        error = access_error(error)
    wrong = (InvalidValueError, InvalidTypeError, NotFoundError)
    paths = (MissingFileError, IsFolderError, ExistsError, DeniedError)
    is_hosts = isinstance(error, ValueError) and not is_bug(error)  # diffusers refused a value
    if isinstance(error, NotFiniteError):
        return 1
    return 2 if isinstance(error, (*wrong, *paths, MissingPackageError)) or is_hosts else 1


def failure(error: Exception, command: Any = None) -> str:
    """Return the text printed for an error that ends a command: one line with the reason, or for a
    bug the traceback and how to report it."""
    if not is_bug(error):
        return f"sdattn: {visible(reason(error, command))}"
    lines = visible("".join(traceback.format_exception(error)))
    return f"{lines}{_versions()}\nsdattn: {_REPORT}"


def save_drawn(error: Exception, folder: Path) -> list[str]:
    """Save what an error has in its ``images`` as ``unfinished-N.png`` (videos as animated WebP) in
    a folder, under names that are free, and return these; one colour alone is not saved (NaN comes
    out black). Where the folder cannot be written nothing is saved."""
    saved: list[str] = []
    for drawn in getattr(error, "images", ()):
        first, *rest = [drawn] if hasattr(drawn, "getcolors") else drawn
        if first.getcolors(1):
            continue
        suffix = ".webp" if rest else ".png"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            number = 1
            while (path := folder / f"unfinished-{number}{suffix}").exists():
                number += 1
            further = {"save_all": True, "append_images": rest, "duration": 125} if rest else {}
            first.save(path, **further)
            saved.append(str(path))
    return saved


def reason(error: Exception, command: Any = None) -> str:
    """Return an error's message in one line, with a command's flags if one is running, and with the
    type if it was not written for users."""
    if isinstance(error, OSError):
        error = access_error(error)
    elif is_out_of_memory(error):
        error = _out_of_memory(error)
    text = " ".join(str(error).split())
    if command is not None and isinstance(error, SdattnError):
        text = spelled(text, command)
    named = is_bug(error) or isinstance(error, ModuleNotFoundError)
    return f"{type(error).__name__}: {text}" if named or not text else text


def _out_of_memory(error: Exception) -> RunError:
    """Return an allocator's error in words that name the size and say what to do."""
    found = re.search(r"allocate (\d[\d.]*) ?(bytes|[KMGT]iB)", str(error))
    scale = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    more = f" for another {size_text(round(float(found[1]) * scale[found[2]]))}" if found else ""
    return RunError(
        f"There is not enough memory{more}. Choose a smaller `width` and `height`, fewer images at "
        "a time, `dtype='float16'`, or `offload` on a GPU."
    )


def _versions() -> str:
    from ..files.version import versions

    python = f"Python {sys.version.split()[0]} on {sys.platform}"
    try:
        return ", ".join([python, *(f"{name} {found}" for name, found in versions().items())])
    except PackageNotFoundError as error:
        return f"{python}, no {error.name}"
