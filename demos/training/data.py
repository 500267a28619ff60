"""Scenes with their images, and the tokenizer for the words of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import CLIPTokenizer

from ..scenes.shapes import Scene, random_scene

SIZE = 128  # side of an image in pixels
TOKENS = 32  # length of a prompt with its start, end and padding


SceneMaker = Callable[[np.random.Generator], Any]  # of shapes, or of sprites


def make_scenes(seed: int, count: int = 1000, make: SceneMaker = random_scene) -> list[Any]:
    """Return scenes of the training part."""
    rng = np.random.default_rng(seed)
    return [make(rng) for _ in range(count)]


def draw_scenes(seed: int, make: SceneMaker = random_scene) -> Tensor:
    """Return the images of ``make_scenes(seed)``, uint8 [count, 3, SIZE, SIZE]."""
    return torch.from_numpy(_drawn(seed, make))


def _made(seed: int, make: SceneMaker) -> list[Any]:
    """Return ``make_scenes(seed)``, for another process."""
    return make_scenes(seed, make=make)


def _drawn(seed: int, make: SceneMaker) -> NDArray[np.uint8]:
    """Return ``draw_scenes`` as an array: between processes, tensors would fill shared memory."""
    images = np.stack([scene.draw(SIZE) for scene in make_scenes(seed, make=make)])
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def all_scenes(seed: int, chunks: int, make: SceneMaker = random_scene) -> list[Any]:
    """Return the scenes of so many chunks, a thousand each."""
    seeds = [chunk_seed(seed, index) for index in range(chunks)]
    with ProcessPoolExecutor() as pool:
        return list(chain.from_iterable(pool.map(partial(_made, make=make), seeds)))


def chunk_seed(seed: int, index: int) -> int:
    """The seed of a chunk of scenes."""
    return seed * 1_000_000 + index


def make_dataset(
    seed: int, chunks: int, work: Path, make: SceneMaker = random_scene
) -> tuple[list[Any], Tensor]:
    """Return a thousand scenes a chunk with their images, drawn once and kept in ``work``."""
    kept = work / "images.pt"
    if not kept.exists():
        seeds = [chunk_seed(seed, index) for index in range(chunks)]
        with ProcessPoolExecutor() as pool:
            drawn = list(pool.map(partial(_drawn, make=make), seeds))
        torch.save(torch.from_numpy(np.concatenate(drawn)), f"{kept}.new")
        os.replace(f"{kept}.new", kept)
    # gigabytes, which all processes share
    return all_scenes(seed, chunks, make), torch.load(kept, mmap=True)


def learn_merges(words: Counter[str], count: int | None) -> list[tuple[str, str]]:
    """Return the first ``count`` byte-pair merges (Sennrich et al., 2016), most frequent first;
    None for as many as make each word whole."""
    spelt = {word: (*word[:-1], word[-1] + "</w>") for word in words}
    merges: list[tuple[str, str]] = []
    while count is None or len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in spelt.items():
            for pair in pairwise(pieces):
                pairs[pair] += words[word]
        if count is None and not pairs:
            break
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
    return tokenizer_of(learn_merges(words, count=105), TOKENS)


def tokenizer_of(merges: list[tuple[str, str]], tokens: int) -> CLIPTokenizer:
    """Return CLIP's tokenizer with these merges, for prompts of so many tokens."""
    letters = sorted(ByteLevel.alphabet())
    names = [*letters, *(letter + "</w>" for letter in letters), *("".join(p) for p in merges)]
    vocab = {name: index for index, name in enumerate([*names, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=tokens)


def token_ids(tokenizer: CLIPTokenizer, prompts: list[str]) -> Tensor:
    """Return ids [prompts, tokens], padded with the end token as Stable Diffusion does."""
    said = tokenizer(prompts, padding="max_length", truncation=True)
    return torch.tensor(said["input_ids"])
