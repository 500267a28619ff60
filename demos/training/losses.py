"""What the stages learn from: text states, noise levels and the loss of diffusion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPTextModel, CLIPTokenizer

from ..scenes.shapes import COLOURS, SHAPES, Scene
from .data import token_ids

# How often a prompt is read as it is, with its end forgotten, or with each word relied on only for
# what it says itself.
READINGS = (0.3, 0.1, 0.6)
LAST_READINGS = (0.75, 0.05, 0.2)  # when words have found their objects
ALL_OBJECTS = 0.6  # of the mistaken prompts: about all objects, the rest about the first alone
ARTICLES = ("a", "an")

Mistake = Callable[[np.random.Generator, Any], list[Any]]


@dataclass(frozen=True)
class Caption:
    """A prompt and how it is read.

    Attributes:
        prompt: what is said; "" for nothing.
        reading: 0: as it is. 1: end and padding have the states they have in an empty prompt.
            2: each word has the state it has in the most mistaken prompt that has this word too,
            end and padding those of the most mistaken.
        mistaken: the same wording of other objects, from the least to the most mistaken.
    """

    prompt: str
    reading: int
    mistaken: tuple[str, ...]


def text_states(text: CLIPTextModel, tokenizer: CLIPTokenizer, captions: list[Caption]) -> Tensor:
    """Return token states [captions, tokens, WIDTH] of a text encoder's last layer."""
    return states_at(text, *ids_and_places(tokenizer, captions))


