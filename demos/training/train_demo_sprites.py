"""Train the demo model of sprites from nothing: a miniature Stable Diffusion 1.x: cats, pizzas.

Six stages, each kept in ``--work`` and taken up again where it stopped:

1. scenes: images and the words for them (``scenes.emoji``);
2. latents: the main components of 8x8 patches, 128 x 128 images to 16 x 16 x 16 latents
   (``patches``), written into an ``AutoencoderKL``'s encoder;
3. decoder: latents back to images;
4. text: the text encoder learns to foretell the latent from the prompt alone, which stands
   in for the pretraining that CLIP brings to Stable Diffusion;
5. unet: diffusion by v-prediction, the text encoder left as it is, until places are right;
6. refine: the same with the text encoder learning along, most of the time at the noise levels
   where colours and outlines are made.

With ``--device cuda`` a step is a CUDA graph; the demo's three runs took 14 minutes of steps on an
NVIDIA H200 and an H100, see its ``training.json``. No mask and no attention map is ever shown to
the model.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from torch import Tensor

from ..scenes.emoji import random_scene
from .autoencoder import UNSEEN_SPRITES, make_latents
from .data import make_dataset
from .fit import rank
from .models import INVERSION, assemble
from .record import ANY_TIME, begin_sitting, snapshot
from .sprite_parts import (
    RECIPE,
    SETTINGS,
    WORDS,
    make_word_tokenizer,
    new_sprite_unet,
    train_decoder,
    write_latents,
)
from .stages import Recipe, refine, train_text, train_unet
from .train_demo_model import keep, write_model


def train(process: int, args: argparse.Namespace) -> None:
    """Run one training process; all of them do the same, each on its part of every batch."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.processes))
    if args.processes > 1:
        store = f"file://{(args.work / 'processes').resolve()}"
        dist.init_process_group("gloo", store, rank=process, world_size=args.processes)
    work, seed = args.work, args.seed
    recipe = replace(RECIPE, batch=args.batch, device=torch.device(args.device))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    scenes, images = make_dataset(seed, args.chunks, work, random_scene)
    if args.start:
        given = DiffusionPipeline.from_pretrained(args.start, torch_dtype=torch.float32)
        pipe = assemble(given.vae, given.text_encoder, given.tokenizer, given.unet)
        keep(pipe.vae, pipe.tokenizer, work, UNSEEN_SPRITES)
        latents = make_latents(pipe.vae.to(recipe.device), images, work)
    else:
        pipe, latents = train_parts(scenes, images, args, recipe)
    pipe.to(recipe.device)
    again = args.start is not None
    made = refine(pipe, scenes, latents, work, args.refine_steps, seed + 4, again, recipe)
    if rank() == 0:
        write(made, work, args.out)


def train_parts(
    scenes: list[Any], images: Tensor, args: argparse.Namespace, recipe: Recipe
) -> tuple[StableDiffusionPipeline, Tensor]:
    """Run the stages up to the UNet's; returns the pipeline and the latents."""
    work, seed = args.work, args.seed
    patches, latents = write_latents(images, work)
    vae = train_decoder(patches, latents, images, work, args.decoder_steps, seed, recipe)
    tokenizer = make_word_tokenizer()
    keep(vae, tokenizer, work, UNSEEN_SPRITES)
    text = train_text(tokenizer, scenes, latents, work, args.text_steps, seed + 1, recipe)
    pipe = train_unet(
        vae, text, tokenizer, scenes, latents, work, args.unet_steps, seed + 2, recipe
    )
    return pipe, latents


def write(made: DiffusionPipeline, work: Path, out: Path) -> None:
    """Write the model's folder, with the record of how it was made."""
    write_model(made, work, out, SETTINGS, INVERSION, WORDS)


def run(args: argparse.Namespace) -> None:
    """Begin a run, or take it up again."""
    args.work.mkdir(parents=True, exist_ok=True)
    begin_sitting(args.work, args, (*ANY_TIME, "processes", "device"))
    (args.work / "processes").unlink(missing_ok=True)
    if args.processes == 1:
        train(0, args)
    else:
        make_dataset(args.seed, args.chunks, args.work, random_scene)
        torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/sprites/model"), help="model folder"
    )
    parser.add_argument("--work", type=Path, default=Path("build/sprites"), help="checkpoints")
    parser.add_argument("--start", type=Path, help="a model of this kind to refine once more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=48, help="thousands of training scenes")
    parser.add_argument("--decoder-steps", type=int, default=3000)
    parser.add_argument("--text-steps", type=int, default=3000)
    parser.add_argument("--unet-steps", type=int, default=16000)
    parser.add_argument("--refine-steps", type=int, default=16000)
    parser.add_argument("--batch", type=int, default=32, help="scenes a step")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, with one process")
    parser.add_argument("--processes", type=int, default=1, help="2 threads in one, by default")
    parser.add_argument(
        "--snapshot",
        action="store_true",
        help="write what the last checkpoint holds; train nothing",
    )
    args = parser.parse_args()
    if args.snapshot:
        write(snapshot(args.work, new_sprite_unet), args.work, args.out)
    else:
        run(args)


if __name__ == "__main__":
    main()
