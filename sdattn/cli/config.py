"""``--config``: a file whose entries are the defaults of a command's options, and which options a
run was made with."""

import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ..runs.option_names import PIPELINE

_NOT_SET = ("config", "help")
_EDITS = ("prompt", "targets", "mode", "cross_replace_steps", "self_replace_steps")
_EACH_ALONE = ("num_images_per_prompt",)  # a run.json is of one of the pictures


def use(context: typer.Context, config: Path | None) -> Path | None:
    """What typer calls for --config before it reads the other options.

    Raises:
        typer.BadParameter: the file is neither, or has an entry that is none of the command's.
    """
    if config is None or context.resilient_parsing:
        return config
    command = str(context.info_name)
    entries = {name.replace("_", "-"): value for name, value in _entries(config, command).items()}
    known = {_called(param): param for param in context.command.params}
    known = {name: param for name, param in known.items() if name not in _NOT_SET}
    if unknown := [name for name in entries if name not in known]:
        raise _refused(f"{config}: `sdattn {command}` has no {_with_nearest(unknown, known)}.")
    typed = {known[name]: _typed(known[name], value) for name, value in entries.items()}
    context.default_map = {str(param.name): value for param, value in typed.items()}
    return config


def _called(param: Any) -> str:
    """An option by its long name, an argument by its own."""
    return str(max([*param.opts, param.name], key=len) if param.opts else param.name).strip("-_")


def _with_nearest(unknown: list[str], known: Mapping[str, Any]) -> str:
    near = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
    return ", ".join(
        f"{name!r} (nearest: {other[0]!r})" if other else repr(name) for name, other in near.items()
    )


def _typed(param: Any, value: Any) -> Any:
    """A value as it would be typed, so that it is read and refused alike."""
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
    """By the names of options: those of a .toml file, or those that a run was made with."""
    path = path / "run.json" if path.is_dir() else path
    data = path.read_bytes()
    if path.suffix != ".json":
        return _of_toml(path, data)
    try:
        document = json.loads(data)
    except ValueError as error:
        raise _refused(f"{path} is no JSON: {error}.") from None
    form = str(document.get("format")) if isinstance(document, dict) else ""
    if form.startswith("sdattn-edit-"):
        made, entries = "edit", _of_edit(document)
    else:
        made, entries = _of_run(path, data)
    if made != command:
        raise _refused(f"{path} is of a run of `sdattn {made}`, not of `sdattn {command}`.")
    if "edited" in document:
        raise _refused(
            f"{path} is of one picture of an edit. Take the run.json of the folder above."
        )
    return {name: value for name, value in entries.items() if value is not None}


def _of_toml(path: Path, data: bytes) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(data.decode())
    except ValueError as error:  # UnicodeDecodeError is one too
        raise _refused(f"{path} is no TOML: {error}.") from None


def _of_run(path: Path, data: bytes) -> tuple[str, dict[str, Any]]:
    """The command that made a run, and its options."""
    from ..runs.info import read_info

    info = read_info({"run.json": data}, str(path.parent))
    if info.edited:
        return "edit", {}
    entries = {**_of_any(vars(info)), **_of_preset(path, info), "ask": info.asked}
    options = info.options or {}
    if info.explained and info.explained.file:
        entries["image"] = _beside(path, info.explained.file)
    if info.explained and info.explained.way == "inversion":
        return "explain", {**entries, "invert": True, "steps": options.get("num_inference_steps")}
    if info.explained:
        times = ",".join(map(str, info.explained.timesteps))
        return "explain", {**entries, "timesteps": times}
    if info.options_left_out:
        left = ", ".join(info.options_left_out)
        raise _refused(f"{path} was made in Python with {left}, which no option can give.")
    kept = {"steps": info.details.steps, "heads": info.details.heads}
    further: dict[str, Any] = {
        "keep": ",".join(name for name, held in kept.items() if held is not None) or None,
        "causal": "causal" in info.more,
        "negative-maps": "negative" in info.more,
    }
    return "generate", {**entries, **_of_options(options), **further}


def _beside(path: Path, name: str) -> str | None:
    """A picture by the name that a run has of it: in the run's folder, that around it, or here."""
    candidates = (folder / Path(name).name for folder in (path.parent, path.parent.parent, Path()))
    return next((str(candidate) for candidate in candidates if candidate.is_file()), None)


def _of_any(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: held.get(name) for name in ("prompt", "seed", "model", "dtype")}


def _of_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the pipeline's call: those with options of their own, and --set for the others."""
    own = {option: options.get(name) for name, option in PIPELINE.items()}
    others = {name: value for name, value in options.items() if name not in PIPELINE}
    others = {name: v for name, v in others.items() if v is not None and name not in _EACH_ALONE}
    return {**own, "set": others or None}


def _of_preset(path: Path, info: Any) -> dict[str, Any]:
    from ..runs.report.command import is_known_by_name

    preset = info.preset
    if not is_known_by_name(preset, explained=info.explained is not None):
        raise _refused(f"{path} was made with a preset of its own, {preset.name!r}.")
    return {"preset": preset.name, "refine": preset.refine}


def _of_edit(document: Mapping[str, Any]) -> dict[str, Any]:
    """Of the ``run.json`` of ``sdattn edit``, beside the runs of its pictures."""
    if missing := [name for name in _EDITS if name not in document]:
        raise _refused(f"This run.json of an edit has no {', '.join(map(repr, missing))}.")
    if document.get("reconstruction_psnr") is not None:
        raise _refused("This edit was of a picture, whose file it does not name. Type its options.")
    spans = {"cross": document["cross_replace_steps"], "self": document["self_replace_steps"]}
    blended = [word for words in document.get("blend") or () for word in words]
    given = _of_options(document.get("options") or {})
    del given["set"]
    entries = {**_of_any(document), **given, **spans, "source": document["prompt"]}
    del entries["prompt"]
    return {
        **entries,
        "targets": document["targets"],
        "mode": document["mode"],
        "blend": list(dict.fromkeys(blended)) or None,
        "weight": document.get("weights") or None,
    }


def _refused(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="--config")
