"""What the demo of sprites is made of: its recipe, tokenizer, mistakes and decoder.

RECIPE                     what differs from the demo of shapes
make_word_tokenizer()      a token for each word that training says, letters for all others
write_latents(...)         the main components of patches, and the latents of all scenes
train_decoder(...)         latents back to images
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from torch import Tensor
from transformers import CLIPTokenizer

from ..scenes.emoji import Scene, Thing, random_scene
from ..scenes.grounds import PLACES, PLAIN
from ..scenes.sprites import COLOURABLE, COLOURS, nouns
from ..scenes.wording import further_words
from .autoencoder import UNSEEN_SPRITES, as_pixels, unlike, vae_psnr
from .data import SIZE, learn_merges, tokenizer_of
from .fit import FLAT, TOGETHER, Fit, note, pick, rank
from .losses import another
from .models import FACTOR, new_unet
from .patches import CHANNELS, Patches, fit_patches, new_patch_vae
from .stages import Recipe

TOKENS = 77  # of a prompt, as Stable Diffusion 1.x has
WIDTHS = (64, 80, 96, 64)
SETTINGS = {"num_inference_steps": 20, "guidance_scale": 7.5}
WORDS = {
    "nouns": nouns(),
    "colours": tuple(COLOURS),
    "backgrounds": (*PLAIN, *PLACES),
    "further": further_words(),
}
CELLS = 8  # a side of the crops that the decoder sees
CROPPED = 0.8  # part of its steps that see crops
FITTED_TO = 2000  # scenes whose patches decide the components


def new_sprite_unet() -> UNet2DConditionModel:
    """Return the UNet, 6.4 M parameters in Stable Diffusion's 6 + 1 + 9 attention blocks."""
    return new_unet(CHANNELS, WIDTHS, heads=(4, 4, 4, 4))


def make_word_tokenizer() -> CLIPTokenizer:
    """Return CLIP's tokenizer with a token for each word of ``WORDS``; other words are spelt, in
    letters or in pieces of known words."""
    words = Counter(word for kind in WORDS.values() for word in kind)
    return tokenizer_of(learn_merges(Counter(dict.fromkeys(words, 1)), None), TOKENS)


def all_mistaken(rng: np.random.Generator, scene: Scene) -> list[Scene]:
    """Return the scene with other colours for its coloured objects, then with other nouns too.

    A colour word is right in the scene alone, a noun in the first of these as well, where it does
    not know of the colours, and all other words know nothing of either.
    """
    recoloured = tuple(_recoloured(rng, thing) for thing in scene.objects)
    renamed = tuple(_renamed(rng, thing) for thing in recoloured)
    return [replace(scene, objects=changed) for changed in (recoloured, renamed)]


def another_first(rng: np.random.Generator, scene: Scene) -> list[Scene]:
    """Return the scene with another noun for its first object, and another colour if it has one."""
    first, *others = scene.objects
    changed = _renamed(rng, _recoloured(rng, first))
    return [replace(scene, objects=(changed, *others))]


def _recoloured(rng: np.random.Generator, thing: Thing) -> Thing:
    return replace(thing, colour=another(rng, COLOURS, thing.colour)) if thing.colour else thing


def _renamed(rng: np.random.Generator, thing: Thing) -> Thing:
    others = COLOURABLE if thing.colour else nouns()
    return replace(thing, noun=another(rng, others, thing.noun))


def report_images(
    pipe: StableDiffusionPipeline, stage: str, step: int, work: Path, count: int = 24
) -> None:
    """Draw unseen prompts, always the same; keep a sheet of them, and what they were."""
    if rank() != 0:
        return
    rng = np.random.default_rng(99)
    prompts = [random_scene(rng, held_out=True).caption(rng) for _ in range(count)]
    chance = [torch.Generator().manual_seed(index) for index in range(count)]
    images = pipe(prompts, generator=chance, output_type="np", **SETTINGS).images
    rows = [np.hstack(images[first : first + 6]) for first in range(0, count, 6)]
    Image.fromarray((255 * np.vstack(rows)).astype(np.uint8)).save(work / f"{stage}-{step:06}.png")
    (work / "prompts.txt").write_text("\n".join(prompts) + "\n")


