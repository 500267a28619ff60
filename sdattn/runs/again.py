"""The command that makes a run again, from the run's own record. A run's page shows it as a line
for a shell, and ``--config`` reads a ``run.json`` with it."""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..errors import InvalidValueError
from ..maps.presets import PRESETS, Preset
from .imagerun import ImageRun
from .option_names import FURTHER, LOADING, PIPELINE
from .settings import Edited, Explained, RunSettings

_ARGUMENTS = {
    "generate": ("prompt",),
    "explain": ("image", "prompt"),
    "edit": ("source", "targets"),
}
_EACH_ALONE = "num_images_per_prompt"  # a run is of one of the images


def command_of(run: ImageRun) -> str:
    """The command that makes a run's image and maps again, one line for a shell.

    An image of one's own has its file's name, so that the command works where that lies; one that
    came from no file is ``image.png``, which the run's folder has. An image of several of one
    prompt is made alone.
    Raise ValueError, which says why, if no one command does.
    """
    if not run.settings.model:
        raise InvalidValueError("The pipeline was built in Python, so no name of a model is known.")
    if run.settings.stopped:
        raise InvalidValueError("It was stopped before its end.")
    command, given = made_by(run.settings, run.heatmaps.preset, run.more)
    needed = ["model", "device", "dtype"]
    if command == "generate" or "timesteps" in given:
        needed.append("seed")
    for name in needed:
        if given[name] is None:
            raise InvalidValueError(f"The run does not say its {name}.")
    arguments = [given.pop(name) for name in _ARGUMENTS[command]]
    texts = [text for held in arguments for text in ([held] if isinstance(held, str) else held)]
    flags = [flag for name, value in given.items() for flag in _flags(name, value)]
    if any(text.startswith("-") for text in texts):  # it would be read as an option
        return shlex.join(["sdattn", command, *flags, "--", *texts])
    return shlex.join(["sdattn", command, *texts, *flags])


def made_by(
    settings: RunSettings, preset: Preset, more: Collection[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the command that makes a run with these further maps, and its arguments and options by
    their long names; raise ValueError, which names it, for an option that the command lacks.

    Values are as they would be typed: texts, numbers, True for a flag, a list for an option that
    can be given several times, a dictionary for ``NAME=VALUE``. None if the run does not say.
    """
    # Options of the pipeline's call: those that the commands know by a name of their own, and
    # others.
    options = {**(settings.options or {})}
    own = {PIPELINE[name]: options.pop(name, None) for name in PIPELINE}
    others = {name: options[name] for name in sorted(options) if options[name] is not None}
    others.pop(_EACH_ALONE, None)
    given: dict[str, Any]
    if settings.edited:
        command, given = "edit", {"seed": settings.seed, **_edited(settings.edited), **own}
        _refuse([*others])
    elif settings.explained:
        command = "explain"
        given = {
            **_explained(settings, settings.explained, own["steps"]),
            **_maps(settings, preset),
        }
        _refuse({*(settings.options_left_out or ())} - {"latents"})
    else:
        command = "generate"
        given = {"prompt": settings.prompt, "seed": settings.seed, **own, "set": others or None}
        given |= {**_kept(settings, preset, more), **_maps(settings, preset)}
        _refuse(settings.options_left_out or ())
    for name in ("model", "device", "dtype"):
        given[name] = getattr(settings, name)
    loading = settings.loading.to_json() if settings.loading else {}
    return command, {**given, **{LOADING[name]: value for name, value in loading.items()}}


def _refuse(names: Collection[str]) -> None:
    if names:
        text = f"Options were given that only Python can: {', '.join(sorted(names))}."
        raise InvalidValueError(text)


def _kept(settings: RunSettings, preset: Preset, more: Collection[str]) -> dict[str, object]:
    captured = settings.captured
    kept = [name for name in ("steps", "heads") if captured and getattr(captured, name) == "all"]
    kept += ["spots"] if captured and captured.spots else []
    if preset.each_head:  # it keeps the heads itself
        kept = [name for name in kept if name != "heads"]
    flags = {option: True for name, option in FURTHER.items() if name in more}
    return {"keep": ",".join(kept) or None, **flags}


def _maps(settings: RunSettings, preset: Preset) -> dict[str, object]:
    known = PRESETS.get(preset.name)
    if known and settings.explained:  # it reads the chosen timesteps
        known = replace(known, steps=preset.steps)
    if known is None or replace(known, refine=None) != replace(preset, refine=None):
        raise InvalidValueError(f"The preset {preset.name!r} was made in Python.")
    name = None if preset.name == "default" else preset.name
    refine = None if known.refine else preset.refine
    return {"preset": name, "refine": refine, "ask": settings.asked}


def _explained(settings: RunSettings, explained: Explained, steps: int | None) -> dict[str, object]:
    given: dict[str, object] = {"image": explained.file or "image.png", "prompt": settings.prompt}
    if explained.way == "inversion":
        return {**given, "invert": True, "steps": steps}
    return {**given, "seed": settings.seed, "timesteps": ",".join(map(str, explained.timesteps))}


def _edited(edited: Edited) -> dict[str, object]:
    if edited.reconstruction_psnr is not None:
        raise InvalidValueError("The image was edited from one that the run does not hold.")
    parts = {"cross": edited.cross_replace_steps, "self": edited.self_replace_steps}
    if not all(isinstance(part, (int, float)) for part in parts.values()):
        raise InvalidValueError("The parts of the run that were taken over were given in Python.")
    blended = dict.fromkeys(word for words in edited.blend or () for word in words)
    return {
        "source": edited.prompt,
        "targets": edited.targets,
        "mode": edited.mode,
        **parts,
        "blend": [*blended] or None,
        "weight": edited.weights or None,
    }


def _flags(name: str, value: object) -> Iterator[str]:
    """An option as it is typed."""
    if value is None:
        return
    if value is True:
        yield f"--{name}"
        return
    if isinstance(value, Mapping):
        value = [f"{key}={json.dumps(v, ensure_ascii=False)}" for key, v in value.items()]
    for each in value if isinstance(value, list) else [value]:
        yield from (f"--{name}", str(each))
