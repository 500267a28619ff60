"""Train the demo model from nothing: a miniature Stable Diffusion 1.x of drawn scenes.

Five stages, each kept in ``--work`` and taken up again where it stopped:

1. scenes: pictures and the words for them (``sdattn.scenes``);
2. vae: the autoencoder, 64 x 64 pictures to 16 x 16 x 4 latents;
3. text: the text encoder learns to foretell the latent from the prompt alone, which stands
   in for the pretraining that CLIP brings to Stable Diffusion;
4. unet: diffusion by v-prediction, the text encoder left as it is, until places are right;
5. refine: the same with the text encoder learning along, most of the time at the noise levels
   where colours and shapes are made.

About an hour and three quarters on 2 CPU cores. No mask and no attention map is ever shown to the
model: that words find their objects is its own doing.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from sdattn.scene_checker import find_objects, match
from sdattn.scenes import Scene, holds, random_scene

SIZE = 64  # side of a picture in pixels
TOKENS = 32  # length of a prompt with its start, end and padding
WIDTH = 128  # of the text encoder
GUIDANCE = 1.5  # for the pictures that show the progress


# ---------------------------------------------------------------- scenes and words


def make_scenes(seed: int, count: int = 1000) -> list[Scene]:
    """Scenes of the training part."""
    rng = np.random.default_rng(seed)
    return [random_scene(rng) for _ in range(count)]


def draw_scenes(seed: int) -> Tensor:
    """The pictures of ``make_scenes(seed)``, uint8 [count, 3, 64, 64]."""
    pictures = np.stack([scene.draw(SIZE, supersample=3) for scene in make_scenes(seed)])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


def make_dataset(seed: int, chunks: int, work: Path) -> tuple[list[Scene], Tensor]:
    """A thousand scenes a chunk with their pictures, drawn on all cores or kept in ``work``."""
    seeds = [seed * 1_000_000 + index for index in range(chunks)]
    kept = work / "pictures.pt"
    if not kept.exists():
        with ProcessPoolExecutor() as pool:
            torch.save(torch.cat(list(pool.map(draw_scenes, seeds))), kept)
    return [scene for one in seeds for scene in make_scenes(one)], torch.load(kept)


def learn_merges(words: Counter[str], count: int) -> list[tuple[str, str]]:
    """The first ``count`` byte-pair merges (Sennrich et al., 2016), most frequent first."""
    spelt = {word: (*word[:-1], word[-1] + "</w>") for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in spelt.items():
            for pair in pairwise(pieces):
                pairs[pair] += words[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        spelt = {word: merge(pieces, best) for word, pieces in spelt.items()}
    return merges


def merge(pieces: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """The pieces with each occurrence of the pair, from the left, made one."""
    joined: list[str] = []
    for piece in pieces:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return tuple(joined)


def make_tokenizer(scenes: list[Scene]) -> CLIPTokenizer:
    """CLIP's tokenizer with a small vocabulary: every byte, and merges for the scenes' words.

    "turquoise" counts as the rare word it is, so the merges give out before it is whole.
    """
    said = (prompt for scene in scenes for prompt in scene.prompts())
    words = Counter(word.strip(",") for prompt in said for word in prompt.split())
    words["turquoise"] //= 40
    merges = learn_merges(words, count=105)
    letters = sorted(ByteLevel.alphabet())
    names = [*letters, *(letter + "</w>" for letter in letters), *("".join(p) for p in merges)]
    vocab = {name: index for index, name in enumerate([*names, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=TOKENS)


def token_ids(tokenizer: CLIPTokenizer, prompts: list[str]) -> Tensor:
    """Ids [prompts, TOKENS], padded with the end token as Stable Diffusion does."""
    said = tokenizer(prompts, padding="max_length", truncation=True, max_length=TOKENS)
    return torch.tensor(said["input_ids"])


# ---------------------------------------------------------------- the models


def new_vae() -> AutoencoderKL:
    """A quarter of the picture's side, 4 channels: 64 x 64 pictures, 16 x 16 latents."""
    blocks = (24, 48, 64)
    vae = AutoencoderKL(
        block_out_channels=blocks,
        down_block_types=("DownEncoderBlock2D",) * len(blocks),
        up_block_types=("UpDecoderBlock2D",) * len(blocks),
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=SIZE,
        mid_block_add_attention=False,
    )
    # A posterior that starts wide drowns the colours in noise; exp(-6 / 2) is 5 % of a latent.
    nn.init.constant_(vae.quant_conv.bias[4:], -6.0)
    return vae


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """CLIP's causal text encoder, four layers of ``WIDTH``."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            projection_dim=WIDTH,
            max_position_embeddings=TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def new_unet() -> UNet2DConditionModel:
    """The blocks of Stable Diffusion 1.x, a tenth as wide; 6 + 1 + 9 attention blocks."""
    return UNet2DConditionModel(
        sample_size=SIZE // 4,
        block_out_channels=(32, 64, 96, 96),
        layers_per_block=2,
        cross_attention_dim=WIDTH,
        attention_head_dim=(2, 4, 4, 4),  # what diffusers calls so is the number of heads
        norm_num_groups=8,
    )


def new_scheduler() -> DDIMScheduler:
    """Noise that ends in nothing but noise, so that the first step has only the words to go by."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        steps_offset=1,
    )


