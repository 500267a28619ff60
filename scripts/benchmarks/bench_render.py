"""What it costs to draw a run: overlays, grid and page of a prompt of ten words at 512x512.

On one core, of random maps of SD 1.5's size, over an image of noise, which is the most that a PNG
can have to pack, and over a smooth one, in turn, round by round. The first run of a process loads
matplotlib and jinja2 as well.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from PIL import ImageFilter

from sdattn.runs.folder import pack_with_page

from .machine import processor_name
from .random_run import random_run

PARTS = {
    "overlays": ("overlays",),
    "overlays and grid": ("overlays", "grid"),
    "page": ("report",),
    "all three": ("overlays", "grid", "report"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    noise = random_run()
    smooth = noise.image.filter(ImageFilter.GaussianBlur(24)).resize((512, 512))
    runs = {"noise": noise, "smooth": replace(noise, image=smooth)}
    start = time.process_time()
    pack_with_page(noise, PARTS["all three"])
    first = time.process_time() - start
    found: dict[tuple[str, str], list[float]] = {}
    sizes = {}
    for _ in range(options.rounds):
        for image, run in runs.items():
            for name, parts in PARTS.items():
                start = time.process_time()
                files = pack_with_page(run, parts).files
                found.setdefault((image, name), []).append(time.process_time() - start)
                sizes[image, name] = sum(map(len, files.values()))
    print(f"{processor_name()}, torch {torch.__version__}; first run {1000 * first:.0f} ms\n")
    print("| image | drawn | one core, median (range) | bytes |\n|---|---|---|---|")
    for (image, name), times in found.items():
        low, middle, high = (1000 * f(times) for f in (min, statistics.median, max))
        size = sizes[image, name] / 1e6
        print(f"| {image} | {name} | {middle:.0f} ms ({low:.0f} to {high:.0f}) | {size:.2f} MB |")
    if options.out:
        document = {f"{image}, {name}": times for (image, name), times in found.items()}
        options.out.write_text(json.dumps({"first": first, "seconds": document}, indent=1) + "\n")


if __name__ == "__main__":
    main()
