"""Each protocol: what is asked of an image, how its maps become labels, what is counted.

Sources: Helbling et al. 2025, "ConceptAttention" (arXiv:2502.04320) and its scripts, for
ImageNet-Segmentation and VOC; Tang et al. 2022, "What the DAAM", section 4.1 and its scripts, for
COCO-Gen. Those papers' scripts noise FLUX; here any pipeline that ``sdattn.explain()`` takes is
noised as that does it, so the scores are theirs, and not the models; nor is there a softmax over
concepts, which need a stream of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import interpolate

import sdattn
from sdattn.models.facts import default_size

from ..measures import Floats
from .data import VOC_CLASSES, Drawing, Sample
from .scores import Confusion, Labelled, ap_of_both, iou, iou_interval

SIDE = 224  # of ImageNet-Segmentation and of VOC with one class
MANY = 64  # of VOC with many
FIRST_SEED = 4  # ConceptAttention's
PLACES = ("background", "floor", "grass", "tree", "sky")
THRESHOLDS = (0.3, 0.4, 0.5)  # DAAM's tau


class Maps:
    """How maps are made: the pipeline, the preset and what ``explain()`` is told.

    Args:
        samples: noises an image, from seeds 4, 5, ...; their maps are averaged.
        ways: further options of :func:`sdattn.explain` and :func:`sdattn.generate`.
    """

    def __init__(self, pipe: Any, samples: int = 5, **ways: Any):
        self.pipe, self.samples, self.ways = pipe, samples, ways

    def of(self, image: Image.Image, prompt: str, words: Sequence[str]) -> Floats:
        """The words' maps of an image, float64 ``[words, rows, cols]``."""
        height, width = default_size(self.pipe)
        square = image.resize((width, height), Image.Resampling.BICUBIC)
        total: Any = 0
        for seed in range(FIRST_SEED, FIRST_SEED + self.samples):
            [run] = sdattn.explain(self.pipe, square, prompt, seed=seed, **self.ways)
            total = total + np.stack([np.asarray(run.heatmaps[word]) for word in words])
        return np.asarray(total, dtype=np.float64) / self.samples


def imagenet_seg(samples: Iterable[Sample], maps: Maps) -> dict[str, Any]:
    """One object an image: foreground is where its map is above the map's own mean."""
    counts, precisions = Labelled(), []
    for sample in samples:
        word = sample.words[1]
        [found] = maps.of(sample.image, f"a {word}", [word])
        truth = _nearest(sample.truth, SIDE)
        values = _nearest(found, SIDE)
        counts.add((values > values.mean()).astype(np.uint8), truth)
        precisions.append(ap_of_both(values, truth))
    return {
        "images": len(precisions),
        "accuracy": counts.accuracy,
        "printed as mIoU, acc / (2 - acc)": counts.printed_iou,
        "mean IoU": counts.mean_iou,
        "mAP": float(np.mean(precisions)) if precisions else float("nan"),
    }


def voc_single(samples: Iterable[Sample], maps: Maps) -> dict[str, Any]:
    """Images of one class: its map against those of words for backgrounds."""
    counts, number = Labelled(), 0
    for sample in samples:
        if len(sample.words) != 1:
            continue
        number += 1
        [(kind, word)] = sample.words.items()
        words = [word, *(other for other in PLACES if other != word)]
        shares = _shares(maps.of(sample.image, f"a {', '.join(words)}", words))
        found = (_nearest(shares.argmax(0), SIDE) == 0).astype(np.uint8)
        truth = _nearest(sample.truth, SIDE)
        counts.add(found, np.where(truth == kind, 1, truth).astype(np.uint8))
    return {
        "images": number,
        "accuracy": counts.accuracy,
        "IoU of the class": counts.foreground_iou,
        "mean IoU": counts.mean_iou,
    }


