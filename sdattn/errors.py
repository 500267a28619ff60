"""What sdattn refuses and warns of, in messages that the command line words in its own way.

    try:
        run = sdattn.generate(pipe, "a red circle", guidance_scale=0.5)
    except sdattn.SdattnError as error:  # whatever was refused; each is also a builtin's kind
        print(error)

An exception of another kind that is a bug keeps its traceback, see :func:`is_bug`.
"""

import ast
import pickle
import string
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any


class Message(str):
    """A text that names options and functions: as Python has them, and in other words where asked.

    Args:
        template: ``{0}`` stands for a value, as in ``str.format``; ``{seed}`` for an option with
            the value that ``options`` has for it, else for its name alone; ``{force=True}`` for an
            option with this value; ``{generate()}`` for a function.
        values: a message or an error of sdattn among them is worded as this one is.
        options: by their names in Python.

    >>> Message("{0} exists. Choose another {folder}, or {force=True}.", "runs/{x}")
    'runs/{x} exists. Choose another folder, or force=True.'
    """

    template: str
    values: tuple[Any, ...]
    options: dict[str, Any]

    def __new__(cls, template: str, /, *values: Any, **options: Any) -> "Message":
        made = super().__new__(cls, _filled(template, values, options, in_python))
        made.template, made.values, made.options = template, values, options
        return made

    def __reduce__(self) -> Any:
        options = {name: _portable(value) for name, value in self.options.items()}
        return _message, (self.template, tuple(map(_portable, self.values)), options)


class SdattnError(Exception):
    """Something that sdattn refuses, or could not do: its message says what was asked, what was
    found and what to do. Each kind is also the builtin exception that it is like."""

    @property
    def message(self) -> str:
        """What ``str()`` gives; a :class:`Message` where it names options or functions."""
        return self.args[0] if self.args else ""

    def __str__(self) -> str:  # of a KeyError Python would show the repr
        return str(self.message)


class InvalidValueError(SdattnError, ValueError):
    """A value that cannot be, in the call or in what was read."""


class OptionError(InvalidValueError):
    """An option with a value that cannot be.

    Args:
        option: its name in Python.
        value: what it was given.
        advice: the template of a :class:`Message` after ``option=value: ``.

    >>> print(OptionError("guidance_scale", 0.5, "pass a number above 1, or {null_text=False}."))
    guidance_scale=0.5: pass a number above 1, or null_text=False.
    """

    def __init__(self, option: str, value: Any, advice: str, /, *values: Any, **options: Any):
        super().__init__(Message(f"{{{option}}}: {advice}", *values, **{option: value, **options}))
        self.option, self.value = option, value

    def __reduce__(self) -> Any:
        held = {name: _portable(value) for name, value in vars(self).items()}
        return _bare, (type(self), *self.args), held


class NotInCallError(InvalidValueError, AttributeError):
    """A call of a pipeline's model outside of the pipeline's own call, which alone knows whether it
    is guided."""


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
    """What is outside cannot be reached, read or written: a disk, a storage, the hub."""


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


class SdattnWarning(UserWarning):
    """What sdattn warns of."""


# Packages whose code runs between a user's line and a warning of what that line does.
_BETWEEN = {
    *("sdattn", "contextlib", "torch", "diffusers", "diffusers_modules", "transformers"),
    *("accelerate", "peft"),
}


def warn(text: str, category: type[SdattnWarning]) -> None:
    """Warn at the user's line: the nearest call from outside sdattn and what runs its code.

    Python's own ``skip_file_prefixes`` does the same from 3.12 on. In a thread or a command, where
    every frame is inside, the warning is at the outermost.
    """
    frame = sys._getframe(1)
    while _package(frame) in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    place, names = (frame.f_code.co_filename, frame.f_lineno), frame.f_globals
    told = names.setdefault("__warningregistry__", {})  # as warnings.warn() has it
    warnings.warn_explicit(text, category, *place, names.get("__name__"), told)


