"""AnimateDiff's motion modules for the demo model, which stays as it is.

new_adapter()                   the motion modules, untrained, which change nothing
assemble(demo, adapter)         the pipeline: the demo model with them
video_latents(...)              latents of videos, worked out once
train_motion(...)               diffusion of videos, the motion modules alone
snapshot(work, start)           the pipeline as the last checkpoint has it
"""

from __future__ import annotations

import copy
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AnimateDiffPipeline,
    AutoencoderKL,
    MotionAdapter,
    StableDiffusionPipeline,
    UNetMotionModel,
)
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from sdattn.loading.quiet import no_notices

from ..moving import FRAMES, MovingScene, goes_right, random_video
from .autoencoder import as_pixels
from .data import SIZE, chunk_seed, token_ids
from .fit import FLAT, Fit, note, rank, world
from .losses import noisy_times
from .mmdit import mine
from .sprite_parts import SETTINGS as OF_IMAGES
from .sprite_parts import WIDTHS

LONGEST = 16  # frames that the modules can tell apart
SETTINGS = {**OF_IMAGES, "num_frames": FRAMES}
VIDEOS_A_CHUNK = 250
SILENT = 0.1  # of the videos: without a prompt, for guidance


def new_adapter() -> MotionAdapter:
    """A module behind each block of the UNet, one transformer layer each but at the smallest size,
    2x2, where there is none. Each begins by adding nothing (Guo et al. 2023), so that the video is
    a row of images of the demo model."""
    adapter = MotionAdapter(
        block_out_channels=WIDTHS,
        motion_layers_per_block=2,
        motion_transformer_layers_per_block=(1, 1, 1, 0),
        motion_num_attention_heads=4,
        motion_norm_num_groups=8,
        motion_max_seq_length=LONGEST,
    )
    for module in adapter.modules():
        if isinstance(last := getattr(module, "proj_out", None), nn.Linear):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
    return adapter


def assemble(demo: Path, adapter: MotionAdapter) -> AnimateDiffPipeline:
    """The pipeline, silent; of the demo model nothing is to be trained."""
    pipe = StableDiffusionPipeline.from_pretrained(demo, dtype=torch.float32)
    parts = ("vae", "text_encoder", "tokenizer", "unet", "scheduler")
    taken = {name: pipe.components[name] for name in parts}
    with no_notices():
        made = AnimateDiffPipeline(**taken, motion_adapter=adapter)
    for part in (made.vae, made.text_encoder, made.unet):
        part.eval().requires_grad_(False)
    made.set_progress_bar_config(disable=True)
    return made


def motion_of(unet: UNetMotionModel) -> nn.ModuleList:
    """The motion modules inside a UNet."""
    return nn.ModuleList(
        module for name, module in unet.named_modules() if name.endswith("motion_modules")
    )


def adapter_of(unet: UNetMotionModel) -> MotionAdapter:
    """The motion modules of a UNet as they are written to a file."""
    adapter = new_adapter()
    weights = unet.state_dict()
    adapter.load_state_dict({name: weights[name] for name in adapter.state_dict()})
    return adapter


def all_videos(seed: int, chunks: int) -> list[MovingScene]:
    """Return the videos of so many chunks."""
    with ProcessPoolExecutor() as pool:
        return list(chain.from_iterable(pool.map(make_videos, chunk_seeds(seed, chunks))))


def chunk_seeds(seed: int, chunks: int) -> list[int]:
    """Return the seed of each chunk."""
    return [chunk_seed(seed, at) for at in range(chunks)]


def make_videos(seed: int) -> list[MovingScene]:
    """Return a chunk of videos of the training part."""
    rng = np.random.default_rng(seed)
    return [random_video(rng) for _ in range(VIDEOS_A_CHUNK)]


def draw_videos(seed: int) -> NDArray[np.uint8]:
    """Return the frames of ``make_videos(seed)``, video by video, uint8 [count, 3, SIZE, SIZE]: an
    array, since tensors of another process would fill shared memory."""
    frames = np.concatenate([video.draw(SIZE) for video in make_videos(seed)])
    return np.ascontiguousarray(frames.transpose(0, 3, 1, 2))


@torch.no_grad()
def video_latents(vae: AutoencoderKL, seed: int, chunks: int, work: Path) -> Tensor:
    """Return latents [videos, channels, FRAMES, 16, 16] of ``all_videos(seed, chunks)``, which are
    worked out once and kept in ``work``."""
    kept = work / "latents.pt"
    if not kept.exists():
        parts = []
        with ProcessPoolExecutor() as pool:
            for drawn in pool.map(draw_videos, chunk_seeds(seed, chunks)):
                for some in torch.from_numpy(drawn).split(100):
                    found = vae.encode(as_pixels(some.to(vae.device))).latent_dist.mode()
                    parts.append(vae.config.scaling_factor * found.cpu())
        latents = torch.cat(parts).unflatten(0, (-1, FRAMES)).transpose(1, 2).contiguous()
        torch.save(latents, f"{kept}.new")
        os.replace(f"{kept}.new", kept)
    return torch.load(kept, mmap=True)


