"""Run every pipeline of the tests' matrix in every way, with and without capture, and print the
support matrix of docs/models.md.

    python tests/support_matrix.py            every row
    python tests/support_matrix.py "My model"   the rows with such a name

The pipelines are the real classes with tiny random models. A way or a processor counts where the
image with capture was bit for bit the one without, every layer that sees the text was seen, and
the words of the prompt were found; else the cell says what went wrong.
"""

import platform
import sys
import warnings
from importlib.metadata import version
from typing import Any

import torch
from helpers.matrix import PROCESSORS, ROWS, WAYS, ways_of
from helpers.rows import PROMPTS, Row, Way

import sdattn
from sdattn.models.denoiser import find_denoiser
from sdattn.models.layers import TEXT_KINDS


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("Ways:", ", ".join(map(str, WAYS)), "\n")
    print(
        "| pipeline | class | attention | guidance | ways | processors |\n|---|---|---|---|---|---|"
    )
    for row in ROWS:
        if sys.argv[1:] and sys.argv[1] not in row.name:
            continue
        ways = {str(way): attempt(row, way) for way in ways_of(row)}
        processors = {name: attempt(row, WAYS[0], name) for name in ("own", *row.processors)}
        cells = [row.name, *describe(row), *map(summary, (ways, processors))]
        print("|", " | ".join(cells), "|", flush=True)
    packages = ", ".join(f"{name} {version(name)}" for name in ("diffusers", "transformers"))
    print(f"\nRun with {packages}, torch {torch.__version__}, Python {platform.python_version()}.")


def summary(found: dict[str, str]) -> str:
    """ "all 4", or what went wrong."""
    wrong = [f"{name}: {one}" for name, one in found.items() if one != "yes"]
    if wrong:
        return "; ".join(wrong)
    return ", ".join(found) if "own" in found else f"all {len(found)}"


def describe(row: Row) -> tuple[str, str, str]:
    """Class, kinds of attention that see the text, and where guidance is."""
    pipe = row.make()
    layers = find_denoiser(pipe).layers
    kinds = dict.fromkeys(layer.kind for layer in layers if layer.kind in TEXT_KINDS)
    where = "in turn" if row.in_turn else "in the batch" if row.prompt_rows else "none"
    return f"`{type(pipe).__name__}`", ", ".join(kinds), where


def attempt(row: Row, way: Way, processor: str = "own") -> str:
    try:
        return check(row, row.fitted(way), processor)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def check(row: Row, way: Way, processor: str) -> str:
    pipe = row.make()
    pipe.to(way.dtype)
    PROCESSORS[processor](find_denoiser(pipe).model)
    plain = row.run(pipe, way, output_type="np")
    with sdattn.capture(pipe) as store:
        watched = row.run(pipe, way, output_type="np")
    if not (plain == watched).all():
        return "the image changed"
    if len(store.maps) != row.layers:
        return f"{len(store.maps)} of {row.layers} layers seen"
    options: dict[str, Any] = row.options(pipe, way)
    prompts = options.pop("prompt", list(PROMPTS[: way.prompts]))
    found = sdattn.heatmaps(store, pipe, prompts, **options)
    if len(found) != way.total or not all(one.words for one in found):
        return "words missing"
    return "yes"


if __name__ == "__main__":
    main()
