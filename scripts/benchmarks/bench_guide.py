"""Time and memory of one move of ``guide()``, next to the call of the model that a step makes.

The model has random weights. A step calls it on two rows, of the prompt and of the negative prompt,
without a graph; a move calls it on the prompt's row with a graph from the maps back to the latents,
and runs the backward pass. Memory is the most that each takes beyond what was there before.

    python -m scripts.benchmarks.bench_guide --models demo sd15
"""

import argparse

import torch

import sdattn
from sdattn.edit import inside
from sdattn.inversion.nulltext import frozen, rows_of
from sdattn.maps.aggregation import aggregate, finish
from sdattn.maps.presets import preset_for
from sdattn.prompts.tokens import read_labels

from .machine import clock, forget_peak, machine_name, peak_bytes
from .models import Bench, make_bench

UNETS = ("demo", "thin", "sd15", "sdxl")


def step(bench: Bench) -> None:
    with torch.no_grad():
        bench.call()


def move(bench: Bench) -> None:
    """Take the gradient of a column's share in a quarter of the image."""
    given = rows_of(bench.inputs, slice(1, 2), 2)
    latents = given["sample"].requires_grad_()
    preset = preset_for(bench.model, "default")
    with sdattn.capture(bench.model, grad=True) as store:
        bench.model(**{**given, "sample": latents})
    maps = aggregate(store.layer_maps(preset), preset)[0]
    heatmaps = finish(maps, read_labels({"cat": [2]}, maps.shape[-1]), preset)
    torch.autograd.grad(inside("cat", (0, 0, 0.5, 0.5))(heatmaps), latents)


def main() -> None:
    """Read the options, measure each model and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=UNETS, default=["demo"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    print(f"{machine_name(args.device)}, torch {torch.__version__}, {args.dtype}\n")
    print("| model | weights | a step: seconds | MB more | a move: seconds | MB more |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        bench = make_bench(name, 1, args.device, getattr(torch, args.dtype), whole=True)
        weights = sum(one.numel() * one.element_size() for one in bench.model.parameters())
        cells = [f"{weights / 1e6:,.0f} MB"]
        with frozen(bench.model):
            for call in (step, move):
                call(bench)  # what is made once
                forget_peak(args.device)
                before = peak_bytes(args.device)
                seconds = clock(lambda call=call, bench=bench: call(bench))
                cells += [f"{seconds:.2f}", f"{(peak_bytes(args.device) - before) / 1e6:,.0f}"]
        print(f"| {bench.about} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
