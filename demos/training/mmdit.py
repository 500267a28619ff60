"""A miniature Stable Diffusion 3 that reads and draws through encoders trained before.

new_transformer()               the transformer, untrained
assemble(...), parts_of(start)  the pipeline around it
scene_latents(...)              latents of scenes, worked out once
train_mmdit(...)                flow matching, the transformer alone
snapshot(work, start)           the pipeline as the last checkpoint has it
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from ..scenes.shapes import Scene, random_scene
from .autoencoder import as_pixels
from .data import SIZE, TOKENS, chunk_seed, draw_scenes
from .fit import FLAT, Fit, note, rank, world
from .losses import LAST_READINGS, READINGS, Caption, captions, read_states
from .models import FACTOR, WIDTH
from .models import SETTINGS as OF_THE_FIRST
from .stages import often
from .watch import report_images

ZEROS = 8  # columns of zeros behind the text, where T5's would be
POOLED = 8  # width of each encoder's pooled state, which is zero
SETTINGS = {**OF_THE_FIRST, "max_sequence_length": ZEROS}
BATCH = 32
IMAGES = 16  # drawn by each process to see how it does


def new_transformer(blocks: int = 6, heads: int = 3, head_width: int = 64) -> SD3Transformer2DModel:
    """A token for each cell of the latent; blocks that begin as the identity (Peebles and Xie,
    2023), so that depth does no harm before it is of use."""
    transformer = SD3Transformer2DModel(
        sample_size=SIZE // FACTOR,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=blocks,
        num_attention_heads=heads,
        attention_head_dim=head_width,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=heads * head_width,
        pooled_projection_dim=2 * POOLED,
        pos_embed_max_size=24,  # half as much again as it learns
        qk_norm="rms_norm",
    )
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    times = transformer.time_text_embed.timestep_embedder
    for linear in (times.linear_1, times.linear_2):
        nn.init.normal_(linear.weight, std=0.02)
    modulations = [block.norm1.linear for block in transformer.transformer_blocks]
    modulations += [block.norm1_context.linear for block in transformer.transformer_blocks]
    for linear in (*modulations, transformer.norm_out.linear, transformer.proj_out):
        nn.init.zeros_(linear.weight)
    return transformer


def read_evenly(transformer: SD3Transformer2DModel, states: Tensor) -> None:
    """Begin with all features of the text states [prompts, columns, features] equally loud: as
    they come, a few have hundreds of times the spread of others, and most are far off zero."""
    used = states[:, :TOKENS].flatten(0, 1)
    mean, deviation = used.mean(0), used.std(0).clamp(min=1e-3)
    embedder = transformer.context_embedder
    with torch.no_grad():
        embedder.weight /= deviation
        embedder.bias -= embedder.weight @ mean


def parts_of(start: Path) -> tuple[AutoencoderKL, CLIPTextModel, CLIPTokenizer]:
    """Return a model's autoencoder, text encoder without projection, and tokenizer, float32."""
    vae = AutoencoderKL.from_pretrained(start / "vae", torch_dtype=torch.float32)
    text = CLIPTextModel.from_pretrained(start / "text_encoder", dtype=torch.float32)
    return vae.eval(), text.eval(), CLIPTokenizer.from_pretrained(start / "tokenizer")


def with_projection(text: CLIPTextModel, layers: int) -> CLIPTextModelWithProjection:
    """The first layers of a text encoder, and a projection of nothing.

    Stable Diffusion 3 adds the pooled state of the prompt to every block beside the attention. Here
    it is zero, so that all that the transformer knows of the prompt has come through attention.
    """
    config = copy.deepcopy(text.config)
    config.num_hidden_layers, config.projection_dim = layers, POOLED
    config.architectures = None
    made = CLIPTextModelWithProjection(config)
    named = {f"text_model.{k.removeprefix('text_model.')}": v for k, v in text.state_dict().items()}
    fits = {name: value for name, value in named.items() if name in made.state_dict()}
    nothing = {"text_projection.weight": torch.zeros(POOLED, config.hidden_size)}
    made.load_state_dict({**fits, **nothing})
    return made.eval().requires_grad_(False)


def assemble(
    vae: AutoencoderKL,
    text: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    transformer: SD3Transformer2DModel,
) -> StableDiffusion3Pipeline:
    """The pipeline, silent and without T5.

    It reads the last layer but one of two text encoders. The first is whole, and knows what
    was said before each word; the second is its first layer, so that what is read is the words and
    their places alone.
    """
    vae.register_to_config(shift_factor=0.0)  # the pipeline adds it
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=with_projection(text, text.config.num_hidden_layers),
        tokenizer=tokenizer,
        text_encoder_2=with_projection(text, 1),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def joint_states(pipe: StableDiffusion3Pipeline, said: list[Caption]) -> Tensor:
    """Text states [captions, TOKENS + ZEROS, features] as the pipeline makes them, each prompt read
    as its caption says."""

    def states_of(texts: list[str]) -> Tensor:
        return pipe.encode_prompt(
            texts, None, None, do_classifier_free_guidance=False, max_sequence_length=ZEROS
        )[0][:, :TOKENS]

    with torch.no_grad():
        return F.pad(read_states(states_of, pipe.tokenizer, said), (0, 0, 0, ZEROS))