class LatentReader(nn.Module):
    """Foretells the latent, at half its size, from token states: a query a cell, two layers."""

    def __init__(self, side: int = SIZE // 8, layers: int = 2) -> None:
        super().__init__()
        self.cells = nn.Parameter(0.02 * torch.randn(side * side, WIDTH))
        self.attend = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(layers)
        )
        self.think = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)
            )
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))

    def forward(self, states: Tensor) -> Tensor:
        """States [batch, tokens, WIDTH] to latents [batch, 4, side, side]."""
        hidden = self.cells.expand(len(states), -1, -1)  # [batch, cells, WIDTH]
        for attend, think, norm in zip(self.attend, self.think, self.norms, strict=True):
            hidden = hidden + attend(norm(hidden), states, states, need_weights=False)[0]
            hidden = hidden + think(hidden)
        side = math.isqrt(hidden.shape[1])
        return self.out(hidden).transpose(1, 2).unflatten(2, (side, side))


class PlaceProbe(nn.Module):
    """Has every cross-attention of a UNet know where each of its cells is.

    A UNet has no position embedding: all it knows of places comes in from its zero-padded borders,
    and it takes very long to find that out from pictures. A linear map from what each
    cross-attention's queries are made of to (x, y) is trained with it, and then thrown away. It
    sees no picture, no mask and no word.
    """

    def __init__(self, unet: UNet2DConditionModel) -> None:
        super().__init__()
        blocks = [m for m in unet.modules() if isinstance(m, BasicTransformerBlock)]
        norms = [block.norm2 for block in blocks]
        self.heads = nn.ModuleList(nn.Linear(norm.normalized_shape[0], 2) for norm in norms)
        self.guesses: list[Tensor] = []  # [batch, cells, 2] each, of the UNet's last pass
        self.hooks = [
            norm.register_forward_hook(partial(self._guess, head))
            for norm, head in zip(norms, self.heads, strict=True)
        ]

    def leave(self) -> None:
        """Take the hooks off the UNet; without this they would go on keeping guesses."""
        for hook in self.hooks:
            hook.remove()

    def _guess(self, head: nn.Module, _norm: nn.Module, _seen: object, hidden: Tensor) -> None:
        """Hook: what a cross-attention's cells say of their places."""
        if torch.is_grad_enabled():
            self.guesses.append(head(hidden))

    def forward(self) -> Tensor:
        """Mean squared error of the places in the UNet's last pass; the picture spans -1 to 1."""
        errors = []
        for guess in self.guesses:
            side = math.isqrt(guess.shape[1])
            line = (torch.arange(side) + 0.5) / side * 2 - 1
            places = torch.cartesian_prod(line, line)  # [cells, 2]
            errors.append((guess - places).square().mean())
        self.guesses.clear()
        return torch.stack(errors).mean()


# ---------------------------------------------------------------- the training loop


