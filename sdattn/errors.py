"""Errors and warnings of sdattn.

    try:
        run = sdattn.generate(pipe, "a cat", guidance_scale=0.5)
    except sdattn.SdattnError as error:  # each is also a builtin's kind
        print(error)

Messages name options and functions between backticks, as Python writes them: `force=True`,
`folder`, `generate()`. The command line spells options as its flags, see `sdattn.cli.flags`.
"""

import difflib
import errno
import pickle
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from importlib import import_module
from inspect import signature
from types import FrameType, ModuleType
from typing import Any, NoReturn, ParamSpec, TypeVar

Given = ParamSpec("Given")
Made = TypeVar("Made")


# repr()'s escapes of what joins emoji and letters, of flags' tags, and of emoji that are newer than
# Python's tables; an even number of backslashes before one are typed backslashes
_ESCAPES = re.compile(r"(?<!\\)((?:\\\\)*)\\(u200[cd]|U000e00[2-7][0-9a-f]|U0001[0-9a-f]{4})")


def readable(text: str) -> str:
    r"""Return a message with emoji and words as they were typed, where ``repr()`` escaped a part of
    them.

    >>> readable(repr("\N{MAN}\u200d\N{WOMAN}")) == "'\N{MAN}\u200d\N{WOMAN}'"
    True
    """
    return _ESCAPES.sub(lambda found: found[1] + chr(int(found[2][1:], 16)), text)


class SdattnError(Exception):
    """Something that sdattn refuses, or could not do. Each kind is also a builtin exception.

    Attributes:
        images: PIL images that were drawn before a later error of the same call, for videos lists
            of frames; empty if there are none. Any other error of such a call has them too.
    """

    images: Sequence[Any] = ()

    def __str__(self) -> str:  # Python would show a KeyError's repr
        return readable(str(self.args[0])) if self.args else ""


class InvalidValueError(SdattnError, ValueError):
    """An invalid value, in a call or a file."""


class OptionError(InvalidValueError):
    """An option with an invalid value; ``advice`` is what to do.

    >>> print(OptionError("guidance_scale", 0.5, "pass a number above 1."))
    `guidance_scale=0.5`: pass a number above 1.
    """

    def __init__(self, option: str, value: object, advice: str):
        super().__init__(f"`{option}={value!r}`: {advice}")
        self.option = option
        self.value = value
        self.advice = advice

    def __reduce__(self) -> tuple[Any, ...]:
        held = dict(vars(self))
        try:
            pickle.dumps(self.value)
        except Exception:  # any error: it is the value's own code
            held["value"] = repr(self.value)
        return type(self).__new__, (type(self), *self.args), held


def refuse(option: str, value: object, known: str | Iterable[object]) -> OptionError:
    """Return the error for a value that an option does not take; ``known`` is what it takes.

    >>> print(refuse("seed", -1, "a whole number from 0"))
    `seed=-1`: pass a whole number from 0.
    >>> print(refuse("mode", "reweigh", ("replace", "refine", "reweight")))
    `mode='reweigh'`: pass 'replace', 'refine' or 'reweight'. Did you mean 'reweight'?
    """
    if isinstance(known, str):
        return OptionError(option, value, f"pass {known}.")
    known = list(known)
    *names, last = map(repr, known)
    advice = f"pass {', '.join(names)} or {last}." if names else f"pass {last}."
    return OptionError(option, value, advice + did_you_mean(value, known))


def did_you_mean(given: object, known: Iterable[object]) -> str:
    """Return the question that ends a message, with the known name nearest to a given one; "" if
    none is near.

    >>> did_you_mean("damm", ["default", "daam"]), did_you_mean("xyz", ["default", "daam"])
    (" Did you mean 'daam'?", '')
    """
    names = [name for name in known if isinstance(name, str)]
    near = difflib.get_close_matches(str(given), names, 1)
    return f" Did you mean {near[0]!r}?" if near else ""


class NotInCallError(InvalidValueError, AttributeError):
    """A call of a pipeline's model outside the pipeline's own call, which knows about guidance."""


class InvalidTypeError(SdattnError, TypeError):
    """An object of a kind that is not known or cannot do what was asked."""


class NotFoundError(SdattnError, KeyError):
    """A word, a column, a layer or an item that is not there."""


class RunError(SdattnError, RuntimeError):
    """A run that did not go as it had to."""


class CaptureError(RunError):
    """Capture could not see what it was asked to see."""


class NotFiniteError(SdattnError, ValueError):
    """A run made numbers that are not finite: NaN or infinity."""


class AccessError(SdattnError, OSError):
    """A disk, a storage or the hub cannot be reached, read or written."""


class ExistsError(AccessError, FileExistsError):
    """A file or folder that is there already and stays as it is."""


class MissingFileError(AccessError, FileNotFoundError):
    """A file or folder that is not there."""


class DeniedError(AccessError, PermissionError):
    """A file, a folder or a storage that may not be read or written."""


class IsFolderError(AccessError, IsADirectoryError):
    """A folder where a file is needed."""


class MissingPackageError(SdattnError, ImportError):
    """A package that is needed for what was asked and is not installed."""


