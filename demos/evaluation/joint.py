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
from sdattn.look.other_text import encode_text
from sdattn.maps.from_stores import heatmaps_of
from sdattn.maps.layermaps import LayerMaps, layer_maps
from sdattn.maps.presets import PRESETS, Preset
from sdattn.maps.requirements import columns_around
from sdattn.models.pipeline_call import call_pipeline, images_of
from sdattn.models.reading import read_prompts

from .causes import causes
from .images import Asked, Sample, batches, said, samples, seeds_of
from .records import SPLITS, Records, read_image, split_of
from .seeing import Scene, Subject
from .tables import NAMES, causes_table, measures_of, table, without_table
from .variants import DEFAULT

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
    """Return the objects of a scene in another wording than its prompt, without their places."""
    words = scene.words("")
    owners = range(len(scene.objects))
    own = [[word.text for word in words if word.owner == owner] for owner in owners]
    return " and ".join(f"a {' '.join(texts)}" for texts in own)


def drawn(subject: Subject, asked: Sequence[Asked], seed: int) -> Iterator[Sample]:
    """Yield the model's images with every variant's heatmaps."""
    pipe, settings = subject.pipe, subject.settings
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
        maps = [{name: found[i] for name, found in by_name.items()} for i in range(len(part))]
        yield from samples(subject, part, seeds, images, maps)


CAUSES = (DEFAULT, "columns", "sum", "rescaled", "output, 10")  # compared with causes


def caused(subject: Subject, seed: int, asked: Sequence[Asked]) -> Records:
    """Return how far the maps of some scenes agree with what knockouts change."""
    records = Records()
    images = (
        replace(one, heatmaps={name: one.heatmaps[name] for name in CAUSES})
        for one in drawn(subject, asked, seed)
    )
    causes(subject, images, records)
    return records


def measured(subject: Subject, seed: int, asked: Sequence[Asked]) -> Records:
    """Return the records of some scenes with one seed."""
    records = Records()
    for image in drawn(subject, asked, seed):
        read_image(image, split_of(image.number), records)
    return records


def tables(figures: Mapping[str, Any]) -> str:
    """The figures in Markdown."""
    parts = []
    for split in [one for one in SPLITS if one in figures]:
        right = figures[split]["image"][DEFAULT]["right"]
        parts.append(f"**Scenes {split}**: {right[0]:.1%} of the images are right.\n")
        for kind in ("noun", "colour"):
            by_variant = figures[split].get(kind, {})
            parts.append(f"{NAMES[kind]}:\n")
            parts.append(table(by_variant, by_variant, measures_of(kind)))
    if agreement := figures.get("causes", {}).get("noun"):
        parts.append("**Heatmaps against causes**, nouns:\n")
        parts.append(causes_table(agreement))
        parts.append("**What stays without a word**\n")
        parts.append(without_table(figures))
    return "\n".join(parts)
