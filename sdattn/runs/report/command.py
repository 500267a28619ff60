"""The command line that makes a run again, from what the run says of itself."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...errors import InvalidValueError
from ...maps.presets import PRESETS, Preset
from ..imagerun import ImageRun
from ..info import Edited, Explained, RunSettings
from ..option_names import PIPELINE


def command_of(run: ImageRun) -> str:
    """The command that makes a run's picture and maps again, one line for a shell.

    A picture of one's own has its file's name, so that the command works where that lies; one that
    came from no file is ``image.png``, which the run's folder has. A picture of several of one
    prompt is made alone.

    Raises:
        ValueError: no one command does, and why.
    """
    _check(run)
    settings = run.settings
    if settings.edited:
        texts = ["edit", settings.edited.prompt, *settings.edited.targets]
        flags = [*_edit(settings, settings.edited)]
    elif settings.explained:
        texts = ["explain", settings.explained.file or "image.png", settings.prompt]
        flags = [*_explain(settings, settings.explained), *_maps(run)]
    else:
        texts, flags = ["generate", settings.prompt], [*_generate(run), *_maps(run)]
    for name in ("model", "device", "dtype"):
        flags += [f"--{name}", _entry(settings, name)]
    if any(text.startswith("-") for text in texts):  # it would be read as an option
        texts, flags = texts[:1], [*flags, "--", *texts[1:]]
    return shlex.join(["sdattn", *texts, *flags])


def _entry(settings: RunSettings, name: str) -> Any:
    if (value := getattr(settings, name)) is None:
        raise InvalidValueError(f"The run does not say its {name}.")
    return value


def _check(run: ImageRun) -> None:
    settings, preset = run.settings, run.heatmaps.preset
    if not settings.model:
        raise InvalidValueError("The pipeline was built in Python, so no name of a model is known.")
    if not is_known_by_name(preset, explained=settings.explained is not None):
        raise InvalidValueError(f"The preset {preset.name!r} was made in Python.")
    ours = {"latents"} if settings.explained else set()
    left_out = sorted({*(settings.options_left_out or ())} - ours)
    if left_out and not settings.edited:
        raise InvalidValueError(f"Options were given that only Python can: {', '.join(left_out)}.")


def is_known_by_name(preset: Preset, *, explained: bool) -> bool:
    """Whether a run's preset is that of the table, apart from refinement: a name makes it again."""
    table = PRESETS.get(preset.name)
    if table and explained:  # it reads the timesteps that were chosen
        table = replace(table, steps=preset.steps)
    return table == replace(preset, refine=None)


def _generate(run: ImageRun) -> Iterator[str]:
    yield from ("--seed", str(_entry(run.settings, "seed")))
    yield from _given(_entry(run.settings, "options"))
    captured = _entry(run.settings, "captured")
    kept = [name for name in ("steps", "heads") if getattr(captured, name) == "all"]
    if kept := [name for name in kept if name == "steps" or not run.heatmaps.preset.each_head]:
        yield from ("--keep", ",".join(kept))
    for name, flag in (("negative", "--negative-maps"), ("causal", "--causal")):
        if name in run.more:
            yield flag


def _given(options: Mapping[str, Any]) -> Iterator[str]:
    given = {name: value for name, value in options.items() if value is not None}
    for name, option in PIPELINE.items():
        if name in given:
            yield from (f"--{option}", str(given.pop(name)))
    for name in sorted(given.keys() - {"num_images_per_prompt"}):
        yield from ("--set", f"{name}={json.dumps(given[name], ensure_ascii=False)}")


def _maps(run: ImageRun) -> Iterator[str]:
    preset = run.heatmaps.preset
    if preset.name != "default":
        yield from ("--preset", preset.name)
    if preset.refine:
        yield from ("--refine", preset.refine)
    if run.settings.asked is not None:
        yield from ("--ask", run.settings.asked)


def _explain(settings: RunSettings, explained: Explained) -> Iterator[str]:
    if explained.way == "inversion":
        steps = _entry(settings, "options").get("num_inference_steps")
        if steps is None:
            raise InvalidValueError("The run does not say its num_inference_steps.")
        yield from ("--invert", "--steps", str(steps))
    else:
        yield from ("--seed", str(_entry(settings, "seed")))
        yield from ("--timesteps", ",".join(map(str, explained.timesteps)))


def _edit(settings: RunSettings, edited: Edited) -> Iterator[str]:
    if edited.reconstruction_psnr is not None:
        raise InvalidValueError("The picture was edited from one that the run does not hold.")
    parts = {"--cross": edited.cross_replace_steps, "--self": edited.self_replace_steps}
    if not all(isinstance(part, (int, float)) for part in parts.values()):
        raise InvalidValueError("The parts of the run that were taken over were given in Python.")
    yield from ("--seed", str(_entry(settings, "seed")), "--mode", edited.mode)
    for flag, part in parts.items():
        yield from (flag, str(part))
    for word in dict.fromkeys(word for words in edited.blend or () for word in words):
        yield from ("--blend", word)
    for word, factor in edited.weights.items():
        yield from ("--weight", f"{word}={factor}")
    yield from _given(_entry(settings, "options"))
