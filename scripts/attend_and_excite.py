"""Attend-and-Excite (Chefer et al. 2023): guide an image so that no chosen word is overlooked.

After each of the first half of the steps the latents go down the gradient of 1 minus the peak of
the smoothed attention map of the word that has the lowest (section 3, equations 1 to 3; without
the iterative refinement). ``sdattn.capture(unet, grad=True)`` keeps the graph from the maps back
to the latents. Each seed is drawn without guidance and with it, side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import sdattn
from sdattn.maps.aggregation import aggregate
from sdattn.maps.layermaps import layer_maps
from sdattn.maps.presets import UNET, Preset
from sdattn.models.demos import demo_settings
from sdattn.models.layers import AttentionLayer
from sdattn.prompts.tokens import Prompt

# The paper's code: 3x3, standard deviation 0.5 by its own formula, reflected at the border.
ALL = Preset("every layer that was captured", UNET)
KERNEL = torch.tensor([0.212, 0.576, 0.212])


def word_peaks(maps: Tensor, prompt: Prompt, words: Sequence[str]) -> Tensor:
    """The peak of each word's smoothed map, ``[words]`` in [0, 1].

    ``maps`` are probabilities ``[rows, cols, tokens]``. Start, end and padding are left out and the
    rest made to sum to 1 again; the paper takes a softmax of 100 times the rest, which suits models
    whose start token gets most of the attention. The columns of a word are added up.
    """
    kept = sorted({column for word in prompt.seen for column in word.columns})
    shares = maps[..., kept] / maps[..., kept].sum(-1, keepdim=True)
    columns = [[kept.index(c) for one in prompt.find(word) for c in one] for word in words]
    found = torch.stack([shares[..., own].sum(-1) for own in columns])[:, None]  # [words, 1, r, c]
    padded = torch.nn.functional.pad(found, (1, 1, 1, 1), mode="reflect")
    kernel = torch.outer(KERNEL, KERNEL).to(maps)[None, None]
    return torch.nn.functional.conv2d(padded, kernel).amax((1, 2, 3))


class Excite:
    """A ``callback_on_step_end`` that moves the latents; with a step size of 0 it only looks."""

    def __init__(self, prompt: Prompt, words: Sequence[str], step_size: float):
        self.prompt, self.words, self.step_size = prompt, words, step_size
        self.lowest: list[float] = []

    def __call__(
        self, pipe: Any, step: int, _timestep: Any, tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Look at the coming step, with the prompt alone, and change the latents before it."""
        if step + 1 > pipe.num_timesteps // 2:
            return {}
        text = tensors["prompt_embeds"][-1:]  # under guidance the negative prompt comes first
        coming = pipe.scheduler.timesteps[step + 1]
        deepest = len(pipe.unet.config.block_out_channels) - 1

        def middle(layer: AttentionLayer) -> bool:  # neither the finest nor the coarsest grid
            return 0 < layer.level < deepest

        with torch.enable_grad():
            latents = tensors["latents"].detach().requires_grad_()
            with sdattn.capture(pipe.unet, layers=middle, grad=True) as store:
                pipe.unet(latents, coming, encoder_hidden_states=text)
            maps = aggregate(layer_maps(store, ALL), ALL)[0]
            lowest = word_peaks(maps, self.prompt, self.words).min()
            (gradient,) = torch.autograd.grad(1 - lowest, latents)
        self.lowest.append(float(lowest))
        return {"latents": (latents - self.step_size * gradient).detach()}


def draw(pipe: Any, args: argparse.Namespace, seed: int, step_size: float) -> tuple[Any, float]:
    """The image, and the lowest peak of a word, mean over the steps that were looked at."""
    excite = Excite(sdattn.read_prompt(pipe.tokenizer, args.prompt), args.words, step_size)
    image = pipe(
        args.prompt,
        generator=torch.Generator("cpu").manual_seed(seed),
        callback_on_step_end=excite,
        callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
        **demo_settings(pipe),
    ).images[0]
    return image, float(np.mean(excite.lowest))


def main() -> None:
    """Draw every seed without and with the guidance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, a folder, or a hub id (SD 1.x, 2.x)")
    parser.add_argument("--prompt", default="a cat left of a pizza")
    parser.add_argument("--words", nargs="+", default=["cat", "pizza"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--step-size", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=Path("outputs/attend-and-excite"))
    args = parser.parse_args()
    pipe = sdattn.load_pipeline(args.model)
    pipe.set_progress_bar_config(disable=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        before, low = draw(pipe, args, seed, 0.0)
        after, high = draw(pipe, args, seed, args.step_size)
        Image.fromarray(np.hstack([before, after])).save(args.out / f"seed-{seed}.png")
        print(f"seed {seed}: lowest peak of a word {low:.4f} without, {high:.4f} with", flush=True)
    print(args.out)


if __name__ == "__main__":
    main()