@torch.no_grad()
def latents_of(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Latents [count, 4, 16, 16] of images uint8 [count, 3, SIZE, SIZE], on the CPU."""
    parts = (as_pixels(part).to(vae.device) for part in images.split(8))
    latents = torch.cat([vae.encode(part).latent_dist.mode().cpu() for part in parts])
    return vae.config.scaling_factor * latents


def scene_latents(vae: AutoencoderKL, seed: int, chunks: int, work: Path) -> Tensor:
    """Return latents [images, 4, 16, 16] of ``all_scenes(seed, chunks)``, a file a chunk in
    ``work``; each process makes its part of those that are missing."""
    seeds = [chunk_seed(seed, index) for index in range(chunks)]
    kept = {one: work / f"latents-{one}.pt" for one in seeds}
    for one, path in list(kept.items())[rank() :: world()]:
        if not path.exists():
            torch.save(latents_of(vae, draw_scenes(one)), f"{path}.new")
            os.replace(f"{path}.new", path)
    if world() > 1:
        dist.barrier()
    return torch.cat([torch.load(path) for path in kept.values()])


def flow_times(rng: np.random.Generator, count: int) -> Tensor:
    """Parts of noise in [0, 1], float32 [count]: three quarters logit-normal (Esser et al., 2024)
    with the middle moved towards noise, where it is decided what goes where, a quarter anywhere.

    Each is spread evenly by chance, which is less noisy than drawing every one alone.
    """
    anywhere = count // 4
    spread = [(np.arange(n) + rng.random(n)) / n for n in (count - anywhere, anywhere)]
    first, rest = (torch.from_numpy(one).float() for one in spread)
    normal = torch.special.ndtri(first.clamp(1e-6, 1 - 1e-6))
    return torch.cat([torch.sigmoid(normal + 0.4), rest])


def flow_loss(
    transformer: SD3Transformer2DModel, latents: Tensor, noise: Tensor, part: Tensor, states: Tensor
) -> Tensor:
    """Squared error of the way from image to noise (Lipman et al., 2023), where ``part`` of what
    is seen is noise; what is given may lie on the CPU."""
    device = transformer.device
    latents, noise, part, states = (one.to(device) for one in (latents, noise, part, states))
    mixed = torch.lerp(latents, noise, part[:, None, None, None])
    nothing = torch.zeros(len(latents), 2 * POOLED, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        way = transformer(mixed, states, nothing, 1000 * part).sample
    return F.mse_loss(way.float(), noise - latents)


def mine(step: int, seed: int, samples: Tensor, batch: int) -> tuple[np.random.Generator, Tensor]:
    """A step's source of chance, and its samples: the same in all processes, which each take their
    part of what is made of them. So it does not matter how many there are."""
    rng = np.random.default_rng((seed, step))
    torch.manual_seed(int(rng.integers(2**62)))
    return rng, samples[torch.from_numpy(rng.integers(len(samples), size=batch))]


def train_mmdit(
    pipe: StableDiffusion3Pipeline,
    scenes: list[Scene],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
) -> StableDiffusion3Pipeline:
    """Train the transformer; returns a pipeline with the running mean of its weights."""
    shown, part_of = often(scenes), slice(rank(), None, world())
    first = FLAT["mmdit"] * steps  # until when words have to find their objects
    mean = {"transformer": copy.deepcopy(pipe.transformer)}
    averaged = StableDiffusion3Pipeline(**{**pipe.components, **mean})
    averaged.set_progress_bar_config(disable=True)
    report = unseen_loss(averaged, work)

    def loss(step: int) -> Tensor:
        rng, chosen = mine(step, seed, shown, BATCH)
        said = captions(rng, scenes, chosen, READINGS if step < first else LAST_READINGS)
        part = torch.from_numpy(rng.permutation(flow_times(rng, BATCH).numpy()))
        noise = torch.randn(latents[chosen].shape)
        mixed = (latents[chosen], noise, part)
        states = joint_states(pipe, said[part_of])
        return flow_loss(pipe.transformer, *(one[part_of] for one in mixed), states)

    def watch(step: int) -> None:
        report(step)
        if step % 1000 == 0 or step == steps:
            report_images(averaged, "mmdit", step, work, SETTINGS, IMAGES)

    modules = {"transformer": pipe.transformer}
    Fit("mmdit", modules, (1.5e-3,), loss, steps, FLAT["mmdit"], mean, watch).run(work)
    return averaged


def unseen_loss(
    pipe: StableDiffusion3Pipeline, work: Path, count: int = 96
) -> Callable[[int], None]:
    """What notes the loss on scenes of the part that training never sees, with each scene's own
    prompt and with another's."""
    rng = np.random.default_rng(98)
    scenes = [random_scene(rng, held_out=True, n_objects=2) for _ in range(count)]
    said = [Caption(scene.caption(rng), 0, ()) for scene in scenes]
    drawn = torch.from_numpy(np.stack([scene.draw(SIZE) for scene in scenes])).permute(0, 3, 1, 2)
    latents, states = latents_of(pipe.vae, drawn), joint_states(pipe, said)
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(98))
    part = (torch.arange(count) + 0.5) / count

    @torch.no_grad()
    def report(step: int) -> None:
        own, others = (
            flow_loss(pipe.transformer, latents, noise, part, states.roll(shift, 0)).item()
            for shift in (0, 1)
        )
        note(work, "mmdit", step, own_prompt=own, others_prompt=others)

    return report


def snapshot(work: Path, start: Path) -> StableDiffusion3Pipeline:
    """The pipeline of the last checkpoint, with the running mean of its weights.

    Raises:
        SystemExit: training has not begun.
    """
    kept = work / "mmdit.pt"
    if not kept.exists():
        raise SystemExit(f"{work} has no mmdit.pt yet. Train without --snapshot first.")
    transformer = new_transformer()
    held = torch.load(kept, mmap=True, map_location="cpu")
    transformer.load_state_dict(held["mean"]["transformer"])
    return assemble(*parts_of(start), transformer)