def ids_and_places(
    tokenizer: CLIPTokenizer, captions: list[Caption], rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the ids [texts, tokens] of all that is read, ``rows`` texts at least, and where among
    their states each caption's are, [captions, tokens]."""
    texts, places = readings(tokenizer, captions)
    return token_ids(tokenizer, texts + [""] * (rows - len(texts))), places


def states_at(text: CLIPTextModel, ids: Tensor, places: Tensor) -> Tensor:
    """Return the states [captions, tokens, WIDTH] of a text encoder's last layer that are at
    ``places`` among those of ``ids``."""
    states = text(ids.to(text.device)).last_hidden_state
    return F.embedding(places.to(states.device), states.flatten(0, 1))


def read_states(
    states_of: Callable[[list[str]], Tensor], tokenizer: CLIPTokenizer, captions: list[Caption]
) -> Tensor:
    """Return token states [captions, tokens, features], each prompt read as its caption says;
    ``states_of`` gives those of prompts as they are."""
    texts, places = readings(tokenizer, captions)
    states = states_of(texts)  # [texts, tokens, features]
    return F.embedding(places.to(states.device), states.flatten(0, 1))


def readings(tokenizer: CLIPTokenizer, captions: list[Caption]) -> tuple[list[str], Tensor]:
    """Return the texts that have to be encoded and, for each caption, where among all their states
    its own are, [captions, tokens].

    The encoder is causal, so the later a token, the more it knows: "left" and "square" in "a red
    circle left of a blue square" know of the red circle, "circle" knows that it is red, and the
    end token and the padding know it all. A model that reads everything off them never learns to
    look at the words. Hence the readings, in which only some words can be relied on.
    """
    read = [said for one in captions if one.reading == 2 for said in one.mistaken]
    texts = list(dict.fromkeys(["", *(one.prompt for one in captions), *read]))
    tokens = tokenizer.model_max_length
    rows = {said: tokens * row for row, said in enumerate(texts)}
    words = {word for said in texts for word in split(said)}
    lengths = {word: len(tokenizer(word)["input_ids"]) - 2 for word in words}
    places = [[rows[said] + at for said, at in sources(one, lengths, tokens)] for one in captions]
    return texts, torch.tensor(places)


def split(text: str) -> list[str]:
    """The words and commas of a prompt, which the tokenizer reads one by one."""
    return re.findall(r"\w+|,", text)


def sources(caption: Caption, lengths: Mapping[str, int], tokens: int) -> list[tuple[str, int]]:
    """Return for each of so many columns the text, and the column of it, that its state is taken
    from.

    ``lengths`` says how many tokens a word has. "turquoise" has more than "red", so what comes
    after them stands in other columns.
    """
    prompt = caption.prompt
    if caption.reading != 2:
        end = 1 + sum(lengths[word] for word in split(prompt))
        after = "" if caption.reading == 1 else prompt
        return [(prompt if column < end else after, column) for column in range(tokens)]
    versions = (prompt, *caption.mistaken)
    at, last = [1] * len(versions), versions[-1]
    found = [(last, 0)]
    for word, *others in zip(*map(split, versions), strict=True):
        like = [0, *(i for i, other in enumerate(others, 1) if other == word)]
        # of the articles none is relied on, since "an" would tell "orange"
        which = len(others) if word in ARTICLES else like[-1]
        pieces = range(at[which], at[which] + lengths[word])
        found += [(versions[which], piece) for piece in pieces]
        at = [one + lengths[other] for one, other in zip(at, (word, *others), strict=True)]
    rest = range(tokens - len(found))
    return found + [(last, min(at[-1] + column, tokens - 1)) for column in rest]


def captions(
    rng: np.random.Generator,
    scenes: list[Scene],
    chosen: Tensor,
    readings: tuple[float, float, float] = READINGS,
    mistakes: tuple[Mistake, Mistake] | None = None,
) -> list[Caption]:
    """Return what is said of each chosen scene; nothing of one in ten.

    ``mistakes`` makes the mistaken scenes, about all objects or about the first alone; by default
    those of shapes.
    """
    made = []
    about_all, about_first = mistakes or (all_mistaken, another_first)
    for index in chosen.tolist():
        scene = scenes[index]
        said = scene.prompts()
        wording = int(rng.integers(len(said)))
        mistake = about_all if rng.random() < ALL_OBJECTS else about_first
        others = [wrong.prompts()[wording] for wrong in mistake(rng, scene)]
        reading = int(rng.choice(3, p=readings))
        empty = rng.random() < 0.1
        versions = ("", "") if empty else (said[wording], *others)
        made.append(Caption(versions[0], reading, versions[1:]))
    return made


def all_mistaken(rng: np.random.Generator, scene: Scene) -> list[Scene]:
    """The scene with other colours for all objects, and then with other shapes as well.

    Colour words are right in the scene alone, shape words in the first of these too, where they do
    not know of the colours, and all other words know nothing of either.
    """
    objects = scene.objects
    recoloured = tuple(replace(one, colour=another(rng, COLOURS, one.colour)) for one in objects)
    reshaped = tuple(replace(one, shape=another(rng, SHAPES, one.shape)) for one in recoloured)
    return [replace(scene, objects=changed) for changed in (recoloured, reshaped)]


def another_first(rng: np.random.Generator, scene: Scene) -> list[Scene]:
    """The scene with another shape, and any colour, for its first object."""
    first, *others = scene.objects
    colour = list(COLOURS)[int(rng.integers(len(COLOURS)))]
    changed = replace(first, shape=another(rng, SHAPES, first.shape), colour=colour)
    return [replace(scene, objects=(changed, *others))]


def another(rng: np.random.Generator, names: Iterable[str], own: str) -> str:
    """One of the names, but not its own."""
    others = [name for name in names if name != own]
    return others[int(rng.integers(len(others)))]


def noisy_times(rng: np.random.Generator, count: int) -> Tensor:
    """Timesteps [count]: an eighth at the very end, a quarter near it, the others anywhere.

    The first steps of an image decide what goes where, and there is only the prompt to tell them.
    Times are spread evenly by chance, which is less noisy than drawing every one alone.
    """
    last, near = count // 8, count // 4
    anywhere = count - last - near
    spread = (np.arange(anywhere) + rng.random(anywhere)) / anywhere
    early = (np.arange(near) + rng.random(near)) / near
    times = np.concatenate([np.full(last, 999), 800 + 200 * early, 1000 * spread])
    return torch.from_numpy(times).long()


def middle_times(rng: np.random.Generator, count: int) -> Tensor:
    """Timesteps [count]: half where colours and shapes are made, a quarter before that, where it
    is decided what goes where, the others anywhere."""
    middle, early = round(0.5 * count), round(0.25 * count)
    parts = [(100, 600, middle), (700, 300, early), (0, 1000, count - middle - early)]
    times = [
        first + span * (np.arange(number) + rng.random(number)) / number
        for first, span, number in parts
    ]
    return torch.from_numpy(np.concatenate(times)).long()


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
        loud = (1.5 * torch.rand(len(t), device=t.device)).clamp(max=1.0)
        noisy = noisy * torch.where(t == 999, loud, 1.0)[:, None, None, None]
    if noisy.is_cpu:
        noisy = noisy.contiguous(memory_format=torch.channels_last)  # faster there
    return F.mse_loss(
        unet(noisy, t, states).sample.float(), noise_of.get_velocity(latents, noise, t)
    )