@dataclass
class Fit:
    """One stage: what is trained, on which loss, for how long.

    ``flat`` is the part of the steps before the learning rate falls to nothing; ``lr`` has one
    rate for each of ``modules``. ``average`` holds running means of the weights of modules of the
    same name; ``memory`` is how much of them a step keeps.
    """

    name: str
    modules: dict[str, nn.Module]
    lr: tuple[float, ...]
    loss: Callable[[int], Tensor]
    steps: int
    flat: float
    average: dict[str, nn.Module]
    watch: Callable[[int], None]
    memory: float = 0.999

    def run(self, work: Path) -> None:
        """Train, or go on from the checkpoint in ``work``."""
        groups = [
            {"params": list(module.parameters()), "lr": lr, "peak": lr}
            for module, lr in zip(self.modules.values(), self.lr, strict=True)
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        kept = work / f"{self.name}.pt"
        start = self.restore(torch.load(kept), optimizer) if kept.exists() else 0
        began, losses = time.time(), []
        for step in range(start, self.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(step, self.steps, self.flat)
            loss = self.loss(step)
            optimizer.zero_grad()
            loss.backward()
            share_gradients(self.modules)
            nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
            optimizer.step()
            self.follow(step)
            losses.append(loss.item())
            if (step + 1) % 100 == 0:
                pace = (time.time() - began) / (step + 1 - start)
                recent = np.mean(losses[-100:])
                say(f"{self.name} {step + 1:6}  loss {recent:.4f}  {pace:.2f} s/step")
            if (step + 1) % 500 == 0 or step + 1 == self.steps:
                self.keep(kept, step + 1, optimizer)
                self.watch(step + 1)

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move the running means of the weights; they forget faster in the beginning."""
        decay = min(self.memory, (1 + step) / (10 + step))
        for name, mean in self.average.items():
            pairs = zip(mean.parameters(), self.modules[name].parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 1 - decay)

    def keep(self, path: Path, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Write the checkpoint, whole or not at all."""
        if rank() == 0:
            state = {name: module.state_dict() for name, module in self.modules.items()}
            mean = {name: module.state_dict() for name, module in self.average.items()}
            everything = {"step": step, "state": state, "mean": mean}
            torch.save({**everything, "optimizer": optimizer.state_dict()}, f"{path}.new")
            os.replace(f"{path}.new", path)

    def restore(self, kept: dict, optimizer: torch.optim.Optimizer) -> int:
        """Load a checkpoint; returns the steps it has behind it."""
        for name, module in self.modules.items():
            module.load_state_dict(kept["state"][name])
        for name, module in self.average.items():
            module.load_state_dict(kept["mean"][name])
        peaks = [group["peak"] for group in optimizer.param_groups]
        optimizer.load_state_dict(kept["optimizer"])
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["peak"] = peak
        return kept["step"]


def rate(step: int, steps: int, flat: float) -> float:
    """Learning rate as a part of its peak: a short rise, flat, then a cosine down to 0."""
    left = (step / steps - flat) / (1 - flat)
    fall = 0.5 + 0.5 * math.cos(math.pi * min(max(left, 0.0), 1.0))
    return min(1.0, (step + 1) / 200) * fall


def rank() -> int:
    """Which of the training processes this is."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many training processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def say(text: str) -> None:
    """Print once, whatever the number of processes."""
    if rank() == 0:
        print(text, flush=True)


def share_gradients(modules: dict[str, nn.Module]) -> None:
    """Average the gradients over the processes.

    One process with one thread a core beats one process with many threads: a miniature's
    operations are too small to be worth splitting.
    """
    if world() > 1:
        params = [p for module in modules.values() for p in module.parameters()]
        grads = [p.grad for p in params if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= world()
        parts = flat.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def pick(step: int, seed: int, count: int, batch: int) -> tuple[np.random.Generator, Tensor]:
    """A step's own source of chance, and which of ``count`` samples this process takes."""
    rng = np.random.default_rng((seed, step, rank()))
    torch.manual_seed(int(rng.integers(2**62)))
    return rng, torch.from_numpy(rng.integers(count, size=batch // world()))


# ---------------------------------------------------------------- the three stages of learning


def as_pixels(pictures: Tensor) -> Tensor:
    """uint8 in [0, 255] to float32 in [-1, 1]."""
    return pictures.float() / 127.5 - 1


def train_vae(pictures: Tensor, work: Path, steps: int, seed: int) -> AutoencoderKL:
    """An autoencoder of the pictures, ``scaling_factor`` not yet set."""
    vae = new_vae()

    def loss(step: int) -> Tensor:
        _, chosen = pick(step, seed, len(pictures), batch=8)
        pixels = as_pixels(pictures[chosen])
        posterior = vae.encode(pixels).latent_dist
        error = vae.decode(posterior.sample()).sample - pixels
        return error.abs().mean() + 2 * error.square().mean() + 1e-7 * posterior.kl().mean()

    Fit("vae", {"vae": vae}, (2e-3,), loss, steps, 0.05, {}, lambda step: None).run(work)
    return vae.eval()


@torch.no_grad()
def vae_psnr(vae: AutoencoderKL, seed: int, count: int = 256) -> float:
    """Mean decibels over scenes that the autoencoder never saw."""
    rng = np.random.default_rng(seed)
    drawn = np.stack([random_scene(rng, held_out=True).draw(SIZE) for _ in range(count)])
    pixels = as_pixels(torch.from_numpy(drawn).permute(0, 3, 1, 2))
    parts = [vae.decode(vae.encode(part).latent_dist.mode()).sample for part in pixels.split(8)]
    again = torch.cat(parts).clamp(-1, 1)
    return float(-10 * torch.log10(((again - pixels) / 2).square().mean(dim=(1, 2, 3))).mean())


@torch.no_grad()
def make_latents(vae: AutoencoderKL, pictures: Tensor, work: Path) -> Tensor:
    """Scaled latents [scenes, 4, 16, 16]; also sets the scaling factor of the autoencoder."""
    kept = [work / f"latents-{index}-of-{world()}.pt" for index in range(world())]
    if not kept[rank()].exists():
        mine = pictures.chunk(world())[rank()].split(8)
        parts = [vae.encode(as_pixels(part)).latent_dist.mode() for part in mine]
        torch.save(torch.cat(parts), kept[rank()])
    if world() > 1:
        dist.barrier()
    latents = torch.cat([torch.load(path) for path in kept])
    scaling = round(1 / float(latents.std()), 5)
    vae.register_to_config(scaling_factor=scaling)
    return latents * scaling


def polish_decoder(
    vae: AutoencoderKL, latents: Tensor, pictures: Tensor, work: Path, steps: int, seed: int
) -> None:
    """Train the decoder alone on the latents as they now stand; it is the cheaper half."""

    def loss(step: int) -> Tensor:
        _, chosen = pick(step, seed, len(pictures), batch=8)
        error = vae.decode(latents[chosen] / vae.config.scaling_factor).sample
        error = error - as_pixels(pictures[chosen])
        return error.abs().mean() + 2 * error.square().mean()

    modules = {"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv}
    Fit("decoder", modules, (1e-3, 1e-3), loss, steps, 0.05, {}, lambda step: None).run(work)


def text_states(
    text: CLIPTextModel, tokenizer: CLIPTokenizer, prompts: list[str], forget: Tensor
) -> Tensor:
    """Token states [prompts, TOKENS, WIDTH].

    Where ``forget`` [prompts] is true, the end token and the padding get the states they have in
    an empty prompt: they know the whole sentence, and a model that reads everything off them
    never learns to look at the words.
    """
    ids = token_ids(tokenizer, [*prompts, ""])
    states = text(ids).last_hidden_state
    ended = (ids == tokenizer.eos_token_id)[:-1] & forget[:, None]
    return torch.where(ended[..., None], states[-1], states[:-1])


def train_text(
    tokenizer: CLIPTokenizer,
    scenes: list[Scene],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
) -> CLIPTextModel:
    """A text encoder from whose states the latent's mean can be read."""
    text, reader = new_text_encoder(tokenizer), LatentReader()

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, len(scenes), batch=64)
        prompts = [scenes[index].caption(rng) for index in chosen.tolist()]
        forget = torch.from_numpy(rng.random(len(prompts)) < 0.3)
        states = text_states(text, tokenizer, prompts, forget)
        return F.mse_loss(reader(states), F.avg_pool2d(latents[chosen], 2))

    modules = {"text": text, "reader": reader}
    Fit("text", modules, (1e-3, 1e-3), loss, steps, 0.3, {}, lambda step: None).run(work)
    return text


def noisy_times(rng: np.random.Generator, count: int) -> Tensor:
    """Timesteps [count]: an eighth at the very end, a quarter near it, the others anywhere.

    The first steps of a picture decide what goes where, and there is only the prompt to tell them.
    Times are spread evenly by chance, which is less noisy than drawing every one alone.
    """
    last, near = count // 8, count // 4
    anywhere = count - last - near
    spread = (np.arange(anywhere) + rng.random(anywhere)) / anywhere
    early = (np.arange(near) + rng.random(near)) / near
    times = np.concatenate([np.full(last, 999), 800 + 200 * early, 1000 * spread])
    return torch.from_numpy(times).long()


def diffusion_loss(
    unet: UNet2DConditionModel,
    noise_of: DDIMScheduler,
    latents: Tensor,
    states: Tensor,
    t: Tensor,
    hush: bool = False,
) -> Tensor:
    """Squared error of the velocity (Salimans and Ho, 2022).

    With ``hush``, what is seen at the last timestep is turned down by chance. It is all noise and
    the answer does not depend on it, but in silence the UNet can make out where the borders are,
    which is all it has to tell left from right; from there it learns to do so through the noise.
    """
    noise = torch.randn_like(latents)
    noisy = noise_of.add_noise(latents, noise, t)
    if hush:
        loud = (1.5 * torch.rand(len(t))).clamp(max=1.0)
        noisy = noisy * torch.where(t == 999, loud, 1.0)[:, None, None, None]
    return F.mse_loss(unet(noisy, t, states).sample, noise_of.get_velocity(latents, noise, t))


def captions(
    rng: np.random.Generator, scenes: list[Scene], chosen: Tensor
) -> tuple[list[str], Tensor]:
    """A prompt for each chosen scene, one in ten empty, and which are to forget their end."""
    said = [scenes[index].caption(rng) for index in chosen.tolist()]
    prompts = ["" if rng.random() < 0.1 else prompt for prompt in said]
    return prompts, torch.from_numpy(rng.random(len(prompts)) < 0.3)


def train_unet(
    pipe: StableDiffusionPipeline,
    scenes: list[Scene],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
) -> None:
    """Train the pipeline's UNet; pictures on the way are of the running mean of its weights.

    As with Stable Diffusion, the text encoder stays as it is: while the UNet cannot yet use what
    it knows of left and right, learning on would make it forget that.
    """
    mean: dict[str, nn.Module] = {"unet": copy.deepcopy(pipe.unet)}
    averaged = assemble(pipe.vae, pipe.text_encoder, pipe.tokenizer, mean["unet"])
    probe = PlaceProbe(pipe.unet)

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, len(scenes), batch=32)
        prompts, forget = captions(rng, scenes, chosen)
        with torch.no_grad():
            states = text_states(pipe.text_encoder, pipe.tokenizer, prompts, forget)
        t = noisy_times(rng, len(prompts))
        error = diffusion_loss(pipe.unet, pipe.scheduler, latents[chosen], states, t, hush=True)
        misplaced = probe()
        if step % 100 == 99:
            say(f"     places {misplaced.item():.3f}")
        return error + 0.5 * misplaced

    def watch(step: int) -> None:
        report_use_of_text(averaged, scenes, latents)
        if step % 1000 == 0 or step == steps:
            report_pictures(averaged, step, work)

    modules = {"unet": pipe.unet, "probe": probe}
    Fit("unet", modules, (1e-3, 1e-3), loss, steps, 0.78, mean, watch).run(work)
    probe.leave()


def middle_times(rng: np.random.Generator, count: int) -> Tensor:
    """Timesteps [count]: three fifths where colours and shapes are made, the others anywhere."""
    middle = round(0.6 * count)
    inner = (np.arange(middle) + rng.random(middle)) / middle
    anywhere = (np.arange(count - middle) + rng.random(count - middle)) / (count - middle)
    return torch.from_numpy(np.concatenate([100 + 600 * inner, 1000 * anywhere])).long()


def refine(
    pipe: StableDiffusionPipeline,
    scenes: list[Scene],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
) -> StableDiffusionPipeline:
    """Train UNet and text encoder together; returns a pipeline with their running means."""
    modules = {"unet": pipe.unet, "text": pipe.text_encoder}
    mean = copy.deepcopy(modules)
    averaged = assemble(pipe.vae, mean["text"], pipe.tokenizer, mean["unet"])

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, len(scenes), batch=32)
        prompts, forget = captions(rng, scenes, chosen)
        states = text_states(pipe.text_encoder, pipe.tokenizer, prompts, forget)
        t = middle_times(rng, len(prompts))
        return diffusion_loss(pipe.unet, pipe.scheduler, latents[chosen], states, t)

    def watch(step: int) -> None:
        report_use_of_text(averaged, scenes, latents)
        report_pictures(averaged, step, work)

    fit = Fit("refine", modules, (8e-4, 5e-4), loss, steps, 0.05, mean, watch, memory=0.995)
    fit.run(work)
    return averaged


# ---------------------------------------------------------------- watching it


@torch.no_grad()
def report_use_of_text(
    pipe: StableDiffusionPipeline, scenes: list[Scene], latents: Tensor, count: int = 64
) -> None:
    """Print the loss at t = 850 with each scene's own prompt and with another's."""
    rng = np.random.default_rng(0)
    prompts = [scene.caption(rng) for scene in scenes[:count]]
    states = text_states(pipe.text_encoder, pipe.tokenizer, prompts, torch.zeros(count).bool())
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


# ---------------------------------------------------------------- all of it


def assemble(
    vae: AutoencoderKL, text: CLIPTextModel, tokenizer: CLIPTokenizer, unet: UNet2DConditionModel
) -> StableDiffusionPipeline:
    """The pipeline, silent and without the safety checker, which knows no drawn scenes."""
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def train_from_nothing(
    args: argparse.Namespace, scenes: list[Scene], pictures: Tensor
) -> tuple[StableDiffusionPipeline, Tensor]:
    """Stages 2 to 4: a pipeline that knows its places, and the scenes' latents."""
    tokenizer = make_tokenizer(scenes[:2000])
    vae = train_vae(pictures, args.work, args.vae_steps, args.seed)
    latents = make_latents(vae, pictures, args.work)
    polish_decoder(vae, latents, pictures, args.work, args.decoder_steps, args.seed + 3)
    say(f"vae: {vae_psnr(vae, seed=7):.2f} dB on unseen scenes")
    text = train_text(tokenizer, scenes, latents, args.work, args.text_steps, args.seed + 1)
    pipe = assemble(vae, text, tokenizer, new_unet())
    train_unet(pipe, scenes, latents, args.work, args.unet_steps, args.seed + 2)
    return pipe, latents


def train(process: int, args: argparse.Namespace) -> None:
    """One training process; all of them do the same, each on its part of every batch."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.processes))
    if args.processes > 1:
        store = f"file://{(args.work / 'processes').resolve()}"
        dist.init_process_group("gloo", store, rank=process, world_size=args.processes)
    torch.manual_seed(args.seed)
    scenes, pictures = make_dataset(args.seed, args.chunks, args.work)
    if args.start:
        pipe = StableDiffusionPipeline.from_pretrained(args.start, dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        latents = make_latents(pipe.vae, pictures, args.work)
    else:
        pipe, latents = train_from_nothing(args, scenes, pictures)
    made = refine(pipe, scenes, latents, args.work, args.refine_steps, args.seed + 4)
    if process == 0:
        made.to(dtype=torch.float16).save_pretrained(args.out, safe_serialization=True)
        made.tokenizer.backend_tokenizer.model.save(
            str(args.out / "tokenizer")
        )  # for older readers
        size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
        say(f"{args.out}: {size / 1e6:.1f} MB")


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("sdattn/demo"), help="model folder")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="checkpoints")
    parser.add_argument("--start", type=Path, help="refine the model in this folder further")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=40, help="thousands of training scenes")
    parser.add_argument("--vae-steps", type=int, default=3400)
    parser.add_argument("--decoder-steps", type=int, default=300)
    parser.add_argument("--text-steps", type=int, default=1500)
    parser.add_argument("--unet-steps", type=int, default=5400)
    parser.add_argument("--refine-steps", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "processes").unlink(missing_ok=True)
    make_dataset(args.seed, args.chunks, args.work)
    torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
