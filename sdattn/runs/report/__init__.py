"""`report.html`, the page of a run: one file that opens anywhere and loads nothing.

report(run)                 the page's bytes
gallery                     the page of a batch run's items
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from PIL import Image

from ...maps import render
from ...maps.heatmap import Heatmap
from ...maps.presets import Preset
from ...models.demo_words import unlearnt
from ...prompts.tokens import Prompt
from ..imagerun import ImageRun, plain, step_names
from .command import command_of
from .maps import PageMaps, page_maps
from .pages import page

COLORMAPS = (render.COLORMAP, "viridis", "cividis")  # all readable to colour-blind people
# Okabe and Ito 2008, "Color Universal Design": told apart by colour-blind people too
PIN_COLORS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
_TITLES = {
    "negative": "Negative prompt",
    "asked": "Asked about",
    "causal": "What changes without",
    "special": "Other tokens",
    "phrases": "Phrases",
}
_SHORT = {
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "negative_prompt": "negative prompt",
}
_LARGEST = 420_000  # bytes of a picture inside the page
_SIDES = (1536, 768, 384)  # pixels of its longer side at most, the first that does it
_KINDS: list[tuple[str, dict[str, int]]] = [
    ("png", {}),
    *(("webp", {"quality": quality, "method": 2}) for quality in (90, 75, 50, 25)),
]
_MOST_SPECIAL = 24  # columns of image prompts can be many
_MOST_CUT_OFF = 100  # words behind the last that was seen; the others are their text and a number


def report(run: ImageRun, phrases: Sequence[Heatmap] = ()) -> bytes:
    """The page of one image's run.

    Words of the prompt show their maps, pointing at the picture tells the words that act there,
    and what the run kept of layers and steps can be chosen. Under 3 MB, whatever the run: maps are
    in 256 shades of their range, coarser where there are very many, and a picture of more than
    0.4 MB or 1536 pixels is shown as WebP or smaller.

    Args:
        run: of one image.
        phrases: further maps of the prompt to offer, ``heatmaps.find("red circle")`` say.

    Returns:
        UTF-8 HTML. The same run gives the same bytes.

    Raises:
        ValueError: a map holds values that are not finite.
    """
    texts = _texts(run, phrases)
    maps = page_maps(run, [heatmap for _, _, held in texts for heatmap in held])
    words = [heatmap.label for heatmap in run.heatmaps.occurrences()]
    data = {
        "words": words,
        "texts": [
            {"name": n, "words": [heatmap.label for heatmap in held]} for n, _, held in texts
        ],
        "groups": maps.groups,
        "steps": _step_names(run, maps),
        "maps": maps.maps,
        "data": maps.data,
        "size": run.image.size,
        "means": _means(run),
        "units": _units(run.heatmaps.preset),
        "rest": _sums_to_one(run),
        "colormaps": _colours(),
        "pins": PIN_COLORS,
    }
    return page(
        "run",
        run=run,
        data=data,
        picture=_picture(run.image),
        parts=_parts(run),
        texts=[
            (n, _TITLES[n], text, [heatmap.label for heatmap in held]) for n, text, held in texts
        ],
        unlearnt=_unlearnt(run),
        cut_off=[word.text for word in run.heatmaps.prompt.truncated],
        most_cut_off=_MOST_CUT_OFF,
        tokens=_token_rows(run.heatmaps.prompt, run.heatmaps.columns),
        settings=_settings(run),
        versions=run.settings.versions or {},
        command=_command(run),
        maps=maps,
        words_held=len(words),
    )


def _units(preset: Preset) -> dict[str, str]:
    """What values are: of heatmaps, of those of one step, of groups of layers, of knockouts."""
    return {
        "heatmap": preset.unit,
        "step": replace(preset, steps="mean").unit,
        "group": plain(preset).unit,
        "causal": "mean change of colour",
    }


def _unlearnt(run: ImageRun) -> str:
    """What is to be said of words that the demo model never learnt."""
    if run.settings.model != "demo":
        return ""
    return unlearnt(word.text for word in run.heatmaps.prompt.words)


def _texts(run: ImageRun, phrases: Sequence[Heatmap]) -> list[tuple[str, str, list[Heatmap]]]:
    """Maps beside those of the prompt's words: name, text, maps."""
    heatmaps = run.heatmaps
    names = dict.fromkeys(token.special for token in heatmaps.prompt.tokens if token.special)
    held = set(heatmaps.columns)
    special = []
    for name in list(names)[:_MOST_SPECIAL]:
        columns = heatmaps.prompt.find(name)[0]
        if held.issuperset(columns):
            special.append(heatmaps[name])
    more = [(name, text, list(maps)) for name, (text, maps) in run.more.items()]
    found = [("phrases", "", list(phrases)), *more, ("special", "", special)]
    return [entry for entry in found if entry[2]]


