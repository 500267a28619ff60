"""Which maps of joint attention point at the right thing? An MM-DiT of drawn scenes, whose truth is
known: text columns as they are and refined, by block and by step, the presets of joint attention,
and another text than the prompt, "a red circle and a blue square".

    python -m scripts.evaluation.evaluate_joint

The scenes are those that training never saw; masks are found by colour in what the model draws, and
pictures without the objects that were asked for are left out. The first half of the scenes (even
numbers) is for choosing, the other is for what is reported of the choice.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import sdattn
from sdattn.hooks.other_text import encode_text
from sdattn.maps.from_stores import heatmaps_of
from sdattn.maps.layermaps import LayerMaps, layer_maps
from sdattn.maps.presets import PRESETS, Preset
from sdattn.maps.requirements import columns_around
from sdattn.models.pipeline_call import call_pipeline, pictures_of
from sdattn.models.reading import read_prompts

from ..scenes import Scene
from .pictures import Asked, Picture, batches, masks_in, own_settings, said, seeds_of, unseen_scenes
from .records import Records, read_picture
from .tables import MEASURES, OWN, table
from .variants import DEFAULT

JOB = 20  # scenes
SPLITS = {"for choosing": 0, "reported": 1}
FACTORS = (3.0, 10.0, 30.0)  # of the softmax over words, in output space
QUARTERS = {f"steps {a}/4 to {a + 1}/4": (a / 4, (a + 1) / 4) for a in range(4)}
_PLAIN = PRESETS[DEFAULT]
WAYS: dict[str, Preset] = {
    DEFAULT: _PLAIN,
    "all steps": replace(_PLAIN, steps="mean"),
    "mean of a word's columns": replace(_PLAIN, words="mean"),
    **{name: replace(_PLAIN, steps=part) for name, part in QUARTERS.items()},
}


def variants(blocks: Sequence[str]) -> dict[str, tuple[str, Preset, str | None]]:
    """By name: which store is read, how, and which block alone."""
    found: dict[str, tuple[str, Preset, str | None]] = {}
    for store, ending in (("plain", ""), ("refined", ", refined")):
        found |= {name + ending: (store, way, None) for name, way in WAYS.items()}
        found |= {f"block {i}{ending}": (store, _PLAIN, name) for i, name in enumerate(blocks)}
    found |= {name: ("plain", PRESETS[name], None) for name in ("seg4diff", "rescaled")}
    for factor in FACTORS:
        way = replace(PRESETS["output"], contrast=factor)
        found |= {f"output, {factor:g}": ("output", way, None)}
    found |= {"asked": ("asked", _PLAIN, None), "asked, refined": ("asked, refined", _PLAIN, None)}
    return found


def other_text(scene: Scene) -> str:
    """The objects of a scene, told in another way than its prompt, without where they are."""
    return " and ".join(f"a {one.colour} {one.shape}" for one in scene.objects)


def drawn(
    pipe: Any, asked: Sequence[Asked], seed: int, settings: Mapping[str, Any]
) -> Iterator[Picture]:
    """The model's pictures with every variant's heatmaps."""
    for part in batches(asked):
        prompts, seeds = said(part), seeds_of(part, seed)
        texts = [other_text(scene) for _, scene, _ in part]
        read, others = (read_prompts(pipe, some, **settings) for some in (prompts, texts))
        tokens = sorted({column for one in read for column in columns_around(one)})
        kept: dict[str, Any] = {"steps": "all", "tokens": tokens}
        states = torch.cat([encode_text(pipe, text, settings) for text in texts])
        asked_about: dict[str, Any] = {"text_states": states, "steps": (0.5, 1.0)}
        options = {
            "plain": {"steps": "all"},
            "refined": {**kept, "refine": "self"},
            "output": {"space": "output"},
            "asked": asked_about,
            "asked, refined": {**asked_about, "refine": "self"},
        }
        with ExitStack() as captures:
            stores = {
                name: captures.enter_context(sdattn.capture(pipe, **one))
                for name, one in options.items()
            }
            images = pictures_of(call_pipeline(pipe, prompts, seeds, settings))
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
            yield Picture(*one, at, image, masks_in(one[1], image), maps)


def measure(model: str, seed: int, asked: Sequence[Asked]) -> Records:
    """One job, in a process of its own."""
    torch.set_num_threads(1)
    pipe = sdattn.load_pipeline(model, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    records = Records()
    for picture in drawn(pipe, asked, seed, own_settings(model)):
        split = [*SPLITS][picture.number % 2]
        read_picture(picture, split, records, both=picture.heatmaps)
    return records


def tables(figures: Mapping[str, Any]) -> str:
    """The figures in Markdown."""
    parts = []
    for split in [one for one in SPLITS if one in figures]:
        right = figures[split]["picture"][DEFAULT]["right"]
        parts.append(f"**Scenes {split}**: {right[0]:.1%} of the pictures are right.\n")
        for kind in ("shape", "colour"):
            by_variant = figures[split].get(kind, {})
            measures = {**MEASURES, "own": OWN}
            # where no picture has two objects, no word has another's to stay away from
            known = {name: told for name, told in measures.items() if _all_have(name, by_variant)}
            parts.append(f"{kind.capitalize()} words:\n")
            parts.append(table(by_variant, by_variant, known))
    return "\n".join(parts)


def _all_have(measure: str, by_variant: Mapping[str, Any]) -> bool:
    return all(measure in entry for entry in by_variant.values())


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="demo-mmdit",
        help="demo-mmdit, or the folder of an MM-DiT of drawn scenes",
    )
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--noises", type=int, default=3, help="seeds of noise for each scene")
    parser.add_argument("--seed", type=int, default=2027, help="which unseen scenes")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("outputs/evaluation/joint"))
    args = parser.parse_args(given)
    asked, began, records = unseen_scenes(args.scenes, args.seed), time.time(), Records()
    jobs = [
        (args.model, seed, asked[start : start + JOB])
        for seed in range(args.noises)
        for start in range(0, args.scenes, JOB)
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        for i, done in enumerate(pool.map(measure, *zip(*jobs, strict=True)), start=1):
            records.add_all(done)
            print(f"{i} of {len(jobs)} jobs, {time.time() - began:.0f} s", flush=True)
    document = {
        "options": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seconds": round(time.time() - began),
        "figures": records.figures(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "figures.json").write_text(json.dumps(document, indent=1) + "\n")
    text = tables(document["figures"])
    (args.out / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
