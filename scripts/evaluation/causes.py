"""Heatmaps against causes: does a map rank the cells as the change does when its word is gone?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdattn import Heatmap
from sdattn.causes import knockouts
from sdattn.pipelines import DEMO_SETTINGS

from .measures import rank_correlation
from .pictures import Asked, generated
from .records import Records
from .variants import PEERS

SPANS = {"all steps": (0.0, 1.0), "second half": (0.5, 1.0)}  # in which the word is gone


def correlations(pipe: Any, asked: Sequence[Asked], seed: int, records: Records) -> None:
    """Of the shape words of each picture, with the change where the word is gone for all steps and
    for the second half of them."""
    for picture in generated(pipe, asked, seed, PEERS):
        words = list(dict.fromkeys(one.shape for one in picture.scene.objects))
        for span, steps in SPANS.items():
            done = knockouts(
                pipe, picture.prompt, words, picture.seed, steps=steps, **DEMO_SETTINGS
            )
            for variant, heatmaps in picture.heatmaps.items():
                found = [_agreement(heatmaps[one.word], one.heatmap) for one in done]
                values = np.array([value for value in found if np.isfinite(value)])
                records.add(("causes", "shape", variant, span), picture.number, values)


def _agreement(one: Heatmap, change: Heatmap) -> float:
    rows, cols = change.values.shape
    return rank_correlation(one.resize((rows, cols)).numpy(), change.values.numpy())
