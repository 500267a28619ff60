"""What the stages learn from: text states, noise levels and the loss of diffusion."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPTextModel, CLIPTokenizer

from sdattn.scenes import BACKGROUNDS, COLOURS, SHAPES, Scene

from .data import token_ids

FORGET = (0.5, 0.25, 0.25)  # how often a prompt forgets nothing, its end, or all but names


def text_states(
    text: CLIPTextModel, tokenizer: CLIPTokenizer, prompts: list[str], forget: Tensor
) -> Tensor:
    """Token states [prompts, TOKENS, WIDTH].

    Where ``forget`` [prompts] is 1, the end token and the padding get the states they have in
    an empty prompt: they know the whole sentence, and a model that reads everything off them
    never learns to look at the words. Where it is 2, so do all words that name no colour, shape
    or background: in "a red circle left of ..." the encoder lets "left" know of the circle.
    """
    ids = token_ids(tokenizer, [*prompts, ""])
    states = text(ids).last_hidden_state
    names = tokenizer(" ".join((*COLOURS, *SHAPES, *BACKGROUNDS)), add_special_tokens=False)
    ended = (ids == tokenizer.eos_token_id)[:-1] & (forget >= 1)[:, None]
    vague = ~torch.isin(ids[:-1], torch.tensor(names["input_ids"])) & (forget == 2)[:, None]
    return torch.where((ended | vague)[..., None], states[-1], states[:-1])


def captions(
    rng: np.random.Generator, scenes: list[Scene], chosen: Tensor
) -> tuple[list[str], Tensor]:
    """A prompt for each chosen scene, one in ten empty, and which are to forget their end."""
    said = [scenes[index].caption(rng) for index in chosen.tolist()]
    prompts = ["" if rng.random() < 0.1 else prompt for prompt in said]
    return prompts, torch.from_numpy(rng.choice(3, len(prompts), p=FORGET))


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
