"""Time and memory of capture against no capture, on models of real shapes with random weights.

All ways to watch run in turn, round by round, in one process, so that their ratios hold on a
machine whose speed drifts. What is timed is a run's second call, and in it the layers where they
run, with what is computed when the model has run. Bytes held and the peak are of one more call of
each way; those after 1, 10 and 50 calls of a process each.

    python -m scripts.benchmarks.bench_capture      four models, tables in Markdown
    python -m scripts.benchmarks.bench_capture --models sd15 --dtype float16 --images 8 --compile
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from transformers import CLIPTokenizer

import sdattn
from sdattn.batch.drawing import trim_heap
from sdattn.models.demos import DEMO

from .machine import clock, forget_peak, machine_name, peak_bytes
from .models import BENCHES, Bench, make_bench
from .ways import PACKAGES, PEERS, Daam, LayerClock, Way, capture, read_maps, ways_for

Times = dict[str, dict[str, list[float]]]
IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
PROMPT = "a red car left of a blue bird and nothing"  # ten words


def main() -> None:
    options = read_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    print(f"torch {torch.__version__}, {machine_name(device)}, {options.dtype}")
    print("Medians; ratios to none, call by call, with the range of their middle half.")
    found: dict[str, Any] = {"machine": machine_name(device), "models": {}}
    for name in options.models:
        bench = make_bench(name, options.images, device, dtype, options.whole or device == "cuda")
        times = measure(bench, options)
        found["models"][name] = {"about": bench.about, "times": times}
        print_times(bench, times)
        sizes = found["models"][name]["bytes"] = bytes_of(bench, options, list(times), device)
        print(f"\n| {bench.about}, MB | held | peak beyond none's |\n|---|---|---|")
        for way, (held, peak) in sizes.items():
            print(f"| {way} | {held / 1e6:,.1f} | {(peak - sizes['none'][1]) / 1e6:+,.0f} |")
        del bench
        if options.out:  # what is known already, should the next model not fit
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    if not options.no_memory:
        held = {way: memory_of(way, device) for way in ways_for(make_thin(device).pipe)}
        found["memory"] = held
        print_memory(held)
        found["joint"] = joint_memory(device)
        found["heatmaps"] = time_heatmaps()
        found["import"] = time_import()
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    models = [name for name in BENCHES if name not in ("thin", "narrow-flux")]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--ways", nargs="+", help="some of them only, by name")
    parser.add_argument("--images", type=int, default=1, help="half the batch, which is guided")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true", help="the model, before each way")
    parser.add_argument("--whole", action="store_true", help="all layers of SDXL and SD3 on a CPU")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of a model, after which no round begins"
    )
    parser.add_argument(
        "--quick", action="store_true", help="three rounds, no memory, heatmaps and import"
    )
    parser.add_argument("--no-memory", action="store_true", help="nor heatmaps and import")
    parser.add_argument(
        "--peers", nargs="+", choices=PACKAGES, default=[], help="tools that are installed"
    )
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    options = parser.parse_args()
    for name in options.peers:
        if find_spec(name.replace("-", "_")) is None:
            parser.error(f"--peers {name}: it is not installed in this environment.")
    if options.quick:
        options.rounds, options.no_memory = 3, True
    return options


# Time


@torch.no_grad()
def measure(bench: Bench, options: argparse.Namespace) -> Times:
    """Seconds of each round's call, and of its layers that see the text; the first is left out."""
    ways, end = ways_for(bench.pipe, options.peers), monotonic() + options.seconds
    ways = {name: way for name, way in ways.items() if name in (options.ways or ways)}
    times: Times = {}
    with ExitStack() as stack:
        if options.compile:
            runs = {name: compiled(bench.copy(), way, stack) for name, way in ways.items()}
        else:
            layers = stack.enter_context(LayerClock(bench.model))
            runs = {name: partial(eager, bench, way, layers) for name, way in ways.items()}
            drop_peers_that_fail(runs, layers)
        for number in range(options.rounds + 1):
            names = list(runs)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                for what, seconds in runs[name]().items():
                    if number:
                        times.setdefault(name, defaultdict(list))[what].append(seconds)
            if number and monotonic() > end:
                break
    return {name: times[name] for name in runs}


def drop_peers_that_fail(
    runs: dict[str, Callable[[], dict[str, float]]], layers: LayerClock
) -> None:
    """Take out of ``runs`` what other tools cannot do with this model, and say so."""
    for name in PEERS.keys() & runs.keys():
        try:
            runs[name]()
        except Exception as error:  # of any kind: it is not ours
            layers.seconds()
            del runs[name]
            print(f"{name} is left out: {error!r}"[:300])


def eager(bench: Bench, way: Way, layers: LayerClock) -> dict[str, float]:
    with way(bench.pipe) as held:
        bench.call()  # the first of a run, which reads it
        layers.mark()
        layers.seconds()
        seconds = clock(bench.call)
        layers.mark()
    inside = layers.seconds()
    reading = clock(partial(read_maps, held))
    return {
        "call": seconds,
        "layers that see the text": inside,
        "call and maps": seconds + reading,
    }


@torch.no_grad()
def bytes_of(
    bench: Bench, options: argparse.Namespace, ways: list[str], device: str
) -> dict[str, tuple[int, int]]:
    """The bytes that each way holds after one call, wherever it does, and the most that the device
    (a CPU's process) held in the call and in making its maps, beyond what it held before."""
    known = ways_for(bench.pipe, options.peers)
    return {name: _bytes_of(bench, known[name], device) for name in ways}


