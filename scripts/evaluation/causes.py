"""Heatmaps against causes: does a map rank the cells as the change does when its word is gone?

The control is the map of the other object's word: a map that only tells objects from ground would
agree as well with the change of either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sdattn import Heatmap
from sdattn.control.knockouts import knockouts
from sdattn.models.demos import demo_settings

from .images import Sample
from .measures import rank_correlation
from .records import Records

SPANS = {"all steps": (0.0, 1.0), "second half": (0.5, 1.0)}  # in which the word is gone


def correlations(pipe: Any, images: Iterable[Sample], records: Records) -> None:
    """Of the shape words of each image, with the change where the word is gone for all steps and
    for the second half of them, by every way to make maps that the images have."""
    for image in images:
        if image.masks is None:
            continue
        words = list(dict.fromkeys(one.shape for one in image.scene.objects))
        for span, steps in SPANS.items():
            settings = demo_settings(pipe)
            done = knockouts(pipe, image.prompt, words, image.seed, steps=steps, **settings)
            for variant, heatmaps in image.heatmaps.items():
                key = "causes", "shape", variant
                found = [_agreement(heatmaps[one.word], one.heatmap) for one in done]
                records.add((*key, span), image.number, np.array(found))
                if len(words) == 2:
                    others = zip(words[::-1], done, strict=True)
                    found = [_agreement(heatmaps[word], one.heatmap) for word, one in others]
                    records.add((*key, f"{span}, control"), image.number, np.array(found))


def _agreement(one: Heatmap, change: Heatmap) -> float:
    rows, cols = change.values.shape
    return rank_correlation(one.resize((rows, cols)).numpy(), change.values.numpy())
