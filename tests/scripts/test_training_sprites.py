"""The recipe of the demo of sprites: its words, its mistakes, and a short run of all its stages."""

import argparse
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

import sdattn
from scripts.scenes.emoji import random_scene
from scripts.scenes.sprites import COLOURS, nouns
from scripts.training import data, sprite_parts, train_demo_model, train_demo_sprites
from scripts.training.losses import captions, split
from scripts.training.models import new_text_encoder, new_unet
from scripts.training.patches import BLOCKS, CHANNELS
from scripts.training.record import snapshot
from scripts.training.sprite_parts import (
    RECIPE,
    WORDS,
    make_word_tokenizer,
    new_sprite_unet,
    report_images,
)

pytestmark = pytest.mark.slow
SCENES = 64  # of a chunk
STAGES = ("decoder", "text", "unet", "refine")


def test_each_word_is_one_token_and_a_prompt_has_77_columns():
    tokenizer = make_word_tokenizer()
    known = [word for kind in WORDS.values() for word in kind]
    read = tokenizer([f"{word}, {word}" for word in known], add_special_tokens=False).input_ids
    assert all(len(ids) == 3 and ids[0] == ids[2] for ids in read)
    assert len({ids[0] for ids in read}) == len(set(known))
    assert len(tokenizer("zebra", add_special_tokens=False).input_ids) > 1
    rng = np.random.default_rng(0)
    longest = max(len(split(said)) for _ in range(500) for said in random_scene(rng).prompts())
    padded = tokenizer(["a cat"], padding="max_length").input_ids
    assert longest + 2 < 77 == len(padded[0])


def test_the_unet_has_the_attention_of_stable_diffusion_and_all_fits_in_20_megabytes():
    unet, text = new_sprite_unet(), new_text_encoder(make_word_tokenizer())
    names = [name for name, _ in unet.named_modules() if name.endswith("attn2")]
    places = [sum(name.startswith(place) for name in names) for place in ("down", "mid", "up")]
    assert places == [6, 1, 9]
    kept = sum(one.numel() for part in (unet, text) for one in part.parameters())
    assert unet.config.in_channels == CHANNELS and BLOCKS[-1] == 96
    assert 2 * kept < 15_700_000  # and 4.3 of the autoencoder


def test_mistaken_prompts_differ_in_colours_and_nouns_alone():
    rng = np.random.default_rng(1)
    scenes = [random_scene(rng) for _ in range(300)]
    said = captions(rng, scenes, torch.arange(300), (0, 0, 1), RECIPE.mistakes)
    changed = set()
    for caption in (one for one in said if one.prompt):
        versions = [split(text) for text in (caption.prompt, *caption.mistaken)]
        for word, *others in zip(*versions, strict=True):
            kind = next((k for k in (COLOURS, nouns(), ("a", "an")) if word in k), (word,))
            assert {word, *others} <= set(kind)
            if len(others) == 2 and word in nouns():
                assert others[0] == word != others[1]
            if len(others) == 2 and word in COLOURS and "background" not in versions[0]:
                assert word not in others
            changed |= {word} if len({word, *others}) > 1 else set()
    assert {*COLOURS, *nouns()} <= changed


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


@pytest.mark.weekly
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
