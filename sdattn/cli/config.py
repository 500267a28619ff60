"""``--config``: a command's defaults from a file, or from the options of an earlier run."""

import json
import sys
from pathlib import Path
from typing import Any

import typer

from ..errors import access_error, did_you_mean

_NOT_SET = ("config", "help")


def use(context: typer.Context, config: Path | None) -> Path | None:
    """Read --config's file before typer reads other options; raise BadParameter for a bad one."""
    if config is None or context.resilient_parsing:
        return config
    command = str(context.info_name)
    entries = {name.replace("_", "-"): value for name, value in _entries(config, command).items()}
    known = {_called(param): param for param in context.command.params}
    known = {name: param for name, param in known.items() if name not in _NOT_SET}
    if unknown := [name for name in entries if name not in known]:
        near = "".join(did_you_mean(name, known) for name in unknown)
        names = ", ".join(map(repr, unknown))
        raise _refused(f"{config}: `sdattn {command}` has no {names}.{near}")
    typed = {known[name]: _typed(known[name], value) for name, value in entries.items()}
    context.default_map = {str(param.name): value for param, value in typed.items()}
    return config


def _called(param: Any) -> str:
    return str(max([*param.opts, param.name], key=len) if param.opts else param.name).strip("-_")


def _typed(param: Any, value: Any) -> Any:
    """Return a value as it would be typed, so that it is parsed and refused in the same way."""
    many, flag = getattr(param, "multiple", False) or param.nargs == -1, hasattr(param, "is_flag")
    flag = flag and param.is_flag
    if many and isinstance(value, dict):
        value = [f"{name}={json.dumps(held)}" for name, held in value.items()]
    values = value if many and isinstance(value, list) else [value]
    if any(isinstance(v, (list, dict)) or isinstance(v, bool) is not flag for v in values):
        kind = "true or false" if flag else "texts or numbers" if many else "a text or number"
        raise _refused(f"{_called(param)!r} is {json.dumps(value, default=str)}; give it {kind}.")
    texts = values if flag else list(map(str, values))
    return texts if many else texts[0]


def _entries(path: Path, command: str) -> dict[str, Any]:
    """Return option names and values from a .toml file, or from a run's own options."""
    path = path / "run.json" if path.is_dir() else path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _refused(str(access_error(error))) from None
    if path.suffix != ".json":
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            return tomllib.loads(data.decode())
        except ValueError as error:  # UnicodeDecodeError is one too
            raise _refused(f"{path} is no TOML: {error}.") from None
    try:
        document = json.loads(data)
    except ValueError as error:
        raise _refused(f"{path} is no JSON: {error}.") from None
    made, entries = _of_run(path, data, document)
    if made != command:
        raise _refused(f"{path} is of a run of `sdattn {made}`, not of `sdattn {command}`.")
    if not entries:
        raise _refused(f"{path} is of one image of an edit. Take the run.json of the folder above.")
    return {name: value for name, value in entries.items() if value is not None}


def _of_run(path: Path, data: bytes, document: Any) -> tuple[str, dict[str, Any]]:
    """Return the command that made a run, and its options, but with this machine's device."""
    from ..files.records import read_document
    from ..maps.presets import PRESETS
    from ..runs.again import made_by
    from ..runs.info import read_info
    from ..runs.settings import EDIT_FORMAT, EditInfo

    more = tuple[str, ...]()
    if isinstance(document, dict) and document.get("format") == EDIT_FORMAT:
        edit = read_document(EditInfo, document, path, "Restore it or edit the image again.")
        settings, preset = edit.of_images, PRESETS["default"]
    else:
        info = read_info({"run.json": data}, str(path.parent))
        if info.edited:
            return "edit", {}
        settings, preset, more = info, info.preset, tuple(info.more)
    try:
        made, entries = made_by(settings, preset, more)
    except ValueError as error:
        raise _refused(f"{path}: {error}") from None
    del entries["device"]
    if settings.explained:
        entries["image"] = _beside(path, settings.explained.file)
    return made, entries


def _beside(path: Path, name: str | None) -> str | None:
    """Find an image by the name that a run records: in its folder, its parent folder, or here."""
    if name is None:
        return None
    candidates = (folder / Path(name).name for folder in (path.parent, path.parent.parent, Path()))
    return next((str(candidate) for candidate in candidates if candidate.is_file()), None)


def _refused(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="--config")
