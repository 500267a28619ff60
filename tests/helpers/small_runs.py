"""A small run of one image, made of random maps, with all the parts that a run can have."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from helpers.tiny_tokenizers import tiny_tokenizer
from sdattn import Heatmaps, read_prompt
from sdattn.files.records import plain, read_record
from sdattn.files.writing import write_files
from sdattn.maps.aggregation import aggregate
from sdattn.maps.details import Details
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import PRESETS
from sdattn.runs.folder import pack_with_page
from sdattn.runs.imagerun import Further, ImageRun
from sdattn.runs.info import Edited, RunSettings

PROMPT = "a red cat"


def small_run(seed=0, prompt=PROMPT, **info):
    """Of two layers; "red cat" is asked about, and steps and heads are kept."""
    numbers = torch.Generator().manual_seed(seed)

    def maps(images, *shape):
        return torch.rand(images, *shape, 77, generator=numbers).softmax(-1)

    def layers(images, *heads):
        held = {
            "down.a": LayerMap("down", 0, 2, maps(images, *heads, 4, 6)),
            "up.b": LayerMap("up", 1, 2, maps(images, *heads, 2, 3)),
        }
        return LayerMaps(held, tuple(range(77)), passes=2 if images == 1 else 1)

    spots = torch.rand(2, 3, 4, 6, generator=torch.Generator().manual_seed(seed)) / 24
    own = layers(1)
    preset = PRESETS["default"]
    heatmaps = Heatmaps(read_prompt(tiny_tokenizer(), prompt), aggregate(own, preset)[0])
    told = {"prompt": prompt, "seed": seed, "model": "demo", "pipeline": "P", "scheduler": "S"}
    told |= {"options": {"num_inference_steps": 2}, "options_left_out": [], "device": "cpu"}
    told |= {"dtype": "float32", "timesteps": [900.0, 100.0], "versions": {"torch": "2"}}
    told |= {"captured": {"steps": "all", "heads": "all", "spots": True}, "size": [96, 64]}
    told |= {"asked": "red cat"}
    return ImageRun(
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 96, 3), np.uint8)),
        heatmaps,
        own,
        read_record(RunSettings, plain({**told, **info})),
        Details(layers(2), (0, 1), layers(1, 2), "all", spots),
        {"asked": Further("red cat", heatmaps.occurrences()[1:])},
    )


def edited(mode="refine", **settings):
    """What was asked of an edit."""
    asked = {"cross_replace_steps": 0.8, "self_replace_steps": 0.4, "blend": None, "weights": {}}
    return Edited(**{"prompt": PROMPT, "targets": ["a red dog"], "mode": mode, **asked, **settings})


@cache
def packed(seed=0, parts=("image", "maps", "overlays", "grid", "masks", "report")):
    """Its files, by their paths."""
    return pack_with_page(small_run(seed), parts).files


def saved(folder, seed=0):
    """Its folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_files(Path(folder), packed(seed))
    return Path(folder)
