"""Train a miniature Stable Diffusion 1.x of shapes from nothing: its encoders are demo-mmdit's.

Five stages, each kept in ``--work`` and taken up again where it stopped:

1. scenes: images and the words for them (``scenes``);
2. vae: the autoencoder, 128 x 128 images to 16 x 16 x 4 latents;
3. text: the text encoder learns to foretell the latent from the prompt alone, which stands
   in for the pretraining that CLIP brings to Stable Diffusion;
4. unet: diffusion by v-prediction, the text encoder left as it is, until places are right;
5. refine: the same with the text encoder learning along, most of the time at the noise levels
   where colours and shapes are made.

Some hours on 2 CPU cores. No mask and no attention map is ever shown to the model: that
words find their objects is its own doing.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTokenizer

from sdattn.models.demos import RECORD

from ..scenes.shapes import WORDS, Scene
from .autoencoder import (
    UNSEEN_SHAPES,
    even_out,
    make_latents,
    polish_decoder,
    train_vae,
    train_vae_of,
    vae_psnr,
)
from .data import SIZE, SceneMaker, make_dataset, make_tokenizer
from .fit import rank, say
from .models import INVERSION, SETTINGS, assemble, new_text_encoder, new_unet
from .record import begin_sitting, snapshot, write_record
from .stages import refine, train_text, train_unet


def train_from_nothing(
    args: argparse.Namespace, scenes: list[Scene], images: Tensor
) -> StableDiffusionPipeline:
    """Stages 2 to 5."""
    tokenizer = make_tokenizer(scenes[:2000])  # the first two chunks
    vae = train_vae(images, args.work, args.vae_steps, args.seed)
    latents = even_out(vae, make_latents(vae, images, args.work))
    polish_decoder(vae, latents, images, args.work, args.decoder_steps, args.seed + 3)
    keep(vae, tokenizer, args.work)
    text = train_text(tokenizer, scenes, latents, args.work, args.text_steps, args.seed + 1)
    seed, steps = args.seed + 2, args.unet_steps
    pipe = train_unet(vae, text, tokenizer, scenes, latents, args.work, steps, seed)
    return refine(pipe, scenes, latents, args.work, args.refine_steps, args.seed + 4)


def train_from(
    args: argparse.Namespace, scenes: list[Scene], images: Tensor
) -> StableDiffusionPipeline:
    """Stage 5 for a given pipeline, and an autoencoder for its latents where its own is of smaller
    images."""
    start = StableDiffusionPipeline.from_pretrained(args.start, dtype=torch.float32)
    tokenizer = start.tokenizer
    text, unet = new_text_encoder(tokenizer), new_unet()
    text.load_state_dict(start.text_encoder.state_dict())
    unet.load_state_dict(start.unet.state_dict())
    config = {name: value for name, value in start.vae.config.items() if name[0] != "_"}
    vae = AutoencoderKL.from_config(config)
    vae.load_state_dict(start.vae.state_dict())
    latents = make_latents(vae.eval(), images, args.work)
    keep(vae, tokenizer, args.work)
    pipe = assemble(vae, text, tokenizer, unet)
    again = vae.config.sample_size == SIZE  # what this script makes; the first draws 64x64
    steps, seed = args.refine_steps, args.seed + 4
    rates = (4e-4, 2.5e-4) if again else (8e-4, 5e-4)
    made = refine(pipe, scenes, latents, args.work, steps, seed, again, rates=rates)
    if again:
        return made
    larger = train_vae_of(latents, images, args.work, args.vae_steps, args.seed)
    keep(larger, tokenizer, args.work)
    return assemble(larger, made.text_encoder, tokenizer, made.unet)


def keep(
    vae: AutoencoderKL, tokenizer: CLIPTokenizer, work: Path, make: SceneMaker = UNSEEN_SHAPES
) -> None:
    """Write what snapshots need of both, and say how well the autoencoder does."""
    say(f"vae: {vae_psnr(vae, seed=8, count=100, make=make):.2f} dB on unseen scenes")
    if rank() == 0:
        vae.save_pretrained(work / "vae")
        tokenizer.save_pretrained(work / "tokenizer")


def train(process: int, args: argparse.Namespace) -> None:
    """One training process; all of them do the same, each on its part of every batch."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.processes))
    if args.processes > 1:
        store = f"file://{(args.work / 'processes').resolve()}"
        dist.init_process_group("gloo", store, rank=process, world_size=args.processes)
    torch.manual_seed(args.seed)
    scenes, images = make_dataset(args.seed, args.chunks, args.work)
    made = (train_from if args.start else train_from_nothing)(args, scenes, images)
    if process == 0:
        write_model(made, args.work, args.out, SETTINGS, INVERSION)


def write_model(
    made: DiffusionPipeline,
    work: Path,
    out: Path,
    settings: Mapping[str, Any],
    inversion: Mapping[str, Any],
    words: Mapping[str, tuple[str, ...]] = WORDS,
) -> None:
    """Write the model's folder, with the record of how it was made and of what it is drawn with.

    Its weights are in float16, and every reader opens them in float32.
    """
    tokenizer = made.tokenizer.backend_tokenizer
    tokenizer.no_padding()  # as in its last use, otherwise
    tokenizer.no_truncation()
    made.to(dtype=torch.float16).save_pretrained(out, safe_serialization=True)
    for encoder in out.glob("text_encoder*"):
        name_as_before(encoder / "model.safetensors")
        open_in_float32(encoder / "config.json")
    for folder in out.glob("tokenizer*"):
        tokenizer.model.save(str(folder))  # the two files that older readers know
    record = {"settings": settings, "inversion": inversion, "words": words}
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    write_record(work, out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    say(f"{out}: {size / 1e6:.1f} MB")


def open_in_float32(path: Path) -> None:
    """Write float32 into a text encoder's configuration: transformers reads its dtype there, and
    diffusers opens the rest in float32, so that float16 would end in Half and Float."""
    config = json.loads(path.read_text())
    config |= {name: "float32" for name in ("dtype", "torch_dtype") if name in config}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def name_as_before(path: Path) -> None:
    """Give the text encoder's weights the names that transformers 4 knows, which 5 reads as well;
    with those of 5 alone, 4 would draw its weights at random and only log it."""
    weights = load_file(path)
    named = {
        name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}": one
        for name, one in weights.items()
    }
    save_file(named, path, metadata={"format": "pt"})


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/shapes/model"), help="model folder")
    parser.add_argument("--work", type=Path, default=Path("build/shapes"), help="checkpoints")
    parser.add_argument(
        "--start",
        type=Path,
        help="a demo model to go on from: stage 5, and where its images are smaller an "
        "autoencoder of larger ones for its latents",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=40, help="thousands of training scenes")
    parser.add_argument("--vae-steps", type=int, default=6000)
    parser.add_argument("--decoder-steps", type=int, default=300)
    parser.add_argument("--text-steps", type=int, default=1500)
    parser.add_argument("--unet-steps", type=int, default=5400)
    parser.add_argument("--refine-steps", type=int, default=10000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--snapshot",
        action="store_true",
        help="write what the last checkpoint holds; train nothing",
    )
    args = parser.parse_args()
    if args.snapshot:
        write_model(snapshot(args.work), args.work, args.out)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    begin_sitting(args.work, args)
    (args.work / "processes").unlink(missing_ok=True)
    make_dataset(args.seed, args.chunks, args.work)
    torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