def _parts(run: ImageRun) -> list[tuple[str, int | None, bool]]:
    """The prompt's text in pieces: the text, the number of the word whose map there is, and
    whether it was cut off."""
    prompt, held = run.heatmaps.prompt, set(run.heatmaps.columns)
    parts: list[tuple[str, int | None, bool]] = []
    at = number = 0
    seen = max((i for i, word in enumerate(prompt.words) if word.columns), default=-1) + 1
    for word in prompt.words[: seen + _MOST_CUT_OFF]:
        has_map = bool(word.columns) and held.issuperset(word.columns)
        parts.append((prompt.text[at : word.start], None, False))
        text = prompt.text[word.start : word.end]
        parts.append((text, number if has_map else None, not word.columns))
        number += has_map
        at = word.end
    parts.append((prompt.text[at:], None, len(prompt.words) > seen + _MOST_CUT_OFF))
    return [part for part in parts if part[0]]


def _token_rows(prompt: Prompt, held: Sequence[int]) -> list[dict[str, Any]]:
    """A row a token column; padding that follows itself is one row."""
    rows: list[dict[str, Any]] = []
    words = {column: word.text for word in prompt.words for column in word.columns}
    captured = set(held)
    for column, token in enumerate(prompt.tokens):
        last = rows[-1] if rows else None
        if last and token.special and (token.special, token.id) == (last["special"], last["id"]):
            last["last"] = column
            continue
        rows.append(
            {
                "first": column,
                "last": column,
                "text": token.text,
                "id": token.id,
                "special": token.special,
                "word": words.get(column, ""),
                "captured": column in captured,
            }
        )
    return rows


def _settings(run: ImageRun) -> dict[str, str]:
    """What the page tells of how the run was made, name to text."""
    settings, preset = run.settings, run.heatmaps.preset
    found = {
        "seed": settings.seed,
        "model": settings.model,
        "pipeline": settings.pipeline,
        "scheduler": settings.scheduler,
        "size": f"{run.image.width}x{run.image.height} pixels",
        **{_SHORT.get(name, name): value for name, value in (settings.options or {}).items()},
        "preset": preset.name + (", refined" if preset.refine else ""),
        "maps": f"{_means(run)['heatmap']}, {len(run.layers.layers)} layers",
        "device": ", ".join(filter(None, (settings.device, settings.dtype))) or None,
        "item": settings.id,
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _means(run: ImageRun) -> dict[str, str]:
    """What heatmaps and groups of layers are of, where no step is chosen."""
    passes, steps = run.layers.passes, run.heatmaps.preset.steps
    if passes == 1:
        return dict.fromkeys(("heatmap", "group"), "last step" if steps == "last" else "one step")
    mean = f"mean of {passes} steps"
    return {"heatmap": mean.replace("mean", "sum") if steps == "sum" else mean, "group": mean}


def _step_names(run: ImageRun, maps: PageMaps) -> list[str]:
    named = dict(zip(run.details.calls, step_names(run), strict=True))
    return [", ".join(named[call]) for call in maps.calls]


def _sums_to_one(run: ImageRun) -> bool:
    """Whether what the words leave of a cell's attention is that of the other tokens."""
    heatmaps = run.heatmaps
    if len(heatmaps.columns) < len(heatmaps.prompt.tokens):
        return False
    return bool(((heatmaps.maps.sum(-1) - 1).abs() < 0.02).all())


def _command(run: ImageRun) -> Mapping[str, str]:
    try:
        return {"line": command_of(run), "reason": ""}
    except ValueError as error:
        return {"line": "", "reason": str(error)}


def _picture(image: Image.Image) -> str:
    """As a data URI: PNG, or WebP and smaller where that would be large."""
    for side, (kind, options) in product(_SIDES, _KINDS):
        shown, buffer = image.copy(), io.BytesIO()
        shown.thumbnail((side, side))
        shown.save(buffer, kind, **options)
        if buffer.tell() <= _LARGEST:
            break
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@cache
def _colours() -> Mapping[str, str]:
    """256 colours of each colour map, red, green and blue, as base64."""
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]
    tables = {name: render.colorize(ramp, (0.0, 1.0), name) for name in COLORMAPS}
    return {name: base64.b64encode(table.tobytes()).decode() for name, table in tables.items()}
