"""Harm to a model, and two threads at one: what is hostile is refused before it runs, an invalid
image or map is an error, and each thread gets what it would have got alone."""

import json
import math
import os
import random
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import sdattn
from sdattn.models.demos import DEMO
from sdattn.models.finite import NotFiniteError

from . import PROMPTS, World, kind

PARTS = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
LIBRARIES = (
    "hostile",
    "os",
    "subprocess",
    "torch.nn",
    "..hostile",
    "diffusers.utils",
    "",
    "sdattn",
)
CLASSES = ("Own", "system", "Popen", "Module", "DiffusionPipeline", "AutoModel", "__class__", "")
CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from diffusers import DiffusionPipeline as Own, UNet2DConditionModel
"""


def copy_of(world: World) -> Path:
    """A model's folder that may be spoilt: files that change are copies, the weights are links."""
    folder = world.new_folder() / "model"

    def copy(source: str, target: str) -> None:
        (os.symlink if source.endswith(".safetensors") else shutil.copyfile)(source, target)

    return Path(shutil.copytree(DEMO, folder, copy_function=copy))


@kind("a hostile model_index.json", 8)
def hostile_index(world: World, chance: random.Random) -> str | None:
    """Some of its entries name what no model needs, and a module of that name lies where Python or
    diffusers may look for it."""
    folder = copy_of(world)
    mark = folder.parent / "it ran"
    for place in (folder, folder.parent, *(folder / part for part in PARTS)):
        if place == folder.parent or chance.random() < 0.5:
            (place / "hostile.py").write_text(CODE.format(mark=str(mark)))
    index = json.loads((folder / "model_index.json").read_text())
    entry = [chance.choice(LIBRARIES), chance.choice(CLASSES)]
    name = chance.choice([*PARTS, "_class_name", "another", "../model"])
    index[name] = chance.choice([entry, entry[::-1]]) if name == "_class_name" else entry
    (folder / "model_index.json").write_text(json.dumps(index))
    told = f"{name}: {index[name]}"
    try:
        sdattn.load_pipeline(folder, device="cpu")
    except ValueError as error:
        if str(folder) not in str(error):
            return f"{told} was refused without a word of where it is: {error}"
    else:
        return f"{told} was let in"
    ran = mark.exists() or "hostile" in sys.modules
    shutil.rmtree(folder.parent)
    return f"{told}: code of the folder ran" if ran else None


def pipeline(world: World) -> Any:
    """The demo model, loaded once."""
    if "pipeline" not in vars(world):
        vars(world)["pipeline"] = sdattn.load_pipeline("demo", device="cpu")
        vars(world)["pipeline"].set_progress_bar_config(disable=True)
    return vars(world)["pipeline"]


@kind("a model with a weight that is not finite", 5)
def not_finite(world: World, chance: random.Random) -> str | None:
    """One weight is NaN: no image comes of it, but an error that says what to try."""
    pipe = pipeline(world)
    parts = {"unet": pipe.unet, "vae": pipe.vae.decoder, "text_encoder": pipe.text_encoder}
    part = chance.choice(list(parts))
    weights = {n: w for n, w in parts[part].named_parameters() if "embedding" not in n}
    name = chance.choice(sorted(weights))
    place = chance.randrange(weights[name].numel())
    flat = weights[name].data.view(-1)
    before, told = flat[place].clone(), f"NaN at {place} of {part}.{name}"
    flat[place] = math.nan
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of invalid pixels
            sdattn.generate(pipe, chance.choice(PROMPTS), num_inference_steps=1)
    except NotFiniteError as error:
        return None if "ry " in str(error) else f"{told}: no word of what to try: {error}"
    finally:
        flat[place] = before
    return f"{told}: an image was made of it"


@kind("two threads at one pipeline", 3)
def two_threads(world: World, chance: random.Random) -> str | None:
    """Images and maps are those of either run alone."""
    pipe = pipeline(world)
    jobs = [(chance.choice(PROMPTS), chance.randrange(2**32)) for _ in range(2)]

    def draw(job: tuple[str, int]) -> tuple[bytes, torch.Tensor]:
        run = sdattn.generate(pipe, job[0], seed=job[1], num_inference_steps=2)
        return run.images[0].tobytes(), run.heatmaps[0].maps

    alone = [draw(job) for job in jobs]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(draw, jobs))
    for job, (image, maps), (other, others) in zip(jobs, alone, together, strict=True):
        if image != other or not torch.equal(maps, others):
            return f"{job} gave another {'image' if image != other else 'map'} beside the other"
    return None