def voc_multi(samples: Iterable[Sample], maps: Maps) -> dict[str, Any]:
    """All classes of an image against each other; IoUs are summed over the data set."""
    counts, number = Confusion(len(VOC_CLASSES)), 0
    for sample in samples:
        number += 1
        kinds = [*sample.words]
        words = [*sample.words.values(), *PLACES]
        shares = _shares(maps.of(sample.image, f"a {', '.join(words)}", words))
        labels = np.array([*kinds, *(0 for _ in PLACES)], dtype=np.uint8)[shares.argmax(0)]
        counts.add(_nearest(labels, MANY), _nearest(sample.truth, MANY))
    by_class = zip(VOC_CLASSES, counts.ious, strict=True)
    return {
        "images": number,
        "accuracy": counts.accuracy,
        "mean IoU": counts.mean_iou,
        "IoU by class": {name: value for name, value in by_class if value is not None},
    }


def coco_gen(drawings: Iterable[Drawing], maps: Maps, steps: int = 30) -> dict[str, Any]:
    """Images that the model draws itself: the IoU of each word's map above ``tau`` of its range.

    "labelled": of the word's own map; "unlabelled": of whichever map of the image is best;
    "assigned": of those that the Hungarian method pairs (Kuhn 1955), each map with one mask.
    """
    ious: dict[tuple[str, float], list[float]] = defaultdict(list)
    number = 0
    for drawing in drawings:
        number += 1
        ways = {"num_inference_steps": steps, **maps.ways}
        [run] = sdattn.generate(maps.pipe, drawing.prompt, seed=drawing.seed, **ways)
        masks = [*drawing.masks.values()]
        rows, cols = masks[0].shape
        every = [_scaled(one, (rows, cols)) for one in run.heatmaps.occurrences()]
        own = [_scaled(np.asarray(run.heatmaps[word]), (rows, cols)) for word in drawing.masks]
        for tau in THRESHOLDS:
            table = np.array([[iou(one > tau, mask) for one in every] for mask in masks])
            pairs = zip(own, masks, strict=True)
            ious["labelled", tau] += [iou(one > tau, mask) for one, mask in pairs]
            ious["unlabelled", tau] += table.max(1).tolist()
            ious["assigned", tau] += table[linear_sum_assignment(-table)].tolist()
    found: dict[str, Any] = {"images": number}
    for (name, tau), values in ious.items():
        mean, half = iou_interval(values)
        found[f"IoU, {name}, above {tau}"] = mean
        found[f"± of it, {name}, above {tau}"] = half
    return found


def _shares(maps: Floats) -> Floats:
    """Each cell's values from the lowest of the words on, as shares of their sum."""
    shifted = maps - maps.min(0)
    return shifted / np.maximum(shifted.sum(0), np.finfo(np.float64).tiny)


def _nearest(values: Any, side: int) -> Any:
    """``[rows, cols]`` at ``[side, side]``, the nearest cell's."""
    given = torch.from_numpy(np.ascontiguousarray(values))
    held = given.double()[None, None]
    found = interpolate(held, size=(side, side), mode="nearest")[0, 0].numpy()
    return found.astype(np.asarray(values).dtype)


def _scaled(values: Any, size: tuple[int, int]) -> Floats:
    """A map at an image's size, bicubic, from 0 at its lowest to 1 at its highest."""
    held = torch.from_numpy(np.asarray(values, dtype=np.float64))[None, None]
    found = interpolate(held, size=size, mode="bicubic", align_corners=False)[0, 0].numpy()
    low, high = found.min(), found.max()
    return (found - low) / max(high - low, np.finfo(np.float64).tiny)


def table(protocol: str, found: Mapping[str, Any]) -> str:
    """The figures as a table in Markdown."""
    lines = [f"| {protocol} | |", "|---|---|"]
    for name, value in found.items():
        if isinstance(value, Mapping):
            lines += [f"| IoU of {kind} | {one:.3f} |" for kind, one in value.items()]
        elif not name.startswith("±"):
            half = found.get("± of it" + name.removeprefix("IoU"))
            text = f"{value:.3f}" if isinstance(value, float) else str(value)
            lines.append(f"| {name} | {text}{'' if half is None else f' ± {half:.3f}'} |")
    return "\n".join(lines) + "\n"
