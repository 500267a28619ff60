"""The nodes: watch a sampler's attention, then heatmaps, masks and words of what it drew."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from sdattn import Heatmap, Heatmaps
from sdattn.errors import InvalidValueError
from sdattn.maps.masks import smooth
from sdattn.maps.sheets import grid
from torch import Tensor
from torch.nn.functional import max_pool2d

from .reading import NAMES, Asked, heatmaps, of_word, steps_kept
from .recording import Recorder
from .runs import Settings

CATEGORY = "sdattn"
ATTENTION = "SDATTN_ATTENTION"  # a type of our own: other nodes have an ATTENTION
SECOND_HALF, ALL_STEPS = "second half", "all steps"
MEAN, EVERY_STEP = "mean", "every step"
COLORMAPS = ["inferno", "viridis", "jet", "magma", "turbo", "gray"]
SHARE, OTSU, TOP = "share of range", "otsu", "top percent"
REGIONS = 6
Inputs = dict[str, dict[str, Any]]


def _asked(**more: Any) -> Inputs:
    """Return the inputs by which each node is told what was drawn, and its own."""
    required = {
        "attention": (ATTENTION, {"tooltip": "From Watch attention of the sampler meant."}),
        "clip": ("CLIP", {"tooltip": "The CLIP that encoded the prompt."}),
        "image": ("IMAGE", {"tooltip": "The decoded images of that sampler, not yet cropped."}),
        "prompt": (
            "STRING",
            {
                "multiline": True,
                "tooltip": "The prompt as encoded, weights and embeddings included. Between the "
                "prompts of Conditioning (Concat) write a line of ---.",
            },
        ),
    }
    optional = {
        "conditioning": (
            "CONDITIONING",
            {
                "tooltip": "Where the sampler draws from several texts (combined, by area, by "
                "mask, by time): the text encoder's output for the one meant."
            },
        ),
        "side": (
            list(NAMES),
            {"tooltip": "The sampler's input whose words are asked for.", "advanced": True},
        ),
        "spread": (
            "BOOLEAN",
            {
                "default": False,
                "advanced": True,
                "tooltip": "Spread maps along the image's self-attention, which Watch attention "
                "must keep. Edges become sharper.",
            },
        ),
    }
    return {"required": {**required, **more}, "optional": optional}


def _found(
    clip: Any,
    image: Tensor,
    prompt: str,
    conditioning: Any = None,
    side: str = NAMES[0],
    spread: bool = False,
) -> Asked:
    return Asked(clip, prompt, image, conditioning, side, spread)


def _words(text: str) -> list[str]:
    """Return words or phrases between commas or line ends."""
    return [word.strip() for word in text.replace("\n", ",").split(",") if word.strip()]


def _pictures(images: Tensor) -> list[Image.Image]:
    data = (images.clamp(0, 1) * 255).round().byte().cpu().numpy()
    return [Image.fromarray(one) for one in data]


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
        return _asked(
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
        asked = _found(**told)
        numbers = [None] if steps == MEAN else steps_kept(attention, asked)
        drawn = []
        of_steps = [(number, heatmaps(attention, asked, number)) for number in numbers]
        for i, picture in enumerate(_pictures(asked.images)):
            for number, of_images in of_steps:
                maps = of_images[i]
                tiles = [
                    heatmap.overlay(picture, colormap=colors).convert("RGB")
                    for heatmap in _of_words(maps, words)
                ]
                title = "image" if number is None else f"step {number}"
                drawn += [grid(picture, tiles, title)] if layout == "grid" else tiles
        made = np.stack([np.asarray(one.convert("RGB")) for one in drawn])
        return (torch.from_numpy(made).float() / 255,)


def _of_words(maps: Heatmaps, words: str) -> list[Heatmap]:
    return [of_word(maps, word) for word in _words(words)] or list(maps.values())


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
        return _asked(word=("STRING", {"tooltip": "A word or phrase of the prompt."}), **_cuts())

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
        asked = _found(**told)
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
        return _asked(
            x=("INT", place),
            y=("INT", {**place, "tooltip": "Pixels from the top."}),
            most=("INT", most),
        )

    def tell(
        self, attention: Recorder, x: int, y: int, most: int = 5, **told: Any
    ) -> dict[str, Any]:
        asked = _found(**told)
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
        return _asked(words=("STRING", told), **cuts)

    def masks(
        self,
        attention: Recorder,
        words: str,
        method: str = SHARE,
        level: float = 0.5,
        blur: float = 0.0,
        **told: Any,
    ) -> tuple[Tensor, ...]:
        asked, named = _found(**told), _words(words)
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


NODES = {
    "SdattnWatchAttention": (WatchAttention, "Watch attention"),
    "SdattnWordHeatmaps": (WordHeatmaps, "Word heatmaps"),
    "SdattnWordMask": (WordMask, "Word mask"),
    "SdattnWordsAtSpot": (WordsAtSpot, "Words at a spot"),
    "SdattnMasksForRegions": (MasksForRegions, "Masks for regions"),
}