def _bytes_of(bench: Bench, way: Way, device: str) -> tuple[int, int]:
    """One way's; what it held goes when this returns, before the next one's memory is read."""
    trim_heap()
    forget_peak(device)
    before = peak_bytes(device)
    with way(bench.pipe) as held:
        bench.call()
    read_maps(held)
    return 0 if held is None else held.nbytes, peak_bytes(device) - before


def compiled(bench: Bench, way: Way, stack: ExitStack) -> Callable[[], dict[str, float]]:
    """A compiled model that stays in its way. Clocks inside would break it into more pieces, and
    its layers of many shapes need more graphs than torch makes by default."""
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 1024
    bench.model.compile()
    stack.enter_context(way(bench.pipe))
    return lambda: {"call": clock(bench.call)}


def print_times(bench: Bench, times: Times) -> None:
    print(f"\n| {bench.about} | {' | '.join(f'{what} | ratio' for what in times['none'])} |")
    print(f"|{'---|' * (1 + 2 * len(times['none']))}")
    for name, one in times.items():
        cells = [name]
        for what, seconds in one.items():
            ratios = [a / b for a, b in zip(seconds, times["none"][what], strict=True)]
            cells += [duration(statistics.median(seconds)), spread(ratios)]
        print(f"| {' | '.join(cells)} |")


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


# Memory

COUNTS = (1, 10, 50)


def make_thin(device: str) -> Bench:
    """Its maps are those of SD 1.5; its own activations are small."""
    return make_bench("thin", 1, device, torch.float32, True)


def alone(function: Any, *arguments: Any) -> Any:
    """The result of a function, in a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def memory_of(way: str, device: str) -> dict[int, tuple[int, int]]:
    """Bytes held, and the process's peak, after so many calls."""
    return alone(_memory_of, way, device)


@torch.no_grad()
def _memory_of(way: str, device: str) -> dict[int, tuple[int, int]]:
    bench, found = make_thin(device), {}
    forget_peak(device)
    with ways_for(bench.pipe)[way](bench.pipe) as store:
        for number in range(1, COUNTS[-1] + 1):
            bench.call()
            if number in COUNTS:
                found[number] = (0 if store is None else store.nbytes, peak_bytes(device))
    return found


def print_memory(held: dict[str, dict[int, tuple[int, int]]]) -> None:
    heads = [f"held after {number} | peak" for number in COUNTS]
    print("\nMemory in MB, SD 1.5's maps at 512x512, one guided image\n")
    print(f"| way | {' | '.join(heads)} |\n|{'---|' * (1 + 2 * len(COUNTS))}")
    for way, one in held.items():
        cells = [f"{size / 1e6:,.1f}" for number in COUNTS for size in one[number]]
        print(f"| {way} | {' | '.join(cells)} |")


def joint_memory(device: str) -> dict[str, float]:
    """The peak that capture adds to a layer of SD3's at 1024x1024, in parts of the [heads, N, N]
    matrix that it does not make."""
    cells, text, heads = 64 * 64, 333, 24
    matrix = 4 * heads * (cells + text) ** 2
    peaks = {way: alone(_joint_peak, way, device) for way in ("none", "default")}
    extra = peaks["default"] - peaks["none"]
    print(
        f"\nSD3, 1024x1024: {extra / 1e6:.0f} MB more at the peak, {extra / matrix:.1%} of one "
        f"[heads, N, N] matrix ({matrix / 1e6:,.0f} MB)."
    )
    return {**peaks, "matrix": matrix}


@torch.no_grad()
def _joint_peak(way: str, device: str) -> int:
    bench = make_bench("sd3", 1, device, torch.float32, False)
    bench.call()  # what a first call keeps is not the way's
    forget_peak(device)
    with ways_for(bench.pipe)[way](bench.pipe):
        bench.call()
    return peak_bytes(device)


# From the store to heatmaps


@torch.no_grad()
def time_heatmaps(rounds: int = 5) -> dict[str, list[float]]:
    """From what was captured to the ten words' heatmaps at 512x512, on the CPU."""
    bench = make_thin("cpu")
    tokenizer = CLIPTokenizer.from_pretrained(DEMO / "tokenizer", model_max_length=77)
    with ways_for(bench.pipe)["DAAM's way"](bench.pipe) as daam:
        bench.call()
    with capture(bench.pipe) as store:
        bench.call()
    words = [list(one.columns) for one in sdattn.read_prompt(tokenizer, PROMPT).words]
    calls = {"sdattn": partial(ours, store, tokenizer), "DAAM's way": partial(theirs, daam, words)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            seconds = clock(call)
            if number:
                times[name].append(seconds)
    ours_ms, theirs_ms = (1000 * statistics.median(one) for one in times.values())
    print(
        f"\nFrom the store to {len(words)} words' heatmaps at 512x512: sdattn {ours_ms:.1f} ms, "
        f"DAAM's way {theirs_ms:.0f} ms, {theirs_ms / ours_ms:.0f} times that."
    )
    return times


def time_import(rounds: int = 7) -> list[float]:
    """Seconds that importing sdattn adds to importing torch, each in a process of its own."""
    added = []
    for _ in range(rounds):
        seconds = [
            float(subprocess.check_output([sys.executable, "-c", IMPORT.format(one)]))
            for one in ("torch", "torch, sdattn")
        ]
        added.append(seconds[1] - seconds[0])
    print(f"\nimport sdattn: {1000 * statistics.median(added):.0f} ms over import torch.")
    return added


def ours(store: Any, tokenizer: Any) -> list[torch.Tensor]:
    [maps] = sdattn.heatmaps(store, tokenizer, PROMPT)
    return [one.resize((512, 512)) for one in maps.occurrences()]


def theirs(daam: Daam, words: list[list[int]]) -> list[torch.Tensor]:
    return daam.heatmaps(words, 512)


if __name__ == "__main__":
    main()
