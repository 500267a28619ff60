"""Microseconds that capture adds to a watched layer where nothing is to be computed: its Python.

A UNet of SD 1.5's structure and of tiny widths runs on a latent of 8x8, so that torch's own
operations are as short as they can be. Each of its layers that see the text is called again and
again, watched and not in turn, inside a pass of the model; the least of all rounds is taken, in the
thread's own time, so that a machine that has other work to do tells the same. Whole calls, of this
UNet, the demo's and a FLUX of tiny widths, are compared in pairs, one of them watched, one soon
after the other.

    python -m scripts.benchmarks.bench_python
    python -m scripts.benchmarks.bench_python --profile     where the time of watched calls goes
"""

import argparse
import cProfile
import pstats
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import thread_time_ns
from types import FrameType
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sdattn
from sdattn.models.denoiser import find_denoiser
from sdattn.models.denoiser_call import innermost

from .models import Bench, make_bench, stable_diffusion

ROUNDS, CALLS = 15, 10
PAIRS, BLOCK = 80, 5  # of calls; so many run without a change, of which the first is left out
WIDTHS, HEADS = (32, 64, 128, 128), 8
TEXT = WIDTHS[0]


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
    flux = make_bench("narrow-flux", 1, "cpu", torch.float32, whole=True)
    for name, bench in {"the demo's call": demo, "that of a FLUX of tiny widths": flux}.items():
        alone, seen = function_calls(bench)
        print(f"{name}: {alone:,} calls of functions, watched {seen - alone:,} more")
        compare_calls(name, bench.call, partial(watched, bench.pipe))
    given, pipe = inputs(), pipe_of(unet)
    compare_calls("the UNet's call", lambda: unet(*given), partial(watched, pipe))
    stores = partial(stored, unet)
    print(f"our processors and a store: {operations(unet, stores):.1f} operations a layer more")
    compare_calls("the UNet's call with these", lambda: unet(*given), stores)
    if options.profile:
        profile(unet)


@torch.no_grad()
def function_calls(bench: Bench) -> tuple[int, int]:
    """Return how many functions of Python and C a model's call enters, alone and watched: numbers
    that no other work on the machine changes."""
    n_calls = [0, 0]

    def count(watched: bool) -> None:
        def note(_frame: FrameType, event: str, _arg: object) -> None:
            n_calls[watched] += event in ("call", "c_call")

        bench.call()
        bench.call()
        sys.setprofile(note)
        bench.call()
        sys.setprofile(None)

    count(watched=False)
    with sdattn.capture(bench.pipe, guidance="batch"):
        count(watched=True)
    return n_calls[0], n_calls[1]


def watched(pipe: Any) -> AbstractContextManager[Any]:
    return sdattn.capture(pipe, guidance="batch")


@contextmanager
def stored(unet: Any) -> Iterator[None]:
    """Our processors in every layer, and a store of the second half of the batch."""
    before = dict(unet.attn_processors)
    store = sdattn.AttentionStore(pipeline=unet, guidance="batch")
    unet.set_attn_processor(sdattn.TorchAttnProcessor(store))
    try:
        yield
    finally:
        store.detach()
        unet.set_attn_processor(before)


class Count(TorchDispatchMode):
    """Operations, views included."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def operations(unet: Any, way: Callable[[], AbstractContextManager[Any]]) -> float:
    """Return how many operations a call has more in this way, for each attention layer; of a third
    call, whose maps are added to those before."""
    counts = []
    for context in (nullcontext, way):
        with context():
            unet(*inputs())
            unet(*inputs())
            with Count() as count:
                unet(*inputs())
        counts.append(count.number)
    return (counts[1] - counts[0]) / len(find_denoiser(unet).layers)


@torch.no_grad()
def compare_calls(
    name: str, call: Callable[[], object], way: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Print the medians of a call, alone and with every step watched in some way, and of what the
    two of a pair are to each other."""

    def calls() -> list[float]:
        return [timed(call, 1) / 1e6 for _ in range(BLOCK)][1:]

    pairs: list[tuple[float, float]] = []
    while len(pairs) < PAIRS:
        alone = calls()
        with way():
            pairs += zip(alone, calls(), strict=True)  # the first, left out, reads its inputs
    plain, seen = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(seen / plain for plain, seen in pairs)
    print(f"{name}: {plain:.1f} ms, watched {seen:.1f} ms; in pairs {ratio:.3f} of it")


def tiny_unet() -> Any:
    torch.manual_seed(0)
    parts = {"cross_attention_dim": TEXT, "attention_head_dim": HEADS, "norm_num_groups": 8}
    return UNet2DConditionModel(sample_size=8, block_out_channels=WIDTHS, **parts).eval()


def inputs() -> tuple[Tensor, int, Tensor]:
    """Sample, timestep and text of a call of the tiny UNet."""
    return torch.randn(2, 4, 8, 8), 500, torch.randn(2, 77, TEXT)


@torch.no_grad()
def in_pass(unet: Any, work: Callable[[Any, Callable[[], Any]], None], name: str) -> None:
    """Call ``work(layer, call)`` in the middle of a pass, where ``call()`` runs the layer."""
    layer = unet.get_submodule(name)

    def before(module: Any, args: Any, kwargs: Any) -> None:
        hook.remove()
        work(module, lambda: module.forward(*args, **kwargs))

    hook = layer.register_forward_pre_hook(before, with_kwargs=True)
    unet(*inputs())


def names(unet: Any) -> list[str]:
    return [layer.name for layer in find_denoiser(unet).layers if layer.kind == "cross"]


@torch.no_grad()
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
            unet(*inputs())  # the first pass of a run is another
            in_pass(unet, lambda layer, call: compare(layer, again(store, call)), name)
    return added


def again(store: Any, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the call of a layer that may run more than once in a pass."""

    def run() -> Tensor:
        output = call()
        store.queue.drop()  # what it left there
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


@torch.no_grad()
def profile(unet: Any) -> None:
    kept = cProfile.Profile()

    def run(_layer: Any, call: Callable[[], Tensor]) -> None:
        with kept:
            for _ in range(2000):
                call()

    name = names(unet)[-1]
    with sdattn.capture(pipe_of(unet), guidance="batch") as store:
        unet(*inputs())
        in_pass(unet, lambda layer, call: run(layer, again(store, call)), name)
    pstats.Stats(kept).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
