"""The library's messages in the words of the command line: num_inference_steps=0 is --steps 0."""

import json
import re
import shlex
import sys
import traceback
from importlib.metadata import PackageNotFoundError
from typing import Any

from ..errors import (
    RunError,
    SdattnError,
    SdattnWarning,
    access_error,
    did_you_mean,
    is_bug,
    is_out_of_memory,
    reworded,
    size_text,
)
from ..files.terminal import visible
from ..runs.option_names import LOADING, PIPELINE

_FLAGS = {  # by their names in Python; others stay as in Python
    **{name: f"--{option}" for name, option in {**PIPELINE, **LOADING}.items()},
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            *("seed", "mode", "device", "dtype", "preset", "refine", "ask", "causal", "invert"),
            *("timesteps", "null_text", "batch_size", "format", "input_format", "save", "part"),
            *("prompt_column", "keep_columns"),
            *("engine", "workers", "force", "strict"),
        )
    },
    "folder": "--out",
    "cross_replace_steps": "--cross",
    "self_replace_steps": "--self",
    "weights": "--weight",
    "capture_options": "--keep",
    "spots": "--keep spots",
}
_SET = (  # the pipeline's arguments without an option of their own
    *("max_sequence_length", "true_cfg_scale", "clean_caption", "use_resolution_binning"),
    *("num_images_per_prompt", "num_videos_per_prompt", "frame_rate"),
)
_FUNCTIONS = {
    "capture()": "sdattn.capture() in Python",
    "edit_image()": "`sdattn edit`",
    "run_batch()": "`sdattn batch`",
    "merge_runs()": "`sdattn merge`",
    **{f"{name}()": f"`sdattn {name}`" for name in ("generate", "explain", "diff")},
}
_BETWEEN = {"part": "/", "workers": ":"}  # the parts of a value
_REPORT = (
    "This is a bug in sdattn or in a library that it uses. Please report it with the lines above "
    "and what `sdattn info` prints."
)


def failure(error: Exception) -> str:
    """Return the text printed for an error that ends a command: one line with the reason, or for a
    bug the traceback and how to report it."""
    if not is_bug(error):
        return f"sdattn: {visible(reason(error))}"
    lines = visible("".join(traceback.format_exception(error)))
    return f"{lines}{_versions()}\nsdattn: {_REPORT}"


def reason(error: Exception) -> str:
    """Return an error's message in one line, with the type if it was not written for users."""
    if isinstance(error, OSError):
        error = access_error(error)
    elif is_out_of_memory(error):
        error = _out_of_memory(error)
    text = " ".join(in_options(error).split())
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


def in_options(said: object) -> str:
    """Put a message of the library into options that people type, in place of Python's
    arguments."""
    text = str(said)
    return reworded(text, typed) if isinstance(said, (SdattnError, SdattnWarning)) else text


def with_nearest(message: str) -> str:
    """Add the nearest choice to typer's message for a value that is none of an option's.

    >>> with_nearest("'damm' is not one of 'default', 'daam'.")
    "'damm' is not one of 'default', 'daam'. Did you mean 'daam'?"
    """
    given, is_choice, choices = message.partition(" is not one of ")
    asked = re.findall(r"'([^']*)'$", given)
    known = re.findall(r"'([^']*)'", choices)
    return message + (did_you_mean(asked[0], known) if is_choice and asked else "")


def typed(name: str, *value: Any) -> str | None:
    """Return an option or a function as it is typed.

    >>> typed("guidance_scale", 0.5), typed("null_text", False), typed("folder")
    ('--guidance 0.5', '--no-null-text', '--out')
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if (name, *value) in (("branch", "both"), ("branch",)):
        return "--negative-maps"
    if name in ("steps", "heads") and not value:
        return f"--keep {name}"
    if name == "max_bytes" and value and isinstance(value[0], int):
        return f"--max-memory {size_text(value[0]).replace(' ', '')}"
    if name in _SET and value:
        return f"--set {name}={json.dumps(value[0], default=str)}"
    if name not in _FLAGS:
        return None
    return _with_value(_FLAGS[name], *value, between=_BETWEEN.get(name, ","))


def _with_value(flag: str, *value: Any, between: str) -> str:
    match value:
        case (True,) | ():
            return flag
        case (False,):
            return f"--no-{flag.removeprefix('--')}"
        case (dict() as given,):
            if flag == "--keep":
                return f"{flag} {between.join(given)}"
            return f"{flag} {shlex.quote(between.join(f'{k}={v}' for k, v in given.items()))}"
        case (list() | tuple() as given,):
            return f"{flag} {shlex.quote(between.join(map(str, given)))}"
    return f"{flag} {shlex.quote(str(value[0]).removeprefix('torch.'))}"


def _versions() -> str:
    from ..files.version import versions

    python = f"Python {sys.version.split()[0]} on {sys.platform}"
    try:
        return ", ".join([python, *(f"{name} {found}" for name, found in versions().items())])
    except PackageNotFoundError as error:
        return f"{python}, no {error.name}"
