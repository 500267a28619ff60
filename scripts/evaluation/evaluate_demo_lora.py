"""How often the noun that ``demo-lora`` teaches appears in the demo model's images, with the LoRA
and without, and how often the nouns that it knew still do.

Prompts are of combinations that no training saw, on a gray background, an image of each for each
seed. What is not gray is cut out and named after the nearest of all drawings, as they are, mirrored
and in all colours; how well that reads drawn scenes is printed first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from sdattn import load_pipeline
from sdattn.maps.masks import components
from sdattn.models.demos import DEMO_LORA, demo_settings
from sdattn.models.pipeline_call import call_pipeline, images_of

from ..scenes.emoji import Scene, random_scene
from ..scenes.grounds import PLAIN
from ..scenes.sprites import COLOURS, TAUGHT, colourable, coloured, hands
from ..training.train_demo_lora import taught_scene

BATCH = 10
GRAY = PLAIN["gray"]
FAR = 40  # from gray, of 255, in the channel that is farthest
LEAST = 0.01  # part of the image that counts as an object
SIDE = 24  # of a cut-out in pixels, when it is compared

Pixels = NDArray[np.uint8]


@cache
def drawings() -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Return the noun of each drawing, and the drawings on gray, float64 [n, SIDE, SIDE, 3]."""
    names, found = [], []
    for noun, by_hand in hands().items():
        for hand in by_hand:
            for colour in (None, *(COLOURS if hand in colourable(noun) else ())):
                drawn = Image.fromarray(coloured(noun, hand, colour))
                ground = Image.new("RGBA", drawn.size, (*GRAY, 255))
                small = np.asarray(_small(Image.alpha_composite(ground, drawn)), dtype=np.float64)
                names += [noun, noun]
                found += [small, small[:, ::-1]]
    return tuple(names), np.stack(found)


def seen(image: Image.Image) -> list[str]:
    """Return the nouns of the objects in an image with a gray background."""
    pixels = np.asarray(image.convert("RGB"))
    drawn = abs(pixels.astype(int) - GRAY).max(-1) > FAR
    patches = components(torch.from_numpy(drawn)).numpy()
    numbers = range(1, patches.max() + 1)
    cut = (patches == number for number in numbers if (patches == number).mean() >= LEAST)
    return sorted(_name(pixels, patch) for patch in cut)


def _name(pixels: Pixels, patch: NDArray[np.bool_]) -> str:
    """Return the noun of the drawing that is nearest to a patch of an image, cut to a square."""
    rows, columns = (np.flatnonzero(patch.any(axis)) for axis in (1, 0))
    box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    own = np.where(patch[box][..., None], pixels[box], np.array(GRAY, dtype=np.uint8))
    height, width, _ = own.shape
    square = Image.new("RGB", (max(height, width),) * 2, GRAY)
    square.paste(Image.fromarray(own), ((square.width - width) // 2, (square.width - height) // 2))
    names, known = drawings()
    unlike = (known - np.asarray(_small(square))) ** 2
    return names[int(unlike.mean((1, 2, 3)).argmin())]


def _small(image: Image.Image) -> Image.Image:
    return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)


def figures_of(scenes: list[Scene], images: list[Image.Image], word: str) -> dict[str, float]:
    """Return shares of images: with the word's object, and with all objects that were asked for
    and no others."""
    rows = []
    for scene, image in zip(scenes, images, strict=True):
        found = seen(image)
        rows.append((word in found, found == sorted(thing.noun for thing in scene.objects)))
    return dict(zip((f"a {word}", "all objects"), np.mean(rows, axis=0).tolist(), strict=True))


def drawn(pipe: Any, prompts: list[str], seed: int) -> list[Image.Image]:
    """Return an image of each prompt; that of number ``i`` from seed ``seed * 100000 + i``."""
    images = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        seeds = [seed * 100_000 + start + i for i in range(len(part))]
        images += images_of(call_pipeline(pipe, part, seeds, demo_settings(pipe)))
    return images


def on_gray(make: Callable[[], Scene], count: int) -> list[Scene]:
    """Return scenes on a gray background."""
    return [replace(make(), background="gray") for _ in range(count)]


def main() -> None:
    """Read the options, draw, and print a line for each model and seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lora", default=str(DEMO_LORA), help="PATH or PATH:SCALE")
    parser.add_argument("--word", default=TAUGHT[0], choices=TAUGHT)
    parser.add_argument("--prompts", type=int, default=40, help="with the word; as many without")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--sheet", type=Path, help="an image file: a row a model and seed")
    parser.add_argument("--out", type=Path, help="a JSON file with the figures")
    args = parser.parse_args()
    rng = np.random.default_rng(2024)
    new = on_gray(lambda: taught_scene(rng, args.word, held_out=True), args.prompts)
    old = on_gray(lambda: random_scene(rng, held_out=True), args.prompts)
    said = [one.prompts()[-1] for one in (*new, *old)]  # which names the background
    figures: dict[str, Any] = {}
    for kind, scenes in (("new word", new), ("known words", old)):
        images = [Image.fromarray(scene.draw()) for scene in scenes]
        figures[f"drawn, {kind}"] = figures_of(scenes, images, args.word)
    rows = []
    for name, lora in (("without", None), ("with", args.lora)):
        pipe = load_pipeline("demo", device=args.device, dtype=torch.float32, lora=lora)
        pipe.set_progress_bar_config(disable=True)
        for seed in args.seeds:
            images = drawn(pipe, said, seed)
            for kind, scenes, first in (("new word", new, 0), ("known words", old, len(new))):
                theirs = images[first : first + len(scenes)]
                figures[f"{name}, seed {seed}, {kind}"] = figures_of(scenes, theirs, args.word)
            rows.append(np.concatenate([np.asarray(one) for one in images[:8]], axis=1))
    for name, shares in figures.items():
        print(f"{name}: " + ", ".join(f"{what} {share:.1%}" for what, share in shares.items()))
    if args.sheet:
        Image.fromarray(np.concatenate(rows)).save(args.sheet)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
