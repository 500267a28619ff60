"""Microseconds that capture adds to a watched layer where nothing is to be computed: its Python.

An SD 1.5-shaped UNet of a tiny width runs on a latent of 8x8, so that torch's own operations are as
short as they can be. Each of its layers that see the text is called again and again, watched and
not in turn, inside a pass of the model; the least of all rounds is taken, in the thread's own time,
so that a machine that has other work to do tells the same.

    scripts/bench_python.py
    scripts/bench_python.py --profile      what the time of the watched calls goes to
"""

import argparse
import cProfile
import pstats
import statistics
from collections.abc import Callable
from time import thread_time_ns
from typing import Any

import torch
from benching.models import stable_diffusion
from diffusers import UNet2DConditionModel
from torch import Tensor

import sdattn
from sdattn.models.denoiser_call import innermost
from sdattn.models.layers import find_layers

ROUNDS, CALLS = 15, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    unet = tiny_unet()
    found = added_microseconds(unet)
    print(f"{len(found)} layers, one of two rows kept, a latent of 8x8, 77 keys")
    print(f"capture adds {statistics.median(found):.0f} µs a layer", end="")
    print(f" ({min(found):.0f} to {max(found):.0f}) to its own {plain_microseconds(unet):.0f} µs")
    if options.profile:
        profile(unet)


def tiny_unet() -> Any:
    torch.manual_seed(0)
    widths = 32, 32, 32, 32
    parts = {"cross_attention_dim": 32, "attention_head_dim": 8, "norm_num_groups": 8}
    return UNet2DConditionModel(sample_size=8, block_out_channels=widths, **parts).eval()


@torch.no_grad()
def in_pass(unet: Any, work: Callable[[Any, Callable[[], Any]], None], name: str) -> None:
    """Call ``work(layer, call)`` in the middle of a pass, where ``call()`` runs the layer."""
    layer = unet.get_submodule(name)

    def before(module: Any, args: Any, kwargs: Any) -> None:
        hook.remove()
        work(module, lambda: module.forward(*args, **kwargs))

    hook = layer.register_forward_pre_hook(before, with_kwargs=True)
    sample, text = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 32)
    unet(sample, 500, text)


def names(unet: Any) -> list[str]:
    return [layer.name for layer in find_layers(unet) if layer.kind == "cross"]


def added_microseconds(unet: Any) -> list[float]:
    """Of each layer that sees the text."""
    found: list[float] = []

    def compare(layer: Any, call: Callable[[], Tensor]) -> None:
        watched = layer.processor
        least = dict.fromkeys((watched, innermost(watched)), float("inf"))
        for _ in range(ROUNDS):
            for processor in least:
                layer.set_processor(processor)
                least[processor] = min(least[processor], timed(call))
        layer.set_processor(watched)
        ours, own = least.values()
        found.append((ours - own) / 1000)

    for name in names(unet):
        with sdattn.capture(pipe_of(unet)):
            in_pass(unet, compare, name)
    return found


def plain_microseconds(unet: Any) -> float:
    """Of one layer by itself."""
    found: list[float] = []

    def least(_layer: Any, call: Callable[[], Tensor]) -> None:
        found.append(min(timed(call) for _ in range(ROUNDS)) / 1000)

    for name in names(unet):
        in_pass(unet, least, name)
    return statistics.median(found)


def timed(call: Callable[[], Tensor]) -> float:
    """Nanoseconds a call."""
    start = thread_time_ns()
    for _ in range(CALLS):
        call()
    return (thread_time_ns() - start) / CALLS


def pipe_of(unet: Any) -> Any:
    """A pipeline whose run is guided, so that half of the batch is kept."""
    pipe = stable_diffusion(unet)
    pipe._guidance_scale = 7.5
    pipe.scheduler.set_timesteps(50)
    return pipe


def profile(unet: Any) -> None:
    kept = cProfile.Profile()

    def run(_layer: Any, call: Callable[[], Tensor]) -> None:
        with kept:
            for _ in range(2000):
                call()

    with sdattn.capture(pipe_of(unet)):
        in_pass(unet, run, names(unet)[-1])
    pstats.Stats(kept).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
