"""The MM-DiT inside the package: what it is, how big, and whose weights it has."""

import json
import re
import warnings
from hashlib import sha256

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

import sdattn
from sdattn.loading.outline import outline
from sdattn.models.demos import DEMOS, demo_named, demo_of
from sdattn.models.layers import find_layers

FOLDER, NAME = DEMOS["demo-mmdit"], "demo-mmdit"
PROMPT = "a red circle left of a blue square"
PARTS = ("vae", "text_encoder", "text_encoder_2", "transformer")


@pytest.fixture(scope="module")
def pipe():
    return sdattn.load_pipeline(NAME, device="cpu")


def test_it_is_a_small_stable_diffusion_3(pipe):
    parts = {name: type(part).__name__ for name, part in pipe.components.items() if part}
    assert parts == {
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "tokenizer": "CLIPTokenizer",
        "tokenizer_2": "CLIPTokenizer",
        "transformer": "SD3Transformer2DModel",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    }
    layers = find_layers(pipe.transformer)
    assert [(layer.kind, layer.place) for layer in layers] == [("joint", "double")] * 6


def test_it_is_at_most_21_megabytes_of_safetensors():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 21e6
    assert {path.suffix for path in files} == {".json", ".safetensors", ".txt"}
    configs = [path for path in files if path.suffix == ".json"]
    assert not [path for path in configs if re.search(r'"/\w+/\w', path.read_text())]


def test_its_weights_are_those_that_its_training_recorded():
    told = json.loads((FOLDER / "training.json").read_text())
    held = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*.safetensors")}
    assert len(held) == len(PARTS)
    found = {name: sha256(path.read_bytes()).hexdigest() for name, path in held.items()}
    assert found == told["sha256"]
    [vae] = (name for name in found if name.startswith("vae/"))
    assert found[vae] == told["settings"]["start"][vae]  # it was trained with this very one


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_the_weights_of_its_file(pipe, part):
    [file] = (FOLDER / part).glob("*.safetensors")
    saved = load_file(file)
    weights = getattr(pipe, part).state_dict()
    assert weights.keys() == saved.keys()
    for name, one in weights.items():
        assert torch.equal(one, saved[name].float()), name
    assert not getattr(pipe, part).training


def test_its_second_text_encoder_is_the_first_layer_of_the_first(pipe):
    whole = pipe.text_encoder.state_dict()
    for name, one in pipe.text_encoder_2.state_dict().items():
        assert torch.equal(one, whole[name]), name


def test_diffusers_loads_its_folder_in_one_type():
    without = {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER, **without)
    assert {getattr(pipe, part).dtype for part in PARTS} == {torch.float32}


def test_it_can_be_loaded_in_another_type():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = sdattn.load_pipeline(NAME, device="cpu", dtype=torch.bfloat16)
    kinds = {getattr(half, part).dtype for part in PARTS}
    assert kinds == {torch.bfloat16}


def test_its_outline_needs_no_weights():
    found = outline(NAME)
    assert demo_of(found) is demo_named(NAME)
    assert all(one.is_meta for one in found.vae.state_dict().values())
    assert found.transformer.config.num_layers == 6


def test_it_draws_by_its_own_settings(pipe):
    lengths = set()
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: lengths.add(given["encoder_hidden_states"].shape[1]),
        with_kwargs=True,
    )
    run = sdattn.generate(pipe, PROMPT, num_inference_steps=2)
    hook.remove()
    length = demo_named(NAME).settings["max_sequence_length"]
    assert lengths == {pipe.tokenizer.model_max_length + length}
    assert run[0].settings.model == NAME
    told = run[0].settings.options
    assert (told["num_inference_steps"], told["guidance_scale"]) == (2, 2.0)
    assert pipe.vae.config.shift_factor == 0.0


@pytest.mark.slow
def test_looking_does_not_change_its_image(pipe):
    def draw():
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 3, "max_sequence_length": 8, "output_type": "np"}
        return pipe(PROMPT, generator=generator, **options).images

    before = draw()
    with sdattn.capture(pipe), sdattn.capture(pipe, refine="self"):
        during = draw()
    assert (before == during).all()


@pytest.mark.slow
@pytest.mark.parametrize("refine", [None, "self"])
def test_words_that_are_asked_about_are_read_as_in_the_prompt(pipe, refine):
    """Its transformer knows of a prompt by attention alone, so that to ask about the prompt is to
    read it again."""
    [run] = [sdattn.generate(pipe, PROMPT, ask=PROMPT, refine=refine, num_inference_steps=2)]
    for word, heatmap in run.asked_heatmaps[0].items():
        own = run.heatmaps[0][word].values
        torch.testing.assert_close(heatmap.values, own, atol=1e-6, rtol=1e-4)


def test_words_that_it_never_learnt_are_named(pipe):
    with pytest.warns(UserWarning, match="'cat'.*: red"):
        sdattn.generate(pipe, "a cat", num_inference_steps=1)
