"""Train the segmenter that says what is where in images of sprites, and measure it.

It learns from scenes that are composed as it goes, of both parts, since it has to know a green car
when a model that never saw one draws it. Some are blurred, dimmed or noisy, as generated images
are. It is measured on other scenes, of the part that is held out from models. With
``--unseen-hands`` it never sees one drawing of each noun, and is measured on scenes of just those:
this says how far it goes by what a thing is, not by which drawing it knows.

    python -m demos.training.train_sprite_checker --work build/checker
    python -m demos.training.train_sprite_checker --work build/checker-unseen --unseen-hands
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from ..scenes.emoji import Scene, random_scene
from ..scenes.sprites import colourable, hands, nouns
from ..sprite_checker import (
    Segmenter,
    asked_for,
    confusion,
    find_things,
    labels,
    overlap,
    true_labels,
)
from .autoencoder import as_pixels
from .fit import Fit, note, rank, world
from .sprite_parts import FAST_HALF

HELD_OUT = 0.3  # part of its scenes that are of combinations which models never see
GROUND = 0.3  # weight of a background cell beside an object's in the loss
WORST = 8  # nouns that are named in the report


def kept_hand(noun: str) -> str:
    """Return the hand whose drawing of a noun is kept for the test of unseen drawings: one that can
    have another colour, if any of the noun's can, and not the same for all nouns."""
    known = colourable(noun) or tuple(hands()[noun])
    return known[nouns().index(noun) % len(known)]


def with_hands(rng: np.random.Generator, scene: Scene, unseen: bool) -> Scene:
    """Return the scene in the kept hands, or in others where it has a kept one."""

    def hand(noun: str, own: str, coloured: bool) -> str:
        if unseen:
            return kept_hand(noun)
        known = colourable(noun) if coloured else tuple(hands()[noun])
        others = [one for one in known if one != kept_hand(noun)]
        return own if own in others else others[int(rng.integers(len(others)))]

    things = (
        replace(thing, hand=hand(thing.noun, thing.hand, thing.colour is not None))
        for thing in scene.objects
    )
    return replace(scene, objects=tuple(things))


def worn(rng: np.random.Generator, pixels: Tensor) -> Tensor:
    """Return images as a small model draws them: softer, noisier, lighter or darker, by chance."""
    side = pixels.shape[-1]
    if rng.random() < 0.5:
        small = F.interpolate(pixels, size=int(rng.integers(side // 3, side)), mode="area")
        pixels = F.interpolate(small, size=side, mode="bilinear")
    shape = (len(pixels), 3, 1, 1)
    light = torch.from_numpy(rng.normal(0, 0.06, shape)).float()
    gain = torch.from_numpy(rng.normal(1, 0.06, shape)).float()
    noise = rng.uniform(0, 0.1) * torch.randn_like(pixels)
    return (gain * pixels + light + noise).clamp(-1, 1)


def train(
    work: Path, steps: int, seed: int, unseen_hands: bool, device: torch.device, batch: int = 32
) -> Segmenter:
    """Return a segmenter, trained or taken up again from ``work``."""
    torch.manual_seed(seed)
    segmenter = Segmenter().to(device, memory_format=torch.channels_last)
    weight = torch.ones(len(nouns()) + 1, device=device)
    weight[-1] = GROUND
    halved = device.type == "cuda" or FAST_HALF

    def sample(step: int) -> tuple[Tensor, ...]:
        rng = np.random.default_rng((seed, step, rank()))
        torch.manual_seed(int(rng.integers(2**62)))
        parts = rng.random(batch // world()) < HELD_OUT
        scenes = [random_scene(rng, held_out=bool(part)) for part in parts]
        if unseen_hands:
            scenes = [with_hands(rng, scene, unseen=False) for scene in scenes]
        drawn = np.stack([scene.draw() for scene in scenes])
        pixels = as_pixels(torch.from_numpy(drawn).permute(0, 3, 1, 2))
        truth = torch.from_numpy(np.stack([true_labels(scene) for scene in scenes]))
        return worn(rng, pixels).contiguous(memory_format=torch.channels_last), truth

    def loss(seen: Tensor, truth: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=halved):
            scores = segmenter(seen)
        return F.cross_entropy(scores.float(), truth, weight)

    def watch(step: int) -> None:
        told = measure(segmenter.eval(), 60, seed=99, unseen_hands=False)
        segmenter.train()
        note(work, "checker", step, overlap=told["overlap"], objects=told["objects"])

    Fit(
        "checker",
        {"checker": segmenter},
        (2e-3,),
        loss,
        steps,
        0.4,
        {},
        watch,
        sample=sample,
        device=device,
    ).run(work)
    return segmenter.eval()


def measure(segmenter: Segmenter, count: int, seed: int, unseen_hands: bool) -> dict[str, object]:
    """Return how well it reads drawn scenes of the held-out part.

    ``overlap`` is the mean IoU of nouns; ``objects``, ``relation`` and ``colours`` are parts of the
    scenes, of those with a relation, and of the coloured objects, that it reads as they are;
    ``worst`` has the nouns of the least IoU, ``taken_for`` the nouns most often confused.
    """
    rng = np.random.default_rng(seed)
    scenes = [random_scene(rng, held_out=True) for _ in range(count)]
    if unseen_hands:
        scenes = [with_hands(rng, scene, unseen=True) for scene in scenes]
    images = [Image.fromarray(scene.draw()) for scene in scenes]
    truth = np.stack([true_labels(scene) for scene in scenes])
    counts = confusion(truth, labels(segmenter, images))
    each = overlap(counts)[:-1]
    verdicts = [asked_for(*one) for one in zip(scenes, find_things(segmenter, images), strict=True)]
    relations = [one.relation for one in verdicts if one.relation is not None]
    colours = [flag for one in verdicts for flag in one.colours]
    wrong = counts[:-1, :-1] * (1 - np.eye(len(nouns()), dtype=int))
    pairs = [np.unravel_index(at, wrong.shape) for at in np.argsort(-wrong, axis=None)[:WORST]]
    return {
        "overlap": float(each.mean()),
        "objects": float(np.mean([one.objects for one in verdicts])),
        "relation": float(np.mean(relations)) if relations else None,
        "colours": float(np.mean(colours)) if colours else None,
        "worst": {nouns()[at]: round(float(each[at]), 3) for at in np.argsort(each)[:WORST]},
        "taken_for": {
            f"{nouns()[true]} for {nouns()[seen]}": round(
                float(wrong[true, seen] / counts[true].sum()), 3
            )
            for true, seen in pairs
        },
    }


def main() -> None:
    """Read the options, train and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("build/checker"))
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32, help="scenes of a step")
    parser.add_argument("--scenes", type=int, default=500, help="scenes that it is measured on")
    parser.add_argument(
        "--unseen-hands", action="store_true", help="keep one drawing of each noun for the test"
    )
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    segmenter = train(
        args.work, args.steps, args.seed, args.unseen_hands, args.device, batch=args.batch
    )
    weights = {name: one.cpu().contiguous() for name, one in segmenter.state_dict().items()}
    save_file(weights, args.work / "checker.safetensors")
    told = measure(segmenter, args.scenes, seed=2024, unseen_hands=args.unseen_hands)
    (args.work / "checker.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
