"""Nodes that make masks: of a word, and of several, none of which overlap."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from sdattn.errors import InvalidValueError
from sdattn.maps.masks import smooth

from .inputs import CATEGORY, Inputs, asked_for, reader_inputs, words_of
from .reading import heatmaps, of_word
from .recording import Recorder

SHARE = "share of range"
OTSU = "otsu"
TOP = "top percent"
REGIONS = 6


class WordMask:
    """Makes a mask of the place where a word's map is high."""

    DESCRIPTION = "Makes a mask of where a word went, for inpainting, LoRA masks or conditioning."
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("attention mask", "segment by prompt", "word to mask", "text mask")
    FUNCTION = "mask"
    RETURN_TYPES = ("MASK",)
    OUTPUT_TOOLTIPS = ("A mask for each image, 1 where the word went.",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        return reader_inputs(
            word=("STRING", {"tooltip": "A word or phrase of the prompt."}), **_cuts()
        )

    def mask(
        self,
        attention: Recorder,
        word: str,
        method: str = SHARE,
        level: float = 0.5,
        grow: int = 0,
        blur: float = 0.0,
        invert: bool = False,
        **told: Any,
    ) -> tuple[Tensor]:
        asked = asked_for(**told)
        size = asked.images.shape[1], asked.images.shape[2]
        masks = [
            of_word(maps, word).mask(size, **_threshold(method, level))
            for maps in heatmaps(attention, asked)
        ]
        return (_finished(torch.stack(masks).float(), grow, blur, invert),)


def _cuts() -> dict[str, Any]:
    """Return the inputs that say how a map becomes a mask."""
    method = {
        "tooltip": "Where the map is cut: at a share of its range, where Otsu's method splits it, "
        "or so that the highest percent of the pixels remain."
    }
    level = {
        "default": 0.5,
        "min": 0.0,
        "max": 1.0,
        "step": 0.01,
        "tooltip": "The share of the range, or of the pixels; not used by otsu.",
    }
    grow = {"default": 0, "min": -1024, "max": 1024, "tooltip": "Pixels to grow by, or shrink."}
    blur = {"default": 0.0, "min": 0.0, "max": 512.0, "tooltip": "Sigma of a blur, in pixels."}
    return {
        "method": ([SHARE, OTSU, TOP], method),
        "level": ("FLOAT", level),
        "grow": ("INT", grow),
        "blur": ("FLOAT", blur),
        "invert": ("BOOLEAN", {"default": False, "tooltip": "Mask everything else instead."}),
    }


def _threshold(method: str, level: float) -> dict[str, Any]:
    if method == TOP:
        return {"quantile": min(1 - level, 1 - 1e-6)}
    return {"threshold": "otsu" if method == OTSU else level}


def _finished(masks: Tensor, grow: int, blur: float, invert: bool = False) -> Tensor:
    """Return masks ``[..., H, W]`` grown by some pixels, blurred and inverted."""
    sign = 1 if grow > 0 else -1
    for _ in range(abs(grow)):  # 3x3 at a time, in a shape near to a circle's
        masks = sign * max_pool2d(sign * masks[None], 3, stride=1, padding=1)[0]
    masks = smooth(masks, blur).clamp(0, 1)
    return 1 - masks if invert else masks


class MasksForRegions:
    """Makes disjoint masks of several words."""

    DESCRIPTION = (
        "Makes a mask for each of several words, no two of which overlap: a pixel belongs to the "
        "word whose map is highest there. For conditioning, LoRA masks or regional prompts."
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("regional masks", "lora mask", "segment words", "disjoint masks")
    FUNCTION = "masks"
    RETURN_TYPES = ("MASK",) * (REGIONS + 2)
    RETURN_NAMES = (*(f"mask {i + 1}" for i in range(REGIONS)), "rest", "all")
    OUTPUT_TOOLTIPS = (
        *(f"The mask of word {i + 1}; empty if there are fewer." for i in range(REGIONS)),
        "What no word has.",
        "The masks of all words as a batch, image by image.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        told = {
            "multiline": True,
            "tooltip": f"Up to {REGIONS} words or phrases, a line or commas between.",
        }
        cuts = _cuts()
        del cuts["invert"], cuts["grow"]
        return reader_inputs(words=("STRING", told), **cuts)

    def masks(
        self,
        attention: Recorder,
        words: str,
        method: str = SHARE,
        level: float = 0.5,
        blur: float = 0.0,
        **told: Any,
    ) -> tuple[Tensor, ...]:
        asked = asked_for(**told)
        named = words_of(words)
        if not 1 <= len(named) <= REGIONS:
            raise InvalidValueError(
                f"{len(named)} words were asked for. Write 1 to {REGIONS}, with commas between."
            )
        size = asked.images.shape[1], asked.images.shape[2]
        labels = []
        for maps in heatmaps(attention, asked):
            known = [of_word(maps, word).label for word in named]
            labels.append(maps.segment(known, size, **_threshold(method, level)))
        owner = torch.stack(labels)  # [images, H, W]: 0 for none, else the word's number
        parts = [_finished((owner == i).float(), 0, blur) for i in range(REGIONS + 1)]
        every = torch.stack(parts[1 : len(named) + 1], 1).flatten(0, 1)
        return (*parts[1:], parts[0], every)
