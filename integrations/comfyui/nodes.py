"""Nodes that watch a sampler's attention, draw words' heatmaps and tell the words of a spot."""

from collections.abc import Iterator
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
    EVERY_STEP,
    MEAN,
    SECOND_HALF,
    Inputs,
    as_images,
    asked_for,
    reader_inputs,
    words_of,
)
from .reading import heatmaps, of_word, steps_kept
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
            "tooltip": "Upper limit for single steps and self-attention together.",
        }
        required = {
            "model": ("MODEL", {"tooltip": "The model that the sampler would get."}),
            "steps": ([SECOND_HALF, ALL_STEPS], steps),
        }
        optional = {
            "keep": ([MEAN, EVERY_STEP], keep),
            "spread": ("BOOLEAN", spread),
            "megabytes": ("INT", megabytes),
        }
        return {"required": required, "optional": optional}

    def watch(
        self,
        model: Any,
        steps: str = SECOND_HALF,
        keep: str = MEAN,
        spread: bool = False,
        megabytes: int = 1024,
    ) -> tuple[Any, Recorder]:
        settings = Settings(steps == SECOND_HALF, keep == EVERY_STEP, spread, megabytes << 20)
        recorder, patched = Recorder(settings), model.clone()
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
        return reader_inputs(
            words=("STRING", words),
            layout=(["grid", "one each"], layout),
            colors=(COLORMAPS, colors),
            steps=([MEAN, EVERY_STEP], steps),
        )

    def draw(
        self,
        attention: Recorder,
        words: str = "",
        layout: str = "grid",
        colors: str = COLORMAPS[0],
        steps: str = MEAN,
        **told: Any,
    ) -> tuple[Tensor]:
        asked = asked_for(**told)
        numbers = [None] if steps == MEAN else steps_kept(attention, asked)
        drawn = []
        of_steps = [(number, heatmaps(attention, asked, number)) for number in numbers]
        for i, picture in enumerate(as_images(asked.images)):
            for number, of_images in of_steps:
                maps = of_images[i]
                tiles = [
                    heatmap.overlay(picture, cmap=colors).convert("RGB")
                    for heatmap in _of_words(maps, words)
                ]
                title = "image" if number is None else f"step {number}"
                drawn += [grid(picture, tiles, title)] if layout == "grid" else tiles
        made = np.stack([np.asarray(one.convert("RGB")) for one in drawn])
        return (torch.from_numpy(made).float() / 255,)


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
        place = {"default": 0, "min": 0, "max": 1 << 16, "tooltip": "Pixels from the left."}
        most = {"default": 5, "min": 1, "max": 1000, "tooltip": "How many words to tell."}
        return reader_inputs(
            x=("INT", place),
            y=("INT", {**place, "tooltip": "Pixels from the top."}),
            most=("INT", most),
        )

    def tell(
        self, attention: Recorder, x: int, y: int, most: int = 5, **told: Any
    ) -> dict[str, Any]:
        asked = asked_for(**told)
        height, width = asked.images.shape[1:3]
        if not (0 <= x < width and 0 <= y < height):
            raise InvalidValueError(
                f"The spot x={x}, y={y} is outside the image of {width}x{height} pixels (width x "
                "height)."
            )
        lines, first = [], ""
        for number, maps in enumerate(heatmaps(attention, asked)):
            rows, cols = maps.maps.shape[:2]
            cell = y * rows // height, x * cols // width
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
