"""Microseconds that capture adds to a watched layer where nothing is to be computed: its Python.

An SD 1.5-shaped UNet of a tiny width runs on a latent of 8x8, so that torch's own operations are as
short as they can be. Each of its layers that see the text is called again and again, watched and
not in turn, inside a pass of the model; the least of all rounds is taken, in the thread's own time,
so that a machine that has other work to do tells the same.

    python -m scripts.benchmarks.bench_python
    python -m scripts.benchmarks.bench_python --profile     where the time of watched calls goes
"""

import argparse
import cProfile
import pstats
import statistics
import sys
from collections.abc import Callable
from time import thread_time_ns
from types import FrameType
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

import sdattn
from sdattn.models.denoiser import find_denoiser
from sdattn.models.denoiser_call import innermost

from .models import Bench, make_bench, stable_diffusion

ROUNDS, CALLS = 15, 10
BLOCKS, BLOCK = 20, 9  # calls of the demo, watched and not in turn
WIDTH, HEADS = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    unet = tiny_unet()
    added = added_microseconds(unet)
    print(f"{len(added)} layers, one of two rows kept, a latent of 8x8, 77 keys")
    print(f"capture adds {statistics.median(added):.0f} µs a layer", end="")
    print(f" ({min(added):.0f} to {max(added):.0f}) to its own {plain_microseconds(unet):.0f} µs")
    demo = make_bench("demo", 1, "cpu", torch.float32, whole=True)
    calls = demo_calls(demo)
    print(f"the demo's call: {calls[0]:,} calls of functions, watched {calls[1] - calls[0]:,} more")
    plain, watched = demo_milliseconds(demo)
    print(f"the demo's call: {plain:.1f} ms, watched {watched:.1f} ms, {watched / plain:.3f} of it")
    if options.profile:
        profile(unet)


@torch.no_grad()
def demo_calls(demo: Bench) -> tuple[int, int]:
    """Return how many functions of Python and C the demo's UNet call enters, alone and watched: a
    number that no other work on the machine changes."""
    n_calls = [0, 0]

    def count(watched: bool) -> None:
        def note(_frame: FrameType, event: str, _arg: object) -> None:
            n_calls[watched] += event in ("call", "c_call")

        demo.call()
        demo.call()
        sys.setprofile(note)
        demo.call()
        sys.setprofile(None)

    count(watched=False)
    with sdattn.capture(demo.pipe, guidance="batch"):
        count(watched=True)
    return n_calls[0], n_calls[1]


@torch.no_grad()
def demo_milliseconds(demo: Bench) -> tuple[float, float]:
    """Return the medians of the demo's UNet call, without and with every step watched, in turn."""

    def calls() -> list[float]:
        return [timed(demo.call, 1) / 1e6 for _ in range(BLOCK)][1:]

    plain, watched = list[float](), list[float]()
    for _ in range(BLOCKS):
        plain += calls()
        with sdattn.capture(demo.pipe, guidance="batch"):
            watched += calls()  # the first, left out, reads what it was given
    return statistics.median(plain), statistics.median(watched)


def tiny_unet() -> Any:
    torch.manual_seed(0)
    widths = (WIDTH,) * 4
    parts = {"cross_attention_dim": WIDTH, "attention_head_dim": HEADS, "norm_num_groups": 8}
    return UNet2DConditionModel(sample_size=8, block_out_channels=widths, **parts).eval()


@torch.no_grad()
def in_pass(unet: Any, work: Callable[[Any, Callable[[], Any]], None], name: str) -> None:
    """Call ``work(layer, call)`` in the middle of a pass, where ``call()`` runs the layer."""
    layer = unet.get_submodule(name)

    def before(module: Any, args: Any, kwargs: Any) -> None:
        hook.remove()
        work(module, lambda: module.forward(*args, **kwargs))

    hook = layer.register_forward_pre_hook(before, with_kwargs=True)
    sample, text = torch.randn(2, 4, 8, 8), torch.randn(2, 77, WIDTH)
    unet(sample, 500, text)


def names(unet: Any) -> list[str]:
    return [layer.name for layer in find_denoiser(unet).layers if layer.kind == "cross"]


def added_microseconds(unet: Any) -> list[float]:
    """Return what handing over query and key adds to each layer that sees the text."""
    added: list[float] = []

    def compare(layer: Any, call: Callable[[], Tensor]) -> None:
        watched = layer.processor
        least = dict.fromkeys((watched, innermost(watched)), float("inf"))
        for _ in range(ROUNDS):
            for processor in least:
                layer.set_processor(processor)
                least[processor] = min(least[processor], timed(call))
        layer.set_processor(watched)
        ours, own = least.values()
        added.append((ours - own) / 1000)

    for name in names(unet):
        with sdattn.capture(pipe_of(unet), guidance="batch") as store:
            in_pass(unet, lambda layer, call: compare(layer, again(store, name, call)), name)  # noqa: B023
    return added


def again(store: Any, name: str, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the call of a layer that may run more than once in a pass."""

    def run() -> Tensor:
        output = call()
        store.sums[name].added.clear()
        return output

    return run


def plain_microseconds(unet: Any) -> float:
    """Of one layer by itself."""
    found: list[float] = []

    def least(_layer: Any, call: Callable[[], Tensor]) -> None:
        found.append(min(timed(call) for _ in range(ROUNDS)) / 1000)

    for name in names(unet):
        in_pass(unet, least, name)
    return statistics.median(found)


def timed(call: Callable[[], Any], times: int = CALLS) -> float:
    """Return the nanoseconds of a call."""
    start = thread_time_ns()
    for _ in range(times):
        call()
    return (thread_time_ns() - start) / times


def pipe_of(unet: Any) -> Any:
    """The pipeline of a UNet; a batch is taken for guided, so that half of it is kept."""
    pipe = stable_diffusion(unet)
    pipe.scheduler.set_timesteps(50)
    return pipe


def profile(unet: Any) -> None:
    kept = cProfile.Profile()

    def run(_layer: Any, call: Callable[[], Tensor]) -> None:
        with kept:
            for _ in range(2000):
                call()

    name = names(unet)[-1]
    with sdattn.capture(pipe_of(unet), guidance="batch") as store:
        in_pass(unet, lambda layer, call: run(layer, again(store, name, call)), name)
    pstats.Stats(kept).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
