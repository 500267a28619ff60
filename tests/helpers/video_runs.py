"""A run of a video without a model: a disc moves to the right, and its words' maps follow it."""

import numpy as np
import torch
from PIL import Image

from helpers.tiny_tokenizers import tiny_tokenizer
from sdattn import Heatmaps, read_prompt
from sdattn.files.videos import Video
from sdattn.maps.aggregation import aggregate
from sdattn.maps.details import Details
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import PRESETS
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.info import RunSettings

PROMPT = "a red cat"


def disc_run(
    frames=9, latent=3, size=(96, 64), grid=(8, 12), *, prompt=PROMPT, noise=0.0, steps=0, groups=1
):
    """``size`` is (width, height); ``noise`` is the deviation of each pixel; ``groups`` layers have
    places of their own."""
    chance = np.random.default_rng(0)
    video = Video([_image(i / max(frames - 1, 1), size, noise, chance) for i in range(frames)], 8.0)
    own = _layers(1, groups, latent, grid, chance)
    text = read_prompt(tiny_tokenizer(), prompt)
    heatmaps = Heatmaps(text, aggregate(own, PRESETS["default"])[0])
    told = {"prompt": prompt, "seed": 0, "pipeline": "P", "frames": frames, "frame_rate": 8.0}
    kept = _layers(steps, groups, latent, grid, chance) if steps else None
    details = Details(kept, tuple(range(steps)))
    return ImageRun(video[video.middle], heatmaps, own, RunSettings(**told), details, video=video)


def _centre(time):
    return 0.15 + 0.7 * time, 0.5 + 0.2 * np.sin(3 * time)


def _image(time, size, noise, chance):
    width, height = size
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pixels = np.stack([60 + 120 * across, 80 + 100 * down, 200 - 60 * across], -1)
    x, y = _centre(time)
    pixels[((across - x) * width / height) ** 2 + (down - y) ** 2 < 0.12**2] = 210, 50, 40
    pixels = pixels + chance.normal(0, noise, pixels.shape) if noise else pixels
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _layers(number, groups, latent, grid, chance):
    """Maps of ``number`` images or steps, [number, latent, rows, cols, 77]."""
    rows, cols = grid
    across, down = np.meshgrid((np.arange(cols) + 0.5) / cols, (np.arange(rows) + 0.5) / rows)
    found = {}
    for group in range(groups):
        scores = 0.25 * chance.normal(size=(number, latent, rows, cols, 77))
        for frame in range(latent):
            time = frame / max(latent - 1, 1)
            x, y = _centre(time)
            near = np.exp(-((across - x) ** 2 + (down - y) ** 2) / 0.02)
            scores[:, frame, ..., 3] += 5 * near
            scores[:, frame, ..., 2] += 4 * (0.3 + time) * near
        maps = torch.tensor(scores, dtype=torch.float32).softmax(-1)
        found[f"block.{group}"] = LayerMap(f"part {group + 1}", 0, 2, maps, True)
    return LayerMaps(found, tuple(range(77)), passes=1)
