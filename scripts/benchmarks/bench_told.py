"""The price of two facts: a capture by text= and grid= beside one by the family, and a dry run.

The demo's UNet runs as itself and inside a module that no family claims. All ways run in turn,
round by round, in one process and one thread; the ratios are of a run's second call.

    OMP_NUM_THREADS=1 python -m scripts.benchmarks.bench_told
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import sdattn

from .machine import machine_name


class Unclaimed(nn.Module):
    """A UNet in a module of no family."""

    def __init__(self, unet: Any):
        super().__init__()
        self.unet = unet

    def forward(self, latents: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        output: Tensor = self.unet(latents, timestep, context, return_dict=False)[0]
        return output


def second_call(watch: Callable[[], Any], call: Callable[[], object]) -> float:
    """Return the CPU time of a run's second call, in seconds."""
    with watch():
        call()
        begun = process_time()
        call()
        return process_time() - begun


def once(call: Callable[[], object]) -> float:
    begun = process_time()
    call()
    return process_time() - begun


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    unet = sdattn.load_pipeline("demo").unet
    model = Unclaimed(unet)
    side = unet.config.sample_size
    latents = torch.randn(2, unet.config.in_channels, side, side)
    context = torch.randn(2, 77, unet.config.cross_attention_dim)
    args = latents, torch.tensor(500), context
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: second_call(nullcontext, lambda: model(*args)),
        "by family": lambda: second_call(lambda: sdattn.capture(unet), lambda: model(*args)),
        "by two facts": lambda: second_call(
            lambda: sdattn.capture(model, text="context", grid=(side, side)), lambda: model(*args)
        ),
        "inspect_attention()": lambda: once(lambda: sdattn.inspect_attention(model, *args)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            seconds = ways[name]()
            if number:
                times[name].append(seconds)
    print(f"torch {torch.__version__}, {machine_name('cpu')}, {rounds} rounds, 2 rows of the demo")
    plain = times["plain"]
    for name, found in times.items():
        ratios = [mine / other for mine, other in zip(found, plain, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(f"{name}: {statistics.median(ratios):.3f} of plain ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
