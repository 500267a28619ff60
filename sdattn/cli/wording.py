"""What the library says in the words of the command line: num_inference_steps=0 is --steps 0."""

import re

from ..runs.option_names import PIPELINE

_OPTIONS = {  # what they are called in Python, where that is another name
    **{name: f"--{option}" for name, option in PIPELINE.items()},
    "cross_replace_steps": "--cross",
    "self_replace_steps": "--self",
    "weights": "--weight",
    "null_text": "--null-text",
    "batch_size": "--batch-size",
    "input_format": "--input-format",
    "format": "--format",
    **{name: f"--{name}" for name in ("seed", "mode", "device", "dtype", "preset", "refine")},
    **{
        name: f"--{name}"
        for name in ("ask", "causal", "invert", "timesteps", "save", "part", "engine")
    },
}
_ALONE = [name for name in _OPTIONS if "_" in name]  # such are no words of English
_SET = (
    *("max_sequence_length", "true_cfg_scale", "clean_caption", "use_resolution_binning"),
    *("num_images_per_prompt", "num_frames"),
)
_FUNCTIONS = {
    "capture": "sdattn.capture() in Python",
    **{name: f"`sdattn {name}`" for name in ("generate", "explain", "edit", "diff")},
}
_ITEM = re.compile(r"""["']?([^"':,{}]+)["']?:\s*([^\s,}]+)""")
_VALUE = r"""\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|'[^']*'|"[^"]*"|-?[\w.*+/-]*\w"""
_SPOKEN = re.compile(
    rf"""(?P<quoted>(?<!\w)'(?:[^'\\]|\\.)*'|(?<!\w)"(?:[^"\\]|\\.)*")
    |\bbranch='both'(?P<both>)
    |(?<![\w./\\-])(?P<name>{"|".join(_OPTIONS)})=(?P<value>{_VALUE})
    |\b(?P<set>(?:{"|".join(_SET)})=)
    |\b(?P<alone>{"|".join(_ALONE)})\b
    |(?<![\w.])(?P<function>{"|".join(_FUNCTIONS)})\(\)""",
    re.VERBOSE,
)


_OURS = OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError


def reason(error: Exception) -> str:
    """An error's message in one line; one that is not ours to word comes with its type."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    text = in_options(" ".join(text.split()))
    ours = isinstance(error, _OURS) and not isinstance(error, ModuleNotFoundError)
    return text if ours and text else f"{type(error).__name__}: {text}"


def in_options(text: str) -> str:
    """A message of the library with the options that people type, not Python's arguments.

    >>> in_options("guidance_scale=0.5: pass a number above 1, or null_text=False.")
    '--guidance 0.5: pass a number above 1, or --no-null-text.'
    """
    return _SPOKEN.sub(_spoken, text)


def _spoken(found: re.Match[str]) -> str:
    if found["quoted"]:
        return found[0]  # a prompt, or a file's name
    if found["both"] is not None:
        return "--negative-maps"
    if found["set"]:
        return f"--set {found['set']}"
    if found["alone"]:
        return _OPTIONS[found["alone"]]
    if found["function"]:
        return _FUNCTIONS[found["function"]]
    return _option(_OPTIONS[found["name"]], found["value"])


def _option(option: str, value: str) -> str:
    """As it is typed with a value that Python wrote."""
    if value in ("True", "False"):
        return option if value == "True" else f"--no-{option.removeprefix('--')}"
    if value.startswith("{"):
        value = ",".join(f"{word}={factor}" for word, factor in _ITEM.findall(value))
        value = value.replace("word=factor", "WORD=FACTOR")
    if value[:1] in "'\"[":
        value = re.sub(r"""["'\[\]]""", "", value)
    return f"{option} {value}" if value else f"{option} ''"
