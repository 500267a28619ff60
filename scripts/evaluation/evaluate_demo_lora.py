"""How often the word that ``demo-lora`` teaches lands in the demo model's images, with the LoRA
and without, and how often the words that it knew still do.

Prompts are of combinations that no training saw, an image of each for each seed. Images are read
by ``scene_checker`` with the new colour in its palette, which lies between orange and yellow.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sdattn import load_pipeline
from sdattn.models.demos import DEMO_LORA, demo_settings
from sdattn.models.pipeline_call import call_pipeline, images_of

from ..scene_checker import find_objects
from ..scenes.shapes import COLOURS, TAUGHT_COLOURS, Scene, random_scene
from ..training.train_demo_lora import taught_scene

BATCH = 10
NEAR = {"gold": ("gold", "orange", "yellow")}  # a shade on either side
PALETTE = {**COLOURS, **TAUGHT_COLOURS}


def seen(image: Image.Image) -> list[tuple[str, str]]:
    """The colour and the shape of each object in an image."""
    return sorted((one.colour, one.shape) for one in find_objects(image, colours=PALETTE))


def wanted(scene: Scene) -> list[tuple[str, str]]:
    """The same of a scene."""
    return sorted((one.colour, one.shape) for one in scene.objects)


def figures_of(scenes: list[Scene], images: list[Image.Image], word: str) -> dict[str, float]:
    """Shares of images: with the word's colour on the object that has it in the prompt, with that
    or a colour next to it there, and with all objects that were asked for and no others."""
    rows = []
    for scene, image in zip(scenes, images, strict=True):
        found, asked = seen(image), wanted(scene)
        shapes = [shape for colour, shape in asked if colour == word]
        near = any(colour in NEAR[word] and shape in shapes for colour, shape in found)
        exact = any((word, shape) in found for shape in shapes)
        rows.append((exact, near, found == asked))
    names = ("its colour", "or a neighbour's", "all objects")
    return dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))


def drawn(pipe: Any, prompts: list[str], seed: int) -> list[Image.Image]:
    """An image of each prompt; that of number ``i`` from seed ``seed * 100000 + i``."""
    images = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        seeds = [seed * 100_000 + start + i for i in range(len(part))]
        images += images_of(call_pipeline(pipe, part, seeds, demo_settings(pipe)))
    return images


def unseen(rng: np.random.Generator, word: str, count: int) -> list[Scene]:
    """Scenes with the word that no training saw, whose other objects have no colour next to it."""
    found: list[Scene] = []
    while len(found) < count:
        scene = taught_scene(rng, word, held_out=True)
        if sum(one.colour in NEAR[word] for one in scene.objects) == 1:
            found.append(scene)
    return found


def checker_accuracy(word: str, count: int = 200) -> float:
    """Share of drawn scenes with the word that the checker reads without any mistake."""
    rng = np.random.default_rng(0)
    scenes = [taught_scene(rng, word) for _ in range(count)]
    return float(np.mean([seen(Image.fromarray(one.draw(128))) == wanted(one) for one in scenes]))


def main() -> None:
    """Read the options, draw, and print a line for each model and seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lora", default=str(DEMO_LORA), help="PATH or PATH:SCALE")
    parser.add_argument("--word", default="gold", choices=TAUGHT_COLOURS)
    parser.add_argument("--prompts", type=int, default=40, help="with the word; as many without")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sheet", type=Path, help="an image file: a row a model and seed")
    parser.add_argument("--out", type=Path, help="a JSON file with the figures")
    args = parser.parse_args()
    rng = np.random.default_rng(2024)
    new = unseen(rng, args.word, args.prompts)
    old = [random_scene(rng, held_out=True) for _ in range(args.prompts)]
    said = [one.caption(rng) for one in (*new, *old)]
    accuracy = checker_accuracy(args.word)
    print(f"the checker reads {accuracy:.1%} of drawn scenes with {args.word}", flush=True)
    figures: dict[str, Any] = {"checker": accuracy}
    rows = []
    for name, lora in (("without", None), ("with", args.lora)):
        pipe = load_pipeline("demo", device="cpu", lora=lora)
        pipe.set_progress_bar_config(disable=True)
        for seed in args.seeds:
            images = drawn(pipe, said, seed)
            of_new = figures_of(new, images[: len(new)], args.word)
            of_old = figures_of(old, images[len(new) :], args.word)
            figures[f"{name}, seed {seed}"] = {"new word": of_new, "known words": of_old}
            for kind, row in (("new word", of_new), ("known words", of_old)):
                cells = ", ".join(f"{what} {share:.1%}" for what, share in row.items())
                print(f"{name}, seed {seed}, {kind}: {cells}", flush=True)
            rows.append(np.concatenate([np.asarray(one) for one in images[:8]], axis=1))
    if args.sheet:
        Image.fromarray(np.concatenate(rows)).save(args.sheet)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
