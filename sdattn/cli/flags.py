"""The library's messages name options and functions between backticks, as in Python; the command
line has flags and commands."""

import ast
import json
import re
import shlex
from typing import Any

_NAMED = re.compile(  # `name`, `name()` or `name=value`; a value may have backticks in quotes
    r"""`(\w+)(?:(\(\))|=((?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^`'"])+))?`"""
)
_COMMANDS = {  # by function
    **{name: name for name in ("generate", "explain", "edit", "diff")},
    "edit_image": "edit",
    "run_batch": "batch",
}
_KEPT = {  # options of `sdattn generate` by those of capture()
    "steps": "--keep steps",
    "heads": "--keep heads",
    "branch": "--negative-maps",
}


def spelled(text: str, command: Any) -> str:
    """Spell a message's options as the command's flags, and its functions as commands.

    A command's parameters have the library's names, whatever their flags: ``num_inference_steps``
    is ``--steps``. So "pass `num_inference_steps=4`" becomes "pass --steps 4".
    """
    options = {one.name: one for one in command.params if one.param_type_name == "option"}

    def typed(named: re.Match[str]) -> str:
        name, is_call, literal = named.groups()
        if is_call:
            known = _COMMANDS.get(name)
            return f"`sdattn {known}`" if known else f"`sdattn.{name}()` in Python"
        if name == "capture_options" and literal and _KEPT.keys() >= set(_value(literal)):
            return " ".join(_KEPT[kept] for kept in _value(literal))
        if name in options:
            return _flag(options[name], literal) or named[0]
        if literal and "set_" in options:
            value = _value(literal)
            text = value if isinstance(value, str) else json.dumps(value)
            return f"--set {name}={shlex.quote(text)}"
        return named[0]

    return _NAMED.sub(typed, text)


def _flag(option: Any, literal: str | None) -> str | None:
    """Return an option as it is typed, or None if its value is invalid."""
    [on, *_] = option.opts
    if literal == "False":
        return option.secondary_opts[0] if option.secondary_opts else None
    return on if literal in (None, "True") else f"{on} {_typed(_value(literal))}"


def _typed(value: Any) -> str:
    """Return a value as it is typed: commas between parts, NAME=VALUE, quotes where needed."""
    if isinstance(value, dict):
        value = [f"{name}={part}" for name, part in value.items()]
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return shlex.quote(str(value))


def _value(literal: str) -> Any:
    try:
        return ast.literal_eval(literal)
    except (ValueError, SyntaxError):  # no literal of Python: torch.float16
        return literal.removeprefix("torch.")
