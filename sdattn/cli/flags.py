"""The library's messages name options between backticks, as in Python; a command has flags."""

import ast
import re
import shlex
from typing import Any

_NAMED = re.compile(  # `name` or `name=value`; a value may have backticks in quotes
    r"""`(\w+)(?:=((?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^`'"])+))?`"""
)


def spelled(text: str, command: Any) -> str:
    """Spell options in a message as the command's flags; leave names that are no option of it.

    A command's parameters have the library's names, whatever their flags: ``num_inference_steps``
    is ``--steps``. So "pass `num_inference_steps=4`" becomes "pass --steps 4".
    """
    options = {one.name: one for one in command.params if one.param_type_name == "option"}

    def flag(named: re.Match[str]) -> str:
        name, literal = named.groups()
        if name not in options:
            return named[0]
        on = options[name].opts[0]
        off = options[name].secondary_opts
        if literal == "False":
            return off[0] if off else named[0]
        return on if literal in (None, "True") else f"{on} {_typed(literal)}"

    return _NAMED.sub(flag, text)


def _typed(literal: str) -> str:
    """Return a value as it is typed: commas between parts, NAME=VALUE, quotes where needed."""
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError):  # no literal of Python: torch.float16
        value = literal.removeprefix("torch.")
    if isinstance(value, dict):
        value = [f"{name}={part}" for name, part in value.items()]
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return shlex.quote(str(value))
