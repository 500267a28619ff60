"""The recipe of the demo of sprites: its words, its mistakes, and a short run of all its stages."""

import argparse
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from diffusers import StableDiffusionPipeline

import sdattn
from scripts.training import data, sprite_parts, train_demo_model, train_demo_sprites
from scripts.training.models import new_unet
from scripts.training.patches import CHANNELS
from scripts.training.record import snapshot
from scripts.training.sprite_parts import (
    RECIPE,
    report_images,
)

pytestmark = pytest.mark.slow
SCENES = 64  # of a chunk
STAGES = ("decoder", "text", "unet", "refine")


@pytest.fixture
def small(monkeypatch):
    """A narrow UNet that is not compiled, few scenes, one image of two steps."""
    real = data.make_scenes
    monkeypatch.setattr(data, "make_scenes", lambda seed, **how: real(seed, count=SCENES, **how))
    unet = partial(new_unet, CHANNELS, (8, 8, 8, 8), (1, 1, 1, 1))
    report = partial(report_images, count=6)
    recipe = replace(RECIPE, unet=unet, report=report, compiled=False)
    monkeypatch.setattr(train_demo_sprites, "RECIPE", recipe)
    monkeypatch.setattr(sprite_parts, "SETTINGS", {"num_inference_steps": 2})
    few = partial(sprite_parts.vae_psnr, make=sprite_parts.UNSEEN_SPRITES)
    for module in (train_demo_model, sprite_parts):
        monkeypatch.setattr(module, "vae_psnr", lambda vae, **_: few(vae, 7, 2))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # a run takes all cores
    return unet


def test_the_model_is_a_pipeline_of_float32_whoever_opens_it(small, tmp_path):
    args = {f"{stage}_steps": 1 for stage in STAGES}
    args |= {"work": tmp_path, "out": tmp_path / "model", "seed": 1, "chunks": 1, "start": None}
    train_demo_sprites.run(
        argparse.Namespace(**args, processes=1, device="cpu", batch=32, snapshot=False)
    )
    out = tmp_path / "model"
    pipe = StableDiffusionPipeline.from_pretrained(out)  # with no word about a dtype
    parts = (pipe.unet, pipe.vae, pipe.text_encoder)
    assert {part.dtype for part in parts} == {torch.float32}
    assert pipe.tokenizer.model_max_length == 77
    run = sdattn.generate(pipe, "a cat left of a blue car", seed=0, num_inference_steps=2)
    assert run.images[0].size == (128, 128)
    assert run.heatmaps[0]["cat"].map.shape[-2:] == (16, 16)
    again = snapshot(tmp_path, small)
    for name, value in again.unet.state_dict().items():
        assert torch.equal(pipe.unet.state_dict()[name], value.half().float()), name
    told = json.loads((out / "training.json").read_text())
    assert told["stages"].keys() == {*STAGES}
    told = json.loads((out / "demo.json").read_text())
    assert {"cat", "pizza"} <= {*told["words"]["nouns"]}
