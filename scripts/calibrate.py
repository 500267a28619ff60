"""Find the lead below which a word is missing from a model's images, and keep it in a file.

The list has a line for each image that somebody looked at: its run's folder, and the words that it
does not show. One of 100 images or more with one missing word in ten is a good one.

    {"run": "outputs/a-cat-and-a-dog-0", "missing": ["dog"]}
    {"run": "outputs/a-cat-and-a-dog-1", "missing": []}

    python -m scripts.calibrate list.jsonl -o sd15.json

Then ``run[0].heatmaps.missing(calibration="sd15.json")`` says "missing" in place of "weak".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import sdattn
from sdattn.errors import InvalidValueError
from sdattn.maps.arrival import Calibration, leads

Floats = NDArray[np.float64]


def fit(model: str, preset: str, found: Sequence[float], missing: Sequence[bool]) -> Calibration:
    """Return the threshold with the highest share of missing words below it plus share of other
    words above it (Youden 1950, "Index for rating diagnostic tests").

    Args:
        found: lead of each word, see :func:`sdattn.maps.arrival.leads`.
        missing: True for each word that its image does not show.

    Raises:
        ValueError: none or all are missing, or no lead differs from another.
    """
    values = np.asarray(found, np.float64)
    has_others = np.isfinite(values)  # a lone word is never missing
    values, absent = values[has_others], np.asarray(missing, bool)[has_others]
    n_absent = int(absent.sum())
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    cuts = np.flatnonzero(np.diff(ranked))  # between unequal neighbours
    if not 0 < n_absent < len(absent) or not len(cuts):
        raise InvalidValueError(
            f"{n_absent} of {len(absent)} words are missing, with {len(cuts) + 1} different leads. "
            "Pass images with missing words and others, with different leads."
        )
    told = np.cumsum(absent[order]) / n_absent
    wrong = np.cumsum(~absent[order]) / (len(absent) - n_absent)
    at = cuts[(told - wrong)[cuts].argmax()]
    return Calibration(
        model=model,
        preset=preset,
        lead=float(ranked[at : at + 2].mean()),
        words=len(absent),
        missing=n_absent,
        auc=auc(ranked, absent[order]),
    )


def auc(values: Floats, missing: NDArray[np.bool_]) -> float:
    """Return the probability that a missing word's value is below another word's; a tie counts half
    (Mann and Whitney 1947)."""
    absent = np.sort(values[missing])
    below = np.searchsorted(absent, values[~missing], "left")
    upto = np.searchsorted(absent, values[~missing], "right")
    return float((below + upto).mean() / 2 / len(absent))


def calibrated(lines: Sequence[str]) -> Calibration:
    """Return the calibration of a list's runs; raise ValueError if they are of several models or
    presets, or name a word that their prompt does not judge."""
    kinds: set[tuple[str, str]] = set()
    found, missing = [], []
    for line in lines:
        told = json.loads(line)
        run = sdattn.load_run(told["run"])
        kinds.add((str(run.settings.model), run.heatmaps.preset.title))
        words = run.heatmaps.judged()
        if unknown := set(told["missing"]) - {word.label for word in words}:
            labels = ", ".join(word.label for word in words)
            raise InvalidValueError(f"{told['run']}: {min(unknown)!r} is none of {labels}.")
        found += leads(words)
        missing += [word.label in told["missing"] for word in words]
    if len(kinds) != 1:
        raise InvalidValueError(f"The runs are of {sorted(kinds)}. Pass runs of one model, preset.")
    return fit(*kinds.pop(), found, missing)


def main(given: list[str] | None = None) -> None:
    """Read the options, fit and write the calibration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("list", type=Path, help="JSON lines: a run and its missing words")
    parser.add_argument("--out", "-o", type=Path, required=True)
    args = parser.parse_args(given)
    found = calibrated(args.list.read_text("utf-8").splitlines())
    found.write(args.out)
    print(f"missing below a lead of {found.lead:.3g}; AUC {found.auc:.3f} over {found.words} words")


if __name__ == "__main__":
    main()