def optional(module: str, what: str, extra: str) -> Any:
    """Import a module of an optional package; the ImportError says that ``what`` needs it, and how
    to install it."""
    package = module.partition(".")[0]
    try:
        import_module(package)
        return import_module(module)
    except ImportError as error:
        raise MissingPackageError(f"{what} needs {package}: pip install '{extra}'") from error


_SYSTEM: dict[int, tuple[type[AccessError], str]] = {
    errno.ENOENT: (MissingFileError, "There is no file {}. Check the path."),
    errno.ENOTDIR: (MissingFileError, "A part of {} is a file, not a folder. Check the path."),
    errno.EISDIR: (IsFolderError, "{} is a folder. Name a file."),
    errno.EACCES: (DeniedError, "{} may not be opened. Check who may read and write it."),
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT),
        (AccessError, "The disk of {} is full. Free some space, or choose another `folder`."),
    ),
}


def access_error(error: OSError, path: object = None) -> OSError:
    """Return an error of the system in words that name the file, or ``path``, and what to do; any
    other error as it is."""
    path = path or error.filename
    if isinstance(error, SdattnError) or error.errno not in _SYSTEM or path is None:
        return error
    kind, text = _SYSTEM[error.errno]
    told = kind(text.format(repr(str(path)) if " " in str(path) else path))
    told.errno = error.errno
    return told


class SdattnWarning(UserWarning):
    """A warning of sdattn."""


# Packages whose code runs between a user's line and a warning of what that line does.
_BETWEEN = {
    *("sdattn", "contextlib", "torch", "diffusers", "diffusers_modules", "transformers"),
    *("accelerate", "peft"),
}


def warn(text: str, category: type[SdattnWarning]) -> None:
    """Warn at the user's line: the nearest call from outside sdattn and what runs its code; in a
    thread or a command, where every frame is inside, at the outermost."""
    frame = sys._getframe(1)
    while _package(frame) in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    place = (frame.f_code.co_filename, frame.f_lineno)
    names = frame.f_globals
    told = names.setdefault("__warningregistry__", {})  # as warnings.warn() has it
    warnings.warn_explicit(readable(text), category, *place, names.get("__name__"), told)


# Errors of a network or a storage that are no OSError, by the package of their class
_OUTSIDE = {
    *("aiobotocore", "aiohttp", "botocore", "fsspec", "httpx", "httpx2", "huggingface_hub"),
    "requests",
}
_HOSTS = {"diffusers", "transformers"}  # whose ValueErrors are about what a user asked
_EXPECTED = {"OutOfMemoryError", "DistNetworkError", "DistStoreError"}  # of torch, by name
_FULL = ("out of memory", "can't allocate memory")  # how torch says so in a plain RuntimeError


def is_bug(error: BaseException) -> bool:
    """Check whether an error is a fault of sdattn or of a library, so that its traceback is worth
    more than its message: no refusal, no disk, network or memory, no value that diffusers
    refuses."""
    if isinstance(error, (SdattnError, OSError, MemoryError)) or not isinstance(error, Exception):
        return False
    if isinstance(error, ImportError):
        return (error.name or "").partition(".")[0] == "sdattn"
    if isinstance(error, ValueError) and raised_by(error) in _HOSTS:
        return False
    if is_out_of_memory(error):
        return False
    for kind in type(error).__mro__:
        if kind.__name__ in _EXPECTED or kind.__module__.partition(".")[0] in _OUTSIDE:
            return False
    return True


def is_out_of_memory(error: BaseException) -> bool:
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in _FULL)
    return isinstance(error, MemoryError) or said


def raised_by(error: BaseException) -> str:
    """The package whose code raised an error; "" of one that was not raised."""
    # The last frame is the code that raised, whoever called it.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _package(frames[-1]) if frames else ""


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def refuse_calls(module: str, meant: str) -> None:
    """Make a call of a module raise a TypeError that names the function that was ``meant``."""

    class Room(ModuleType):
        def __call__(self, *_: object, **__: object) -> NoReturn:
            raise InvalidTypeError(f"`{module}` is a module. Call `{meant}`.")

    sys.modules[module].__class__ = Room


def option_names(names: Iterable[str]) -> str:
    """Return options as messages have them, between backticks."""
    return ", ".join(f"`{name}`" for name in names)


def known_options(**meant: str) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """Make a function refuse keywords that it lacks, with the nearest that it has; ``meant`` are
    other libraries' names of its own.

    Raises (when called):
        TypeError: an unknown keyword.
    """

    def decorate(function: Callable[Given, Made]) -> Callable[Given, Made]:
        known = [*signature(function).parameters]

        @wraps(function)
        def call(*args: Given.args, **options: Given.kwargs) -> Made:
            for name in options.keys() - set(known):
                near = did_you_mean(name, known) or f" It has: {', '.join(known)}."
                near = f" Did you mean {meant[name]!r}?" if name in meant else near
                raise InvalidTypeError(f"`{function.__name__}()` has no option {name!r}.{near}")
            return function(*args, **options)

        return call

    return decorate


def size_text(number: int) -> str:
    """Return bytes as people read them.

    >>> size_text(8_300_000), size_text(3_319_500_000), size_text(400)
    ('8.3 MB', '3.3 GB', '400 bytes')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number} bytes"
