"""AnimateDiff's motion modules for the first demo model, which stays as it is.

new_adapter()                   the motion modules, untrained, which change nothing
assemble(demo, adapter)         the pipeline: the demo model with them
video_latents(...)               latents of videos, worked out once
train_motion(...)               diffusion of videos, the motion modules alone
snapshot(work, start)           the pipeline as the last checkpoint has it
"""

from __future__ import annotations

import copy
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
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from sdattn.loading.quiet import no_notices

from ..moving import FRAMES, MovingScene, goes_right, random_video
from ..scene_checker import find_objects
from .data import chunk_seed
from .fit import FLAT, Fit, note, rank, world
from .losses import Caption, noisy_times, text_states
from .mmdit import mine, scene_latents
from .models import SETTINGS as OF_IMAGES

LONGEST = 16  # frames that the modules can tell apart
SETTINGS = {**OF_IMAGES, "num_frames": FRAMES}
BATCH = 8  # videos a step
VIDEOS_A_CHUNK = 250
SIZE = 128  # side of a frame in pixels
SILENT = 0.1  # of the videos: without a prompt, for guidance


def new_adapter() -> MotionAdapter:
    """A module behind each block of the UNet, one transformer layer each but at the smallest size,
    2x2, where there is none. Each begins by adding nothing (Guo et al. 2023), so that the video is
    a row of images of the demo model."""
    adapter = MotionAdapter(
        block_out_channels=(32, 64, 96, 96),
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
    """The videos of so many chunks."""
    return [video for at in range(chunks) for video in make_videos(chunk_seed(seed, at))]


def make_videos(seed: int) -> list[MovingScene]:
    """A chunk of videos of the training part."""
    rng = np.random.default_rng(seed)
    return [random_video(rng) for _ in range(VIDEOS_A_CHUNK)]


def draw_videos(seed: int) -> Tensor:
    """Return the frames of ``make_videos(seed)``, video by video, uint8 [count, 3, SIZE, SIZE]."""
    frames = np.concatenate([video.draw(SIZE) for video in make_videos(seed)])
    return torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()


def video_latents(vae: AutoencoderKL, seed: int, chunks: int, work: Path) -> Tensor:
    """Latents [videos, 4, FRAMES, 16, 16] of ``all_videos(seed, chunks)``."""
    latents = scene_latents(vae, seed, chunks, work, draw_videos)
    return latents.unflatten(0, (-1, FRAMES)).transpose(1, 2).contiguous()


def video_loss(
    pipe: AnimateDiffPipeline, latents: Tensor, noise: Tensor, t: Tensor, states: Tensor
) -> Tensor:
    """Squared error of the velocity (Salimans and Ho, 2022) of videos [videos, 4, frames, ...],
    every frame with its video's prompt and timestep."""
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
) -> AnimateDiffPipeline:
    """Train the motion modules; returns a pipeline with the running mean of their weights."""
    everything, part_of = torch.arange(len(videos)), slice(rank(), None, world())
    averaged = AnimateDiffPipeline(**{**pipe.components, "unet": copy.deepcopy(pipe.unet)})
    averaged.set_progress_bar_config(disable=True)
    modules = {"motion": motion_of(pipe.unet).requires_grad_(True).train()}

    def loss(step: int) -> Tensor:
        rng, chosen = mine(step, seed, everything, BATCH)
        said = [videos[at].caption(rng) if rng.random() >= SILENT else "" for at in chosen]
        t = torch.from_numpy(rng.permutation(noisy_times(rng, BATCH).numpy()))
        noise = torch.randn(latents[chosen].shape)
        captions = [Caption(text, 0, ()) for text in said[part_of]]
        with torch.no_grad():
            states = text_states(pipe.text_encoder, pipe.tokenizer, captions)
        return video_loss(pipe, *(one[part_of] for one in (latents[chosen], noise, t)), states)

    def watch(step: int) -> None:
        if step % 500 == 0 or step == steps:
            report_videos(averaged, step, work)

    mean = {"motion": motion_of(averaged.unet)}
    Fit("motion", modules, (1e-3,), loss, steps, FLAT["motion"], mean, watch, memory=0.998).run(
        work
    )
    return averaged


@torch.no_grad()
def report_videos(pipe: AnimateDiffPipeline, step: int, work: Path, count: int = 12) -> None:
    """Draw unseen videos with one object in the first process, note how many are of the right
    object in all frames and how many go to the right, keep a sheet of them, a row a video."""
    if rank() != 0:
        return
    rng = np.random.default_rng(97)
    asked = [random_video(rng, held_out=True, n_objects=1) for _ in range(count)]
    prompts = [video.caption(rng) for video in asked]
    seeds = [torch.Generator().manual_seed(number) for number in range(count)]
    drawn = pipe(prompts, generator=seeds, **SETTINGS).frames
    right, went = [], []
    for video, frames in zip(asked, drawn, strict=True):
        [thing] = video.scene.objects
        found = [find_objects(frame) for frame in frames]
        seen = [[(one.colour, one.shape) for one in some] for some in found]
        right.append(all(some == [(thing.colour, thing.shape)] for some in seen))
        ends = [some[0].centre for some in (found[0], found[-1]) if some]
        went.append(len(ends) == 2 and goes_right(ends))
    note(work, "motion", step, objects=float(np.mean(right)), way=float(np.mean(went)))
    rows = [np.hstack([np.asarray(frame) for frame in frames]) for frames in drawn]
    Image.fromarray(np.vstack(rows)).save(work / f"motion-{step:06}.png")


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
