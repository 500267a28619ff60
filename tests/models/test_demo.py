"""The model inside the package: what it is, how big, and that its words point at their objects."""

import json
import re
import warnings
from hashlib import sha256

import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers.demo_words import PROMPT, THIRD, needs_sprites
from safetensors.torch import load_file

import sdattn
from sdattn.models.demos import DEMO, demo_named
from sdattn.models.layers import find_layers


def test_it_is_a_small_stable_diffusion_pipeline(demo):
    parts = {name: type(part).__name__ for name, part in demo.components.items() if part}
    assert parts == {
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "tokenizer": "CLIPTokenizer",
        "unet": "UNet2DConditionModel",
        "scheduler": "DDIMScheduler",
    }
    cross = [layer for layer in find_layers(demo.unet) if layer.kind == "cross"]
    assert [layer.place for layer in cross] == ["down"] * 6 + ["mid"] + ["up"] * 9


def test_it_is_at_most_20_megabytes_of_safetensors():
    files = [path for path in DEMO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20e6
    assert not [path for path in files if path.suffix in (".bin", ".ckpt", ".pt", ".pkl")]
    configs = [path for path in files if path.suffix == ".json"]
    assert not [path for path in configs if re.search(r'"/\w+/\w', path.read_text())]


def test_its_weights_are_those_that_its_training_recorded():
    told = json.loads((DEMO / "training.json").read_text())["sha256"]
    held = {path.relative_to(DEMO).as_posix(): path for path in DEMO.rglob("*.safetensors")}
    assert len(held) == 3
    assert {name: sha256(path.read_bytes()).hexdigest() for name, path in held.items()} == told


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_its_weights_are_those_of_the_file(demo, part):
    """Where names do not fit, transformers draws random weights and only logs it."""
    [path] = (DEMO / part).glob("*.safetensors")
    weights = getattr(demo, part).state_dict()
    saved = {name: one for name, one in load_file(path).items() if "position_ids" not in name}
    for name, one in saved.items():
        inner = name.removeprefix("text_model.")
        assert torch.equal(weights[name if name in weights else inner], one.float())
    assert len(saved) == len([name for name in weights if "position_ids" not in name])


def test_turquoise_is_a_word_of_several_pieces(demo):
    read = sdattn.read_prompt(demo.tokenizer, f"a turquoise {THIRD}")
    assert len(read.find("turquoise")[0]) >= 2


@needs_sprites
def test_each_word_that_it_learnt_is_one_token_of_77(demo):
    assert demo.tokenizer.model_max_length == 77
    for word in (word for kind in demo_named("demo").words.values() for word in kind):
        assert sdattn.read_prompt(demo.tokenizer, word).find(word) == [(1,)], word


@needs_sprites
def test_diffusers_loads_its_folder_in_one_type():
    pipe = StableDiffusionPipeline.from_pretrained(DEMO)
    models = (pipe.unet, pipe.vae, pipe.text_encoder)
    assert {model.dtype for model in models} == {torch.float32}


@pytest.mark.parametrize("text", ["😀 你好", 'a "cat"/dog\\', "naïve café", "x" * 2000])
def test_any_text_can_be_tokenized(demo, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sdattn.TruncationWarning)
        read = sdattn.read_prompt(demo.tokenizer, text)
    unknown = demo.tokenizer.unk_token_id
    assert all(token.id != unknown for token in read.tokens if not token.special)


@pytest.mark.slow
def test_looking_does_not_change_its_image(demo):
    def draw():
        generator = torch.Generator().manual_seed(0)
        return demo(PROMPT, num_inference_steps=4, generator=generator, output_type="np").images

    before = draw()
    with sdattn.capture(demo):
        during = draw()
    assert (before == during).all()
