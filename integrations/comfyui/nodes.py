"""Nodes that watch a sampler's attention, draw words' heatmaps and tell the words of a spot."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdattn import Heatmap, Heatmaps
from sdattn.errors import InvalidValueError
from sdattn.maps.sheets import grid

from .inputs import (
    ALL_STEPS,
    ATTENTION,
    CATEGORY,
    COLORMAPS,
    EVERY_HEAD,
    EVERY_STEP,
    MEAN,
    SECOND_HALF,
    Inputs,
    as_images,
    asked_for,
    reader_inputs,
    words_of,
)
from .reading import Asked, cell_maps, heads_kept, heatmaps, of_word, steps_kept
from .recording import Recorder
from .runs import Settings


class WatchAttention:
    """Goes between the model and one sampler."""

    DESCRIPTION = (
        "Records what the image attends to in the prompt while one sampler runs. Put it directly "
        "in front of that sampler; the image stays the same, bit for bit. Other nodes then show "
        "where each word went."
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("attention", "cross attention", "daam", "heatmap", "attention map")
    FUNCTION = "watch"
    RETURN_TYPES = ("MODEL", ATTENTION)
    RETURN_NAMES = ("model", "attention")
    OUTPUT_TOOLTIPS = ("The model, to the sampler.", "The attention, to the nodes that show it.")

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        steps = {"tooltip": "Maps are clearest in the second half, when the image has formed."}
        keep = {
            "advanced": True,
            "tooltip": "Keep the mean over steps alone, or the maps of every step too.",
        }
        spread = {
            "default": False,
            "advanced": True,
            "tooltip": "Also keep the image's self-attention on grids of up to 1024 cells, so that "
            "maps can be spread along it.",
        }
        megabytes = {
            "default": 1024,
            "min": 1,
            "max": 1 << 20,
            "advanced": True,
            "tooltip": "Upper limit for single steps, single heads and self-attention together.",
        }
        heads = {
            "advanced": True,
            "tooltip": "Keep the mean over heads alone, or the maps of every head too.",
        }
        required = {
            "model": ("MODEL", {"tooltip": "The model that the sampler would get."}),
            "steps": ([SECOND_HALF, ALL_STEPS], steps),
        }
        optional = {
            "keep": ([MEAN, EVERY_STEP], keep),
            "spread": ("BOOLEAN", spread),
            "megabytes": ("INT", megabytes),
            "heads": ([MEAN, EVERY_HEAD], heads),
        }
        return {"required": required, "optional": optional}

    def watch(
        self,
        model: Any,
        steps: str = SECOND_HALF,
        keep: str = MEAN,
        spread: bool = False,
        megabytes: int = 1024,
        heads: str = MEAN,
    ) -> tuple[Any, Recorder]:
        settings = Settings(
            second_half=steps == SECOND_HALF,
            every_step=keep == EVERY_STEP,
            every_head=heads == EVERY_HEAD,
            spread=spread,
            max_bytes=megabytes << 20,
        )
        recorder = Recorder(settings)
        patched = model.clone()
        recorder.install(patched)
        return patched, recorder


class WordHeatmaps:
    """Draws words' heatmaps over the images."""

    DESCRIPTION = "Draws where each word of the prompt went, over the images of the sampler."
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("attention map", "daam", "token heatmap", "visualize attention", "overlay")
    FUNCTION = "draw"
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("heatmaps",)
    OUTPUT_TOOLTIPS = ("Image after image, each word by word; or a grid for each image.",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        words = {"default": "", "tooltip": "Words or phrases, commas between. Empty: every word."}
        layout = {"tooltip": "A grid of all words for each image, or an image for each word."}
        colors = {"tooltip": "Colour map of matplotlib."}
        steps = {"tooltip": "The mean over steps, or an image for every step that was kept."}
        heads = {"tooltip": "The mean over heads, or an image for every head that was kept."}
        return reader_inputs(
            words=("STRING", words),
            layout=(["grid", "one each"], layout),
            colors=(COLORMAPS, colors),
            steps=([MEAN, EVERY_STEP], steps),
            heads=([MEAN, EVERY_HEAD], heads),
        )

    def draw(
        self,
        attention: Recorder,
        words: str = "",
        layout: str = "grid",
        colors: str = COLORMAPS[0],
        steps: str = MEAN,
        heads: str = MEAN,
        **told: Any,
    ) -> tuple[Tensor]:
        views = list(_views(attention, asked_for(**told), steps, heads))
        drawn = []
        for i, image in enumerate(as_images(told["image"])):
            for title, of_images in views:
                tiles = [
                    heatmap.overlay(image, cmap=colors).convert("RGB")
                    for heatmap in _of_words(of_images[i], words)
                ]
                drawn += [grid(image, tiles, title)] if layout == "grid" else tiles
        made = np.stack([np.asarray(tile.convert("RGB")) for tile in drawn])
        return (torch.from_numpy(made).float() / 255,)


def _views(
    attention: Recorder, asked: Asked, steps: str, heads: str
) -> Iterator[tuple[str, list[Heatmaps]]]:
    """Yield a title and the heatmaps of each image, of every step or head if they are asked for."""
    if (steps != MEAN and asked.step is not None) or (heads != MEAN and asked.head is not None):
        raise InvalidValueError(
            f"One step (step={asked.step}) or head (head={asked.head}) and every one were asked "
            "for. Set step and head to -1, or steps and heads to mean."
        )
    for step in [asked.step] if steps == MEAN else steps_kept(attention, asked):
        of_step = replace(asked, step=step)
        for head in [asked.head] if heads == MEAN else heads_kept(attention, of_step):
            parts = {"step": step, "head": head}
            named = [f"{name} {number}" for name, number in parts.items() if number is not None]
            title = ", ".join(named) or "image"
            yield title, heatmaps(attention, replace(of_step, head=head))


def _of_words(maps: Heatmaps, words: str) -> list[Heatmap]:
    return [of_word(maps, word) for word in words_of(words)] or list(maps.values())


class WordsAtSpot:
    """Tells which words a spot of the image attends to."""

    DESCRIPTION = "Tells which words a spot of the image comes from, by their share there."
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("which word", "words at point", "explain pixel", "interrogate spot")
    FUNCTION = "tell"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING", "STRING")
    RETURN_NAMES = ("words", "table")
    OUTPUT_TOOLTIPS = ("The words, commas between.", "A line for each word, with its shares.")

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        most = {"default": 5, "min": 1, "max": 1000, "tooltip": "How many words to tell."}
        return reader_inputs(**_places(), most=("INT", most))

    def tell(
        self, attention: Recorder, x: int, y: int, most: int = 5, **told: Any
    ) -> dict[str, Any]:
        asked = asked_for(**told)
        width_share, height_share = _spot(asked, x, y)
        lines = []
        first = ""
        for number, maps in enumerate(heatmaps(attention, asked)):
            rows, cols = maps.maps.shape[:2]
            cell = int(height_share * rows), int(width_share * cols)
            strongest = sorted(_shares(maps, cell), reverse=True)[:most]
            first = first or ", ".join(word for _, _, word in strongest)
            lines += [f"image {number + 1}, x={x}, y={y}"] if len(asked.images) > 1 else []
            lines += [
                f"{word}: {ratio:.1f} times its mean, {share:.1%} of the attention"
                for ratio, share, word in strongest
            ]
        table = "\n".join(lines)
        return {"ui": {"text": [table]}, "result": (first, table)}


def _shares(maps: Heatmaps, cell: tuple[int, int]) -> Iterator[tuple[float, float, str]]:
    """Yield each word's value in a cell as a multiple of its mean, and as it is.

    A word with much attention everywhere says nothing of a spot, so the first counts."""
    for word, heatmap in maps.items():
        if any(letter.isalnum() for letter in word):
            share = float(heatmap.values[cell])
            yield share / max(heatmap.mean, 1e-12), share, word


def _places() -> dict[str, Any]:
    """Return the inputs that name a spot."""
    place = {"default": 0, "min": 0, "max": 1 << 16}
    return {
        "x": ("INT", {**place, "tooltip": "Pixels from the left."}),
        "y": ("INT", {**place, "tooltip": "Pixels from the top."}),
    }


def _spot(asked: Asked, x: int, y: int) -> tuple[float, float]:
    """Return a spot as shares of the width and the height; raise ValueError for one outside."""
    height, width = asked.images.shape[1:3]
    if not (0 <= x < width and 0 <= y < height):
        raise InvalidValueError(
            f"The spot x={x}, y={y} is outside the image of {width}x{height} pixels (width x "
            "height)."
        )
    return x / width, y / height


class SelfAttentionOfSpot:
    """Shows what a spot of the image attends to in the image itself."""

    DESCRIPTION = (
        "Shows what a spot of the image attends to in the image itself, if Watch attention keeps "
        "the self-attention (spread). Parts of one thing attend to each other."
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("self attention", "attention of a point", "affinity", "segment by point")
    FUNCTION = "show"
    RETURN_TYPES = ("IMAGE", "MASK")
    RETURN_NAMES = ("heatmaps", "mask")
    OUTPUT_TOOLTIPS = ("A heatmap over each image.", "The same, 1 where the attention is highest.")

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        colors = {"tooltip": "Colour map of matplotlib."}
        told = reader_inputs(**_places(), colors=(COLORMAPS, colors))
        without = ("clip", "prompt", "spread", "step", "head")  # which the image itself has not
        return {
            kind: {name: value for name, value in inputs.items() if name not in without}
            for kind, inputs in told.items()
        }

    def show(
        self, attention: Recorder, x: int, y: int, colors: str = COLORMAPS[0], **told: Any
    ) -> tuple[Tensor, Tensor]:
        asked = asked_for(**told)
        maps = cell_maps(attention, asked, *_spot(asked, x, y))
        drawn = []
        masks = []
        for image, values in zip(as_images(asked.images), maps, strict=True):
            heatmap = Heatmap(f"x={x}, y={y}", values, ())
            overlay = heatmap.overlay(image, cmap=colors, caption=False)
            drawn.append(np.asarray(overlay.convert("RGB")))
            resized = heatmap.resize((image.height, image.width))
            masks.append(resized / resized.max())
        return torch.from_numpy(np.stack(drawn)).float() / 255, torch.stack(masks)
