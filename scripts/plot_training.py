"""The curves of the run that made the demo model, from the record beside its weights, as a picture.

Also prints the run's stages and wall time.
"""

import argparse
import json
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


def points(curve: dict[str, dict[str, float]], name: str) -> tuple[list[int], list[float]]:
    """Steps, and a measure's value at each of them that has it."""
    found = {int(step): row[name] for step, row in curve.items() if name in row}
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def draw_vae(axes: Any, record: dict[str, Any]) -> None:
    curve = record["curve"]["vae"]
    axes.plot(*points(curve, "decibels"), color="#0072b2", marker=".")
    axes.set(title="autoencoder", xlabel="step", ylabel="PSNR on unseen scenes, dB")


def draw_pictures(axes: Any, record: dict[str, Any]) -> None:
    """The UNet's stage and behind it the refining, on one axis of steps."""
    first = record["stages"]["unet"]["steps"]
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
    for (name, label), colour in zip(MEASURES.items(), colours, strict=True):
        unet, refined = (points(record["curve"][stage], name) for stage in ("unet", "refine"))
        steps = [*unet[0], *(first + step for step in refined[0])]
        axes.plot(steps, [*unet[1], *refined[1]], color=colour, marker=".", label=label)
    axes.axvline(first, color="0.6", linestyle=":")
    axes.text(first, 0.02, " refining", color="0.3")
    axes.set(title="UNet, then refining with the text encoder", xlabel="step", ylim=(0, 1.02))
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("sdattn/models/demo"))
    parser.add_argument("--out", type=Path, default=Path("outputs/demo-training.png"))
    args = parser.parse_args()
    record = json.loads((args.model / "training.json").read_text())
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4), width_ratios=(1, 2), constrained_layout=True
    )
    draw_vae(left, record)
    draw_pictures(right, record)
    figure.savefig(args.out, dpi=110)
    for name, stage in record["stages"].items():
        print(f"{name:8} {stage['steps']:6} steps {stage['seconds'] / 60:7.0f} minutes")
    seconds = sum(stage["seconds"] for stage in record["stages"].values())
    print(f"in all {seconds / 3600:.1f} hours, in {len(record['sittings'])} sittings")


if __name__ == "__main__":
    main()
