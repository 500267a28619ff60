"""Runs that the tabs of the live page make of the values of their fields."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..edit.editing import edit as edit_image
from ..edit.guiding import guide
from ..edit.losses import inside
from ..edit.missing import guide_missing
from ..errors import InvalidValueError, OptionError, refuse
from ..files.images import read_image
from ..models.facts import default_size
from ..runs import explaining, generation
from ..runs.info import RunSettings
from ..runs.run import Run

SettingsOf = Callable[[str], RunSettings]  # of a kept run's key
SEEDS = 4  # that are tried


def draw(pipe: Any, asked: dict[str, Any]) -> Run:
    watch = {"steps": "all"} if asked.pop("each_step") else {}
    watch |= {"branch": "both"} if asked.pop("negative_maps") else {}
    if (asked["height"], asked["width"]) == default_size(pipe):
        # A size that is the model's own is not passed: run.json records what was asked.
        asked |= {"height": None, "width": None}
    return generation.generate(pipe, capture_options=watch, **_given(asked))


def explain(pipe: Any, asked: dict[str, Any]) -> Run:
    photo = asked.pop("image")
    with Path(photo["path"]).open("rb") as file:  # uploaded: gradio refuses every other path
        image = read_image(file, str(photo.get("orig_name") or "The photo"))
    return explaining.explain(pipe, image, **_given(asked))


def edit(pipe: Any, asked: dict[str, Any]) -> Run:
    return edit_image(pipe, **_given(asked))


def swapped(source: str, word: str, other: str) -> str:
    """Return a prompt with another word in a word's place, wherever it stands."""
    return re.sub(rf"(?<!\w){re.escape(word.strip())}(?!\w)", lambda _: other.strip(), source)


def swap(settings_of: SettingsOf, pipe: Any, asked: dict[str, Any]) -> Run:
    """Draw the run that is shown again, and edit it: another word in a word's place."""
    prompt, options = _of_word(settings_of, asked)
    return edit_image(pipe, prompt, swapped(prompt, asked["word"], asked["other"]), **options)


def place(settings_of: SettingsOf, pipe: Any, asked: dict[str, Any]) -> Run:
    """Draw the prompt of the run that is shown with a word in a box."""
    prompt, options = _of_word(settings_of, asked)
    try:
        left, top, right, bottom = map(float, re.split(r"[,\s]+", asked["box"].strip()))
    except ValueError:
        raise refuse("box", asked["box"], "left, top, right and bottom, from 0 to 1") from None
    loss = inside(asked["word"].strip(), (left, top, right, bottom))
    return guide(pipe, prompt, [loss], **options)


def best_of(settings_of: SettingsOf, pipe: Any, asked: dict[str, Any]) -> Run:
    """Draw the prompt of the run that is shown from the best of its seed and the next ones; if it
    was chosen from several, from the best of those after them."""
    prompt, options = _of_shown(settings_of, asked)
    if tried := settings_of(asked["run"]).candidates:
        options["seed"] = max(one.seed for one in tried) + 1
    return generation.generate(pipe, prompt, candidates=SEEDS, **options)


def excite(settings_of: SettingsOf, pipe: Any, asked: dict[str, Any]) -> Run:
    """Draw the run that is shown again, with more attention to the words that it lacks."""
    prompt, options = _of_shown(settings_of, asked)
    return guide_missing(pipe, prompt, **options)


def _of_word(settings_of: SettingsOf, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what :func:`_of_shown` does of a run whose prompt has the word."""
    prompt, options = _of_shown(settings_of, asked)
    word = asked["word"].strip()
    if swapped(prompt, word, "") == prompt:
        raise OptionError("word", word, f"choose a word of {prompt!r}.")
    return prompt, options


def _of_shown(settings_of: SettingsOf, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the prompt of the run that is shown, and how it was drawn."""
    settings = settings_of(asked["run"])
    if settings.explained:
        raise InvalidValueError("This is a photo, which no seed draws again. Draw an image first.")
    return settings.prompt, {"seed": settings.seed, **(settings.options or {})}


def _given(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that have a value; an empty text counts as no value."""
    texts = {name: value.strip() for name, value in asked.items() if isinstance(value, str)}
    found = {**asked, **texts}
    if "refine" in found:
        found["refine"] = "self" if found["refine"] else None
    return {name: value for name, value in found.items() if value not in (None, "")}
