"""Train the small MM-DiT: a miniature Stable Diffusion 3 of drawn scenes.

It takes an autoencoder and a text encoder that ``train_demo_model`` trained as they are and learns
one thing, the transformer, by flow matching, from nothing. No mask and no attention map is ever
shown to it. Some hours on 2 CPU cores; with a GPU, on that.

A run is kept in ``--work`` and taken up again where it stopped by the same options; how many
processes there are and where they run may change. ``--snapshot`` writes what the last checkpoint
holds to ``--out``, which ``StableDiffusion3Pipeline.from_pretrained`` reads.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import StableDiffusion3Pipeline

from .data import all_scenes
from .fit import rank
from .losses import Caption
from .mmdit import (
    SETTINGS,
    assemble,
    joint_states,
    new_transformer,
    parts_of,
    read_evenly,
    scene_latents,
    snapshot,
    train_mmdit,
)
from .record import ANY_TIME, begin_sitting
from .train_demo_model import write_model

PLACES = ("processes", "device")  # where the steps are made, which changes nothing but rounding


def train(process: int, args: argparse.Namespace) -> None:
    """One training process; all of them do the same, each on its part of every batch."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.processes))
    if args.processes > 1:
        store = f"file://{(args.work / 'processes').resolve()}"
        # one may wait for another for as long as somebody stops them
        days = timedelta(days=30)
        dist.init_process_group(
            "gloo", store, timeout=days, rank=process, world_size=args.processes
        )
    vae, text, tokenizer = parts_of(args.start)
    scenes = all_scenes(args.seed, args.chunks)
    latents = scene_latents(vae.to(args.device), args.seed, args.chunks, args.work)
    torch.manual_seed(args.seed)
    pipe = assemble(vae, text, tokenizer, new_transformer()).to(args.device)
    said = [Caption(scene.prompts()[0], 0, ()) for scene in scenes[:500]]
    read_evenly(pipe.transformer, joint_states(pipe, said))
    steps, seed = args.mmdit_steps, args.seed + 1
    made = train_mmdit(pipe, scenes, latents, args.work, steps, seed)
    if rank() == 0:
        write(made, args.work, args.out)


def write(made: StableDiffusion3Pipeline, work: Path, out: Path) -> None:
    """The model's folder, with the record of how it was made and of what it is drawn with."""
    write_model(made, work, out, SETTINGS, {})


def run(args: argparse.Namespace) -> None:
    """Begin a run, or take it up again."""
    args.work.mkdir(parents=True, exist_ok=True)
    begin_sitting(args.work, args, (*ANY_TIME, *PLACES))
    (args.work / "processes").unlink(missing_ok=True)
    if args.processes == 1:
        train(0, args)
    else:
        torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)


def main() -> None:
    """Read the options and train."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/mmdit/model"), help="model folder")
    parser.add_argument("--work", type=Path, default=Path("build/mmdit"), help="checkpoints")
    parser.add_argument(
        "--start",
        type=Path,
        default=Path("sdattn/models/demo-mmdit"),
        help="the folder of the autoencoder, text encoder and tokenizer that it reads and draws by",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=40, help="thousands of training scenes")
    parser.add_argument("--mmdit-steps", type=int, default=20000)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--processes", type=int, default=1 if gpu else os.cpu_count() or 1)
    parser.add_argument(
        "--snapshot",
        action="store_true",
        help="write what the last checkpoint holds; train nothing",
    )
    args = parser.parse_args()
    if args.snapshot:
        write(snapshot(args.work, args.start), args.work, args.out)
    else:
        run(args)


if __name__ == "__main__":
    main()
