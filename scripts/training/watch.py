"""Pictures and figures while the demo model trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import StableDiffusionPipeline
from PIL import Image
from torch import Tensor

from sdattn.scene_checker import find_objects, match
from sdattn.scenes import Scene, holds, random_scene

from .fit import rank, say, world
from .losses import diffusion_loss, text_states

GUIDANCE = 2.0


@torch.no_grad()
def report_use_of_text(
    pipe: StableDiffusionPipeline, scenes: list[Scene], latents: Tensor, count: int = 64
) -> None:
    """Print the loss at t = 850 with each scene's own prompt and with another's."""
    rng = np.random.default_rng(0)
    prompts = [scene.caption(rng) for scene in scenes[:count]]
    states = text_states(pipe.text_encoder, pipe.tokenizer, prompts, prompts, torch.zeros(count))
    t = torch.full((count,), 850)
    losses = []
    for shift in (0, 1):
        torch.manual_seed(0)
        wrong = states.roll(shift, 0)
        losses.append(diffusion_loss(pipe.unet, pipe.scheduler, latents[:count], wrong, t).item())
    say(f"     loss at t = 850: own prompt {losses[0]:.4f}, another's {losses[1]:.4f}")


def report_pictures(pipe: StableDiffusionPipeline, step: int, work: Path, count: int = 32) -> None:
    """Draw unseen prompts in each process, print how many are right, keep a sheet of them."""
    rng = np.random.default_rng((99, rank()))
    scenes = [random_scene(rng, held_out=True, n_objects=2) for _ in range(count)]
    prompts = [scene.caption(rng) for scene in scenes]
    torch.manual_seed(rank())
    pictures = pipe(prompts, num_inference_steps=20, guidance_scale=GUIDANCE).images
    right = torch.tensor([judge(*pair) for pair in zip(scenes, pictures, strict=True)]).sum(0)
    if world() > 1:
        dist.all_reduce(right)
    colours, shapes, placed, relations = (right / torch.tensor(count * world())).tolist()[:4]
    placed /= max(relations, 1e-9)
    say(f"     colours {colours:.2f}  shapes {shapes:.2f}  place {placed:.2f}")
    if rank() == 0:
        tiles = [np.asarray(picture) for picture in pictures]
        rows = [np.hstack(tiles[start : start + 8]) for start in range(0, count, 8)]
        Image.fromarray(np.vstack(rows)).resize((1024, 512), 0).save(work / f"unet-{step:06}.png")


def judge(scene: Scene, picture: Image.Image) -> list[float]:
    """Both colours right; both objects right; told places kept; a place was told (1 or 0 each)."""
    found = find_objects(picture)
    colours = sorted(thing.colour for thing in found) == sorted(o.colour for o in scene.objects)
    seen = sorted((thing.colour, thing.shape) for thing in found)
    shapes = seen == sorted((thing.colour, thing.shape) for thing in scene.objects)
    told = scene.relation not in (None, "and")
    chosen = match(scene, found)
    placed = told and chosen is not None and holds(str(scene.relation), *(f.centre for f in chosen))
    return [float(value) for value in (colours, shapes, placed, told)]
