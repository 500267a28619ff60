"""What the stages learn from: text states, noise levels and the loss of diffusion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPTextModel, CLIPTokenizer

from sdattn.scenes import COLOURS, SHAPES, Scene

from .data import token_ids

# How often a prompt is read as it is, with its end forgotten, or with all but the first object's
# own words mistaken about that object.
READINGS = (0.35, 0.15, 0.5)
LAST_READINGS = (0.75, 0.05, 0.2)  # towards the end, when words have found their objects


def text_states(
    text: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    prompts: list[str],
    mistaken: list[str],
    reading: Tensor,
) -> Tensor:
    """Token states [prompts, TOKENS, WIDTH].

    The encoder is causal, so the later a token, the more it knows: "left" and "square" in "a red
    circle left of a blue square" know of the red circle, and the end token and the padding know it
    all. A model that reads everything off them never learns to look at the words. Where
    ``reading`` [prompts] is 1, end and padding get the states they have in an empty prompt. Where
    it is 2, all tokens get the states they have in the prompt of ``mistaken``, which differs in
    the first object's words, but for those words themselves.
    """
    ids = token_ids(tokenizer, [*prompts, *mistaken, ""])
    states = text(ids).last_hidden_state
    (true_ids, other_ids), (true, other) = ids[:-1].chunk(2), states[:-1].chunk(2)
    wrong = (true_ids == other_ids) & (reading == 2)[:, None]
    ended = (true_ids == tokenizer.eos_token_id) & (reading == 1)[:, None]
    return torch.where(ended[..., None], states[-1], torch.where(wrong[..., None], other, true))


def captions(
    rng: np.random.Generator,
    scenes: list[Scene],
    chosen: Tensor,
    readings: tuple[float, float, float] = READINGS,
) -> tuple[list[str], list[str], Tensor]:
    """A prompt for each chosen scene, one in ten empty; the same with another first object; and
    how each is to be read."""
    prompts, mistaken = [], []
    for index in chosen.tolist():
        scene = scenes[index]
        said = scene.prompts()
        wording = int(rng.integers(len(said)))
        empty = rng.random() < 0.1
        prompts.append("" if empty else said[wording])
        mistaken.append("" if empty else another_first(rng, scene).prompts()[wording])
    return prompts, mistaken, torch.from_numpy(rng.choice(3, len(prompts), p=readings))


def another_first(rng: np.random.Generator, scene: Scene) -> Scene:
    """The scene with another shape, and where it leaves all tokens in place another colour, for
    its first object: "orange" wants another article, and "turquoise" has more pieces."""
    first, *others = scene.objects
    shapes = [shape for shape in SHAPES if shape != first.shape]
    like = [colour for colour in COLOURS if colour not in ("orange", "turquoise")]
    colours = like if first.colour in like else [first.colour]
    changed = replace(
        first,
        shape=shapes[int(rng.integers(len(shapes)))],
        colour=colours[int(rng.integers(len(colours)))],
    )
    return replace(scene, objects=(changed, *others))


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


def middle_times(rng: np.random.Generator, count: int) -> Tensor:
    """Timesteps [count]: three fifths where colours and shapes are made, the others anywhere."""
    middle = round(0.6 * count)
    inner = (np.arange(middle) + rng.random(middle)) / middle
    anywhere = (np.arange(count - middle) + rng.random(count - middle)) / (count - middle)
    return torch.from_numpy(np.concatenate([100 + 600 * inner, 1000 * anywhere])).long()


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
