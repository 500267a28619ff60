"""The curves of the runs that made the demo model, drawn from the record beside its weights.

A record holds that of the run whose model it began with. Also prints stages and wall time.
"""

import argparse
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MEASURES = {
    "colours": "both colours right",
    "shapes": "colours and shapes right",
    "relation": "relation right",
    "colour_words": "colour words on their objects",
    "shape_words": "shape words on their objects",
}
LOSSES = {  # of models whose images nothing reads while they train
    "own_prompt": "loss with the scene's own prompt",
    "others_prompt": "loss with another scene's prompt",
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def points(curve: dict[str, dict[str, float]], name: str) -> tuple[list[int], list[float]]:
    """Steps, and a measure's value at each of them that has it."""
    found = {int(step): row[name] for step, row in curve.items() if name in row}
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def runs_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of a run and of those before it, the first of all first."""
    before = runs_of(record["start"]) if "start" in record else []
    return [*before, record]


def draw_vae(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Of the last run that trained one."""
    stages = [run["curve"].get("vae") or run["curve"].get("decoder") for run in runs]
    curve = [stage for stage in stages if stage][-1]
    axes.plot(*points(curve, "decibels"), color="#0072b2", marker=".")
    axes.set(title="autoencoder", xlabel="step", ylabel="PSNR on unseen scenes, dB")


def draw_images(axes: Any, runs: list[dict[str, Any]]) -> None:
    """All stages that draw images, one behind the other on one axis of steps.

    An MM-DiT only borrows parts of what the runs before it made: its images are its own alone.
    """
    runs = runs[-1:] if "mmdit" in runs[-1]["curve"] else runs
    stages = [
        (name, run["stages"][name]["steps"], run["curve"][name])
        for run in runs
        for name in ("unet", "refine", "mmdit")
        if name in run["curve"]
    ]
    *begins, _ = accumulate((steps for _, steps, _ in stages), initial=0)
    read = any("relation" in row for _, _, curve in stages for row in curve.values())
    measures = MEASURES if read else LOSSES
    for (measure, label), colour in zip(measures.items(), COLOURS, strict=False):
        found = [points(curve, measure) for _, _, curve in stages]
        steps = [
            begin + step for begin, (own, _) in zip(begins, found, strict=True) for step in own
        ]
        values = [value for _, own in found for value in own]
        axes.plot(steps, values, color=colour, marker=".", label=label)
    for begin, (name, _, _) in zip(begins, stages, strict=True):
        axes.axvline(begin, color="0.6", linestyle=":")
        axes.text(begin, 0.02, f" {name}", color="0.3")
    title = "images of unseen prompts" if read else "what the prompt tells, at t = 850"
    axes.set(title=title, xlabel="step", ylim=(0, 1.02 if read else 1.2))
    axes.legend(loc="lower right" if read else "center right", fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("sdattn/models/demo"))
    parser.add_argument("--out", type=Path, default=Path("outputs/demo-training.png"))
    args = parser.parse_args()
    runs = runs_of(json.loads((args.model / "training.json").read_text()))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4), width_ratios=(1, 2), constrained_layout=True
    )
    draw_vae(left, runs)
    draw_images(right, runs)
    figure.savefig(args.out, dpi=110)
    stages = [(name, stage) for run in runs for name, stage in run["stages"].items()]
    for name, stage in stages:
        print(f"{name:8} {stage['steps']:6} steps {stage['seconds'] / 60:7.1f} minutes")
    print(f"in all {sum(stage['seconds'] for _, stage in stages) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
