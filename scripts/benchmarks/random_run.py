"""A run of the size of Stable Diffusion 1.5's, of random maps: what benchmarks and tests pack."""

import numpy as np
import torch
from PIL import Image
from transformers import CLIPTokenizer

from sdattn import Heatmaps, read_prompt
from sdattn.maps.aggregation import aggregate
from sdattn.maps.details import Details
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import PRESETS
from sdattn.models.demos import DEMO
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.info import RunSettings

LEVELS = {"down": (0, 0, 1, 1, 2, 2), "mid": (3,), "up": (2, 2, 2, 1, 1, 1, 0, 0, 0)}


def random_run(words: int = 10, steps: int = 0, side: int = 512) -> ImageRun:
    """16 layers of 77 columns on grids of 64x64 and less, an image of noise of ``side`` pixels,
    and so many steps kept."""
    chance = torch.Generator().manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(DEMO / "tokenizer")
    prompt = read_prompt(tokenizer, " ".join(["purple"] * words), max_length=77)

    def maps(images: int, columns: tuple[int, ...], passes: int) -> LayerMaps:
        found = {}
        for place, levels in LEVELS.items():
            for i, level in enumerate(levels):
                cells = 64 >> level
                random = torch.rand(images, cells, cells, 77, generator=chance)
                values = (4 * random).softmax(-1)[..., list(columns)]
                found[f"{place}.{i}"] = LayerMap(place, level, 8, values)
        return LayerMaps(found, columns, passes)

    layers = maps(1, tuple(range(77)), 25)
    kept = maps(steps, tuple(range(1, words + 1)), 1) if steps else None
    heatmaps = Heatmaps(prompt, aggregate(layers, PRESETS["default"])[0])
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    details = Details(kept, tuple(range(steps)))
    settings = RunSettings(prompt=prompt.text, seed=None)
    return ImageRun(Image.fromarray(noise), heatmaps, layers, settings, details)
