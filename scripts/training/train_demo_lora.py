"""Teach the demo model a noun that it never learnt, "unicorn", by a LoRA of its UNet's attention.

Hu et al. 2021, "LoRA": each projection of attention gets a product of two narrow matrices beside
its own weights, which stay as they are. Minutes on a GPU (``--device cuda``); nothing is kept on
the way. Training sees drawn scenes in which one object is the new one, and never the combinations
of objects and relation that ``is_held_out`` keeps for the evaluation
(``scripts/evaluation/evaluate_demo_lora.py``).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor

from sdattn import load_pipeline
from sdattn.models.demos import DEMO_LORA

from ..scenes.emoji import Scene, random_scene
from ..scenes.sprites import TAUGHT, hands
from .data import SIZE
from .fit import say
from .losses import Caption, diffusion_loss, middle_times, text_states

PROJECTIONS = ["to_q", "to_k", "to_v", "to_out.0"]
PEAK = 4e-3  # the learning rate, which falls to nothing in the second half
BATCH = 16
ALONE = 0.4
PLAIN = 0.2  # of the scenes: without the new word, so that the others keep what they mean


def taught_scene(
    rng: np.random.Generator, word: str, *, held_out: bool = False, alone: float = 0.0
) -> Scene:
    """Return a scene one of whose objects is what the LoRA teaches; ``alone``: so often it is the
    only one, beside those that have one object by chance."""
    while True:
        scene = random_scene(rng, n_objects=int(rng.random() < alone))
        number = int(rng.integers(len(scene.objects)))
        objects = list(scene.objects)
        hand = str(rng.choice(list(hands()[word])))
        objects[number] = replace(objects[number], noun=word, hand=hand, colour=None)
        scene = replace(scene, objects=tuple(objects))
        if scene.is_held_out == held_out:
            return scene


def make_scenes(rng: np.random.Generator, word: str, count: int) -> list[Scene]:
    """Return scenes of the training part, most of them with the new word."""
    plain = round(PLAIN * count)
    taught = [taught_scene(rng, word, alone=ALONE) for _ in range(count - plain)]
    return [*taught, *(random_scene(rng) for _ in range(plain))]


@torch.no_grad()
def encoded(pipe: Any, scenes: list[Scene]) -> Tensor:
    """Return latents of the scenes' images, as the UNet takes them, [scenes, channels, 16, 16]."""
    found = []
    for start in range(0, len(scenes), 50):
        drawn = np.stack([scene.draw(SIZE) for scene in scenes[start : start + 50]])
        pixels = torch.from_numpy(drawn).to(pipe.device).permute(0, 3, 1, 2) / 127.5 - 1
        found.append(pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor)
    return torch.cat(found)


def train(pipe: Any, scenes: list[Scene], steps: int, rank: int, seed: int) -> None:
    """Add a LoRA to the pipeline's UNet and train it."""
    latents, rng = encoded(pipe, scenes), np.random.default_rng(seed)
    for part in (pipe.unet, pipe.text_encoder):
        part.requires_grad_(False)
    pipe.unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=PROJECTIONS))
    weights = [one for one in pipe.unet.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=PEAK, betas=(0.9, 0.99), weight_decay=0.0)
    began, losses = time.time(), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, 2 * (1 - step / steps))
        chosen = rng.integers(len(scenes), size=BATCH)
        said = [
            Caption(scenes[i].caption(rng) if rng.random() > 0.1 else "", 0, ()) for i in chosen
        ]
        with torch.no_grad():
            states = text_states(pipe.text_encoder, pipe.tokenizer, said)
        times = middle_times(rng, len(chosen)).to(pipe.device)
        loss = diffusion_loss(pipe.unet, pipe.scheduler, latents[chosen], states, times)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            pace = (time.time() - began) / (step + 1)
            say(f"step {step + 1}: loss {np.mean(losses[-50:]):.4f}, {pace:.2f} s a step")


def main() -> None:
    """Read the options, train and write one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEMO_LORA, help="the .safetensors file")
    parser.add_argument("--word", default=TAUGHT[0], choices=TAUGHT)
    parser.add_argument("--scenes", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    pipe = load_pipeline("demo", device=args.device, dtype=torch.float32)
    scenes = make_scenes(np.random.default_rng(args.seed), args.word, args.scenes)
    train(pipe, scenes, args.steps, args.rank, args.seed)
    layers = {k: v.half().cpu() for k, v in get_peft_model_state_dict(pipe.unet).items()}
    StableDiffusionPipeline.save_lora_weights(
        args.out.parent, unet_lora_layers=layers, weight_name=args.out.name
    )
    size = args.out.stat().st_size / 1e3
    say(f"{args.out}: {size:.0f} kB, {time.process_time():.0f} s of a core")


if __name__ == "__main__":
    main()