def video_loss(
    pipe: AnimateDiffPipeline, latents: Tensor, noise: Tensor, t: Tensor, states: Tensor
) -> Tensor:
    """Return the squared error of the velocity (Salimans and Ho, 2022) of videos [videos, channels,
    frames, ...], every frame with its video's prompt and timestep."""
    noisy = pipe.scheduler.add_noise(latents, noise, t)
    frames = states.repeat_interleave(latents.shape[2], dim=0)
    found = pipe.unet(noisy, t, frames).sample
    return F.mse_loss(found, pipe.scheduler.get_velocity(latents, noise, t))


def train_motion(
    pipe: AnimateDiffPipeline,
    videos: list[MovingScene],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
    batch: int,
) -> AnimateDiffPipeline:
    """Train the motion modules where the pipeline is; returns a pipeline with the running mean of
    their weights."""
    known, part_of = latents.to(pipe.device), slice(rank(), None, world())
    averaged = AnimateDiffPipeline(**{**pipe.components, "unet": copy.deepcopy(pipe.unet)})
    averaged.set_progress_bar_config(disable=True)
    modules = {"motion": motion_of(pipe.unet).requires_grad_(True).train()}

    def sample(step: int) -> tuple[Tensor, ...]:
        rng, chosen = mine(step, seed, torch.arange(len(videos)), batch)
        said = [videos[at].caption(rng) if rng.random() >= SILENT else "" for at in chosen]
        t = torch.from_numpy(rng.permutation(noisy_times(rng, batch).numpy()))
        return chosen[part_of], t[part_of], token_ids(pipe.tokenizer, said[part_of])

    def loss(chosen: Tensor, t: Tensor, ids: Tensor) -> Tensor:
        noise = torch.randn(batch, *known.shape[1:], device=known.device)[part_of]
        with torch.no_grad():
            states = pipe.text_encoder(ids).last_hidden_state
        return video_loss(pipe, known[chosen], noise, t, states)

    Fit(
        "motion",
        modules,
        (1e-3,),
        loss,
        steps,
        FLAT["motion"],
        {"motion": motion_of(averaged.unet)},
        lambda step: report_videos(averaged, step, work),
        memory=0.998,
        sample=sample,
        device=pipe.device,
    ).run(work)
    return averaged


@torch.no_grad()
def report_videos(pipe: AnimateDiffPipeline, step: int, work: Path, count: int = 12) -> None:
    """Draw unseen videos with one object in the first process, note how many go to the right, keep
    a sheet of them, a row a video, and what they were."""
    if rank() != 0:
        return
    rng = np.random.default_rng(97)
    prompts = [random_video(rng, held_out=True, n_objects=1).caption(rng) for _ in range(count)]
    seeds = [torch.Generator().manual_seed(number) for number in range(count)]
    drawn = pipe(prompts, generator=seeds, **SETTINGS).frames
    videos = [np.stack([np.asarray(frame) for frame in frames]) for frames in drawn]
    way = np.mean([goes_right(what_moves(frames)) for frames in videos])
    note(work, "motion", step, way=float(way))
    sheet = np.vstack([np.hstack(list(frames)) for frames in videos])
    Image.fromarray(sheet).save(work / f"motion-{step:06}.png")
    (work / "prompts.txt").write_text("\n".join(prompts) + "\n")


def what_moves(frames: NDArray[np.uint8]) -> list[tuple[float, float]]:
    """Return the middle (x, y) of what differs from the median of all frames [frames, size, size,
    3], in each of them."""
    other = abs(frames - np.median(frames, axis=0)).max(-1) > 40
    places = [np.argwhere(one) for one in other]
    size = frames.shape[1]
    return [
        (float(x), float(y))
        for y, x in ((at.mean(0) / size if len(at) else (0.5, 0.5)) for at in places)
    ]


def snapshot(work: Path, start: Path) -> AnimateDiffPipeline:
    """The pipeline of the last checkpoint, with the running mean of its motion modules.

    Raises:
        SystemExit: training has not begun.
    """
    kept = work / "motion.pt"
    if not kept.exists():
        raise SystemExit(f"{work} has no motion.pt yet. Train without --snapshot first.")
    pipe = assemble(start, new_adapter())
    held = torch.load(kept, mmap=True, map_location="cpu")
    motion_of(pipe.unet).load_state_dict(held["mean"]["motion"])
    return pipe
