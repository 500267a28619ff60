"""A model's heatmaps under a protocol that a paper has published, on the data set that you have.

    python -m demos.evaluation.evaluate_published --protocol voc-single --data VOC2012 \
        --model owner/name --preset daam

Prints the paper's own number as its script computes it beside the correct one, and writes all of
them, with the options and the versions, as JSON. The data sets are their authors'; where to get
them and what lies in their folders is said in `demos.evaluation.published.data`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import sdattn

from .published import data, protocols
from .published.protocols import Maps, table

PROTOCOLS: dict[str, tuple[Callable[[Path], Iterable[Any]], Callable[..., dict[str, Any]]]] = {
    "imagenet-seg": (data.imagenet_seg, protocols.imagenet_seg),
    "voc-single": (data.voc, protocols.voc_single),
    "voc-multi": (data.voc, protocols.voc_multi),
    "coco-gen": (data.coco_gen, protocols.coco_gen),
}


def evaluate(pipe: Any, protocol: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one protocol."""
    read, measure = PROTOCOLS[protocol]
    ways: dict[str, Any] = {"preset": options.preset, "refine": options.refine}
    if protocol == "coco-gen":
        return measure(islice(read(folder), options.limit), Maps(pipe, **ways), options.steps)
    if options.timesteps:
        ways["timesteps"] = options.timesteps
    maps = Maps(pipe, options.samples, **ways)
    return measure(islice(read(folder), options.limit), maps)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--protocol", required=True, choices=PROTOCOLS)
    parser.add_argument("--data", required=True, type=Path, help="the data set's folder")
    parser.add_argument("--model", default="demo", help="as --model of sdattn generate")
    parser.add_argument("--preset", default="default", choices=sdattn.PRESETS)
    parser.add_argument("--refine", choices=["self"])
    parser.add_argument("--samples", type=int, default=5, help="noises a given image")
    parser.add_argument("--timesteps", type=int, nargs="+", help="to noise images to")
    parser.add_argument("--steps", type=int, default=30, help="of images that are drawn")
    parser.add_argument("--limit", type=int, help="only so many images of the data set")
    parser.add_argument("--device", help="cuda, cpu")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    options = parser.parse_args(given)
    pipe = sdattn.load_pipeline(options.model, device=options.device)
    pipe.set_progress_bar_config(disable=True)
    found = evaluate(pipe, options.protocol, options.data, options)
    print(table(f"{options.protocol}, {options.model}, {options.preset}", found))
    if options.out:
        said = {name: str(value) for name, value in vars(options).items() if name != "out"}
        versions = {name: version(name) for name in ("sdattn", "torch", "diffusers")}
        document = {"options": said, "versions": versions, "figures": found}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