# Errors of a network or a storage that are no OSError, by the package of their class
_OUTSIDE = {
    *("aiobotocore", "aiohttp", "botocore", "fsspec", "httpx", "httpx2", "huggingface_hub"),
    "requests",
}
_HOSTS = {"diffusers", "transformers"}  # whose ValueErrors are about what a user asked
_EXPECTED = {"OutOfMemoryError", "DistNetworkError", "DistStoreError"}  # of torch, by name
_FULL = ("out of memory", "can't allocate memory")  # how torch says so in a plain RuntimeError


def is_bug(error: BaseException) -> bool:
    """Whether an error is nobody's refusal: a fault of sdattn or of a library that it uses, of
    whose traceback is worth more than its message.

    None are sdattn's own refusals; errors of disks, networks and storages; memory that is too
    small; packages that are missing; and what diffusers and transformers say of a wrong value.
    """
    if isinstance(error, (SdattnError, OSError, MemoryError)) or not isinstance(error, Exception):
        return False
    if isinstance(error, ImportError):
        return (error.name or "").partition(".")[0] == "sdattn"
    if isinstance(error, ValueError) and raised_by(error) in _HOSTS:
        return False
    if is_out_of_memory(error):
        return False
    kinds = type(error).__mro__
    return not any(
        kind.__name__ in _EXPECTED or kind.__module__.partition(".")[0] in _OUTSIDE
        for kind in kinds
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error, of Python or torch, says that memory is too small."""
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in _FULL)
    return isinstance(error, MemoryError) or said


def raised_by(error: BaseException) -> str:
    """The package whose code raised an error; "" of one that was not raised."""
    # The last frame is the code that raised, whoever called it.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _package(frames[-1]) if frames else ""


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def option_names(names: Iterable[str]) -> str:
    """The template of some options by their names.

    >>> option_names(["seed", "width"])
    '{seed}, {width}'
    """
    return ", ".join(f"{{{name}}}" if name.isidentifier() else repr(name) for name in names)


def in_python(name: str, *value: Any) -> str:
    """An option, or a function, as Python has it.

    >>> in_python("force"), in_python("force", True)
    ('force', 'force=True')
    """
    return "=".join([name, *map(repr, value)])


def worded(said: object, word: Callable[..., str]) -> str:
    """A message, or an error's, in other words; any other text as it is.

    Args:
        said: a :class:`Message`, an error or anything else that ``str()`` takes.
        word: called as ``word(name)`` or ``word(name, value)`` for each option and function; names
            of functions end in ``()``.
    """
    text = said.message if isinstance(said, SdattnError) else said
    if isinstance(text, Message):
        return _filled(text.template, text.values, text.options, word)
    return str(text)


def _filled(template: str, values: Any, options: Any, word: Callable[..., str]) -> str:
    parts = []
    for text, field, spec, conversion in string.Formatter().parse(template):
        parts.append(text)
        if field is None:
            continue
        # {0} is a value, {force=True} an option with that value, {seed} one with the value it has.
        name, equals, literal = field.partition("=")
        if name.isdigit():
            value = values[int(name)]
            value = repr(value) if conversion == "r" else value
            named = isinstance(value, (Message, SdattnError))
            parts.append(format(worded(value, word) if named else value, spec or ""))
        elif equals:
            parts.append(word(name, ast.literal_eval(literal)))
        else:
            parts.append(word(name, *([options[name]] if name in options else [])))
    return "".join(parts)


def _message(template: str, values: Any, options: Any) -> Message:
    return Message(template, *values, **options)


def _bare(kind: type[SdattnError], *arguments: Any) -> SdattnError:
    return kind.__new__(kind, *arguments)


class _Repr(str):
    """What stands for a value that cannot go to another process."""

    __repr__ = str.__str__


def _portable(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:  # of any kind: it is the value's own code
        return _Repr(repr(value))
    return value