def write_latents(images: Tensor, work: Path) -> tuple[Patches, Tensor]:
    """Return the components of the first scenes' patches, and latents [scenes, CHANNELS, 16, 16] of
    all scenes; both are kept in ``work``."""
    kept = work / "latents.pt"
    if not kept.exists():
        patches = fit_patches(images[:FITTED_TO])
        latents = torch.cat([patches.encode(part) for part in images.split(1000)])
        torch.save((patches.mean, patches.weight, latents), f"{kept}.new")
        os.replace(f"{kept}.new", kept)
    mean, weight, latents = torch.load(kept, mmap=True)
    return Patches(mean.clone(), weight.clone()), latents


def train_decoder(
    patches: Patches,
    latents: Tensor,
    images: Tensor,
    work: Path,
    steps: int,
    seed: int,
    recipe: Recipe,
) -> AutoencoderKL:
    """Return an autoencoder whose decoder has learnt to draw the images from their latents.

    Most steps see a quarter of each image, in a quarter of the time; the last see whole ones, since
    the norms' means are others there. A little noise stands for the UNet's errors.
    """
    torch.manual_seed(seed)
    vae = new_patch_vae(patches, SIZE).to(recipe.device)
    if not recipe.on_gpu:
        vae = vae.to(memory_format=torch.channels_last)
    latents, images = latents.to(recipe.device), images.to(recipe.device)

    whole_from = round(CROPPED * steps) // TOGETHER * TOGETHER

    def sample(step: int) -> tuple[Tensor, ...]:
        rng, chosen = pick(step, seed, torch.arange(len(images)), batch=recipe.batch // 2)
        cells = CELLS if step < whole_from else SIZE // FACTOR
        corner = rng.integers(SIZE // FACTOR - cells, size=2, endpoint=True).tolist()
        rows, columns = (first + torch.arange(cells) for first in corner)
        return chosen, rows, columns

    def loss(chosen: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        seen = cut(latents, chosen, rows, columns)
        noisy = seen + 0.05 * torch.randn_like(seen)
        if not recipe.on_gpu:
            noisy = noisy.contiguous(memory_format=torch.channels_last)
        with recipe.context():
            drawn = vae.decode(noisy).sample
        pixels = cut(images, chosen, pixels_of(rows), pixels_of(columns))
        return unlike(drawn.float(), as_pixels(pixels))

    def watch(step: int) -> None:
        decibels = vae_psnr(vae, seed=7, count=48, make=UNSEEN_SPRITES)
        note(work, "decoder", step, decibels=decibels)

    modules = {"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv}
    Fit(
        "decoder",
        modules,
        (2e-3, 2e-3),
        loss,
        steps,
        FLAT["decoder"],
        {},
        watch,
        sample=sample,
        device=recipe.device,
    ).run(work)
    return vae.eval()


def cut(images: Tensor, chosen: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return rows and columns of the chosen ones of images [count, channels, height, width]."""
    channels = torch.arange(images.shape[1], device=images.device)[:, None, None]
    return images[chosen[:, None, None, None], channels, rows[:, None], columns]


def pixels_of(cells: Tensor) -> Tensor:
    """Return the rows, or columns, of pixels that those of cells cover."""
    return (cells[:, None] * FACTOR + torch.arange(FACTOR, device=cells.device)).flatten()


# Without AVX512 bfloat16 is emulated, many times slower than float32, and compiling gains nothing.
FAST_HALF = torch.backends.cpu.get_cpu_capability() == "AVX512"
RECIPE = Recipe(
    unet=new_sprite_unet,
    mistakes=(all_mistaken, another_first),
    report=report_images,
    channels=CHANNELS,
    compiled=FAST_HALF,
    context=partial(torch.autocast, "cpu", torch.bfloat16, enabled=FAST_HALF),
)
