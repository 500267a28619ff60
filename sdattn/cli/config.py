"""``--config``: a command's defaults from a .toml file, or from the run.json of a run to repeat."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ..errors import InvalidValueError, access_error, did_you_mean

_NOT_SET = ("config_file", "help")


def use(context: typer.Context, path: Path | None) -> Path | None:
    """Read --config's file before typer reads other options; raise BadParameter for a bad one."""
    if path is None or context.resilient_parsing:
        return path
    file = path / "run.json" if path.is_dir() else path
    command = str(context.info_name)
    params = {str(one.name): one for one in context.command.params if one.name not in _NOT_SET}
    try:
        read = _from_run if file.suffix == ".json" else _from_toml
        entries = read(file, command, params)
    except OSError as error:
        raise _refused(str(access_error(error))) from None
    context.default_map = {name: _typed(params[name], value) for name, value in entries.items()}
    return path


def _from_toml(path: Path, command: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's values, which has options as they are typed, by parameter."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        entries = tomllib.loads(path.read_bytes().decode())
    except ValueError as error:  # UnicodeDecodeError is one too
        raise _refused(f"{path} is no TOML: {error}.") from None
    known = {_flag(param): name for name, param in params.items()}
    entries = {name.replace("_", "-"): value for name, value in entries.items()}
    if unknown := [name for name in entries if name not in known]:
        near = "".join(did_you_mean(name, known) for name in unknown)
        names = ", ".join(map(repr, unknown))
        raise _refused(f"{path}: `sdattn {command}` has no {names}.{near}")
    return {known[name]: value for name, value in entries.items()}


def _from_run(path: Path, command: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that make a run again, by parameter."""
    from .repeating import options_of_run

    try:
        made, entries = options_of_run(path)
    except InvalidValueError as error:
        raise _refused(str(error)) from None
    if made != command:
        raise _refused(f"{path} is of a run of `sdattn {made}`, not of `sdattn {command}`.")
    options = entries.pop("options", {})
    own = {name: value for name, value in options.items() if name in params}
    others = {name: value for name, value in options.items() if name not in params}
    entries |= {**own, "set_": others or None}
    return {name: value for name, value in entries.items() if name in params and value is not None}


def _flag(param: Any) -> str:
    return str(max(param.opts, key=len)).strip("-_")


def _typed(param: Any, value: Any) -> Any:
    """Return a value as it would be typed, so that it is parsed and refused in the same way."""
    many = getattr(param, "multiple", False) or param.nargs == -1
    flag = getattr(param, "is_flag", False)
    if many and isinstance(value, dict):
        value = [f"{name}={json.dumps(held)}" for name, held in value.items()]
    values = list(value) if many and isinstance(value, (list, tuple)) else [value]
    if any(isinstance(v, (list, dict)) or isinstance(v, bool) is not flag for v in values):
        kind = "texts or numbers" if many else "a text or number"
        if flag:
            kind = "true or false"
        raise _refused(f"{_flag(param)!r} is {json.dumps(value, default=str)}; give it {kind}.")
    texts = values if flag else list(map(str, values))
    return texts if many else texts[0]


def _refused(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="--config")
