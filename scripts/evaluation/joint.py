"""Maps of joint attention against known objects: the part of ``evaluate_heatmaps`` for an MM-DiT.

Text columns as they are and spread, by block and by step, the presets of joint attention, and
another text than the prompt, "a red circle and a blue square". Masks are found by colour in what
the model draws, and images without the objects that were asked for are left out. The first half
of the scenes (even numbers) is for choosing, the other is for what is reported of the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

import sdattn
from sdattn.hooks.other_text import encode_text
from sdattn.maps.from_stores import heatmaps_of
from sdattn.maps.layermaps import LayerMaps, layer_maps
from sdattn.maps.presets import PRESETS, Preset
from sdattn.maps.requirements import columns_around
from sdattn.models.pipeline_call import call_pipeline, images_of
from sdattn.models.reading import read_prompts

from ..scenes.shapes import Scene
from .causes import correlations
from .images import Asked, Sample, batches, masks_in, own_settings, said, seeds_of
from .records import Records, read_image
from .tables import MEASURES, OWN, causes_table, table
from .variants import DEFAULT

SPLITS = {"for choosing": 0, "reported": 1}
FACTORS = (3.0, 10.0, 30.0)  # of the softmax over words, in output space
POWERS = (1.0, 3.0, 8.0)  # beside that of the default
QUARTERS = {f"steps {a}/4 to {a + 1}/4": (a / 4, (a + 1) / 4) for a in range(4)}
OWN_WAY, COLUMNS = PRESETS["joint"], PRESETS["columns"]
SPREAD = replace(COLUMNS, refine="self")
Variant = tuple[str, Preset, str | None]  # the store that is read, how, and which block alone


def variants(blocks: Sequence[str]) -> dict[str, Variant]:
    """What is compared, by name."""
    found: dict[str, Variant] = {DEFAULT: ("default", OWN_WAY, None)}
    for power in POWERS:
        way = replace(OWN_WAY, sharpen=power)
        found[f"default, to the power of {power:g}"] = ("default", way, None)
    for store, way, ending in (("plain", COLUMNS, ""), ("spread", SPREAD, ", spread")):
        found["columns" + ending] = (store, way, None)
        parts = {"all steps": "mean", **QUARTERS}
        found |= {
            name + ending: (store, replace(way, steps=part), None) for name, part in parts.items()
        }
        found |= {f"block {i}{ending}": (store, way, name) for i, name in enumerate(blocks)}
    found |= {name: ("plain", PRESETS[name], None) for name in ("sum", "seg4diff", "rescaled")}
    for factor in FACTORS:
        way = replace(PRESETS["output"], contrast=factor)
        found |= {f"output, {factor:g}": ("output", way, None)}
    found |= {"asked": ("asked", OWN_WAY, None), "asked, columns": ("asked plain", COLUMNS, None)}
    return found


def other_text(scene: Scene) -> str:
    """The objects of a scene, told in another way than its prompt, without where they are."""
    return " and ".join(f"a {one.colour} {one.shape}" for one in scene.objects)


def drawn(
    pipe: Any, asked: Sequence[Asked], seed: int, settings: Mapping[str, Any]
) -> Iterator[Sample]:
    """The model's images with every variant's heatmaps."""
    for part in batches(asked):
        prompts, seeds = said(part), seeds_of(part, seed)
        texts = [other_text(scene) for _, scene, _ in part]
        read, others = (read_prompts(pipe, some, **settings) for some in (prompts, texts))
        spread: dict[str, Any] = {"tokens": columns_around(*read), "refine": "self"}
        states = torch.cat([encode_text(pipe, text, settings) for text in texts])
        asked_spread = {"tokens": columns_around(*others), "refine": "self"}
        own: dict[str, Any] = {"steps": OWN_WAY.steps, "depth": OWN_WAY.depth}
        options = {
            "default": {**spread, **own},
            "plain": {"steps": "all"},
            "spread": {**spread, "steps": "all"},
            "output": {"space": "output"},
            "asked": {"text_states": states, **asked_spread, **own},
            "asked plain": {"text_states": states, "steps": COLUMNS.steps},
        }
        with ExitStack() as captures:
            stores = {
                name: captures.enter_context(sdattn.capture(pipe, **one))
                for name, one in options.items()
            }
            images = images_of(call_pipeline(pipe, prompts, seeds, settings))
        plain = stores["plain"]
        by_name: dict[str, Any] = {}
        layers: dict[Any, LayerMaps] = {}  # variants differ in little of what they read
        for name, (of, preset, block) in variants([layer.name for layer in plain.layers]).items():
            key = (of, preset.steps)
            if key not in layers:
                layers[key] = layer_maps(stores[of], preset)
            held = layers[key]
            if block is not None:
                held = replace(held, layers={block: held.layers[block]})
            by_name[name] = heatmaps_of(stores[of], held, preset, others if "asked" in of else read)
        for i, (one, at, image) in enumerate(zip(part, seeds, images, strict=True)):
            maps = {name: found[i] for name, found in by_name.items()}
            yield Sample(*one, at, image, masks_in(one[1], image), maps)


CAUSES = (DEFAULT, "columns", "sum", "rescaled", "output, 10")  # compared with causes


def caused(pipe: Any, model: str, seed: int, asked: Sequence[Asked]) -> Records:
    """How far the maps of some scenes agree with what knockouts change."""
    records = Records()
    images = (
        replace(one, heatmaps={name: one.heatmaps[name] for name in CAUSES})
        for one in drawn(pipe, asked, seed, own_settings(model))
    )
    correlations(pipe, images, records)
    return records


def measured(pipe: Any, model: str, seed: int, asked: Sequence[Asked]) -> Records:
    """The records of some scenes with one seed."""
    records = Records()
    for image in drawn(pipe, asked, seed, own_settings(model)):
        split = [*SPLITS][image.number % 2]
        read_image(image, split, records, both=image.heatmaps)
    return records


def tables(figures: Mapping[str, Any]) -> str:
    """The figures in Markdown."""
    parts = []
    for split in [one for one in SPLITS if one in figures]:
        right = figures[split]["image"][DEFAULT]["right"]
        parts.append(f"**Scenes {split}**: {right[0]:.1%} of the images are right.\n")
        for kind in ("shape", "colour"):
            by_variant = figures[split].get(kind, {})
            measures = {**MEASURES, "own": OWN}
            # where no image has two objects, no word has another's to stay away from
            known = {name: told for name, told in measures.items() if _all_have(name, by_variant)}
            parts.append(f"{kind.capitalize()} words:\n")
            parts.append(table(by_variant, by_variant, known))
    if agreement := figures.get("causes", {}).get("shape"):
        parts.append("**Heatmaps against causes**, shape words:\n")
        parts.append(causes_table(agreement))
    return "\n".join(parts)


def _all_have(measure: str, by_variant: Mapping[str, Any]) -> bool:
    return all(measure in entry for entry in by_variant.values())
