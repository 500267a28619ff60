"""Runs that the tabs of the live page make of the values of their fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..edit.editing import edit as edit_image
from ..files.images import read_image
from ..models.facts import default_size
from ..runs import explaining, generation
from ..runs.run import Run


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


def _given(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that have a value; an empty text counts as no value."""
    texts = {name: value.strip() for name, value in asked.items() if isinstance(value, str)}
    found = {**asked, **texts}
    if "refine" in found:
        found["refine"] = "self" if found["refine"] else None
    return {name: value for name, value in found.items() if value not in (None, "")}
