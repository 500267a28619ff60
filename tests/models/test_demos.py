"""The models inside the package: what they are, how big, whose weights they have, and that looking
at them changes nothing."""

import html
import json
import re
import warnings
from dataclasses import dataclass, replace
from hashlib import sha256

import diffusers
import numpy as np
import pytest
import torch
from helpers.demo_words import PROMPT, THING, THIRD, needs_sprites
from safetensors.torch import load_file

import sdattn
from demos.moving import goes_right
from sdattn.loading.folder import LENT
from sdattn.models.demos import DEMOS, HOME, demo_named, demo_of
from sdattn.models.denoiser import find_denoiser
from sdattn.runs.report import report

UNET_PLACES = ["down"] * 6 + ["mid"] + ["up"] * 9


@dataclass(frozen=True)
class Kind:
    """What is to be true of a demo model.

    Attributes:
        parts: its components and their classes.
        places: of the layers that see the text.
        megabytes: at most, of its folder.
        files: of weights in its folder.
        prompt: words that it learnt.
        unlearnt: a prompt with a word that it never learnt, and what the warning says.
    """

    parts: dict[str, str]
    places: list[str]
    megabytes: int
    files: int
    prompt: str
    unlearnt: tuple[str, str]


CLIP = {"tokenizer": "CLIPTokenizer", "vae": "AutoencoderKL"}
DDIM = {**CLIP, "text_encoder": "CLIPTextModel", "scheduler": "DDIMScheduler"}
KINDS = {
    "demo": Kind(
        parts={**DDIM, "unet": "UNet2DConditionModel"},
        places=UNET_PLACES,
        megabytes=20,
        files=3,
        prompt=PROMPT,
        unlearnt=("a zebra", "'zebra'.*It knows cat, dog, frog …"),
    ),
    "demo-mmdit": Kind(
        parts={
            **CLIP,
            "text_encoder": "CLIPTextModelWithProjection",
            "text_encoder_2": "CLIPTextModelWithProjection",
            "tokenizer_2": "CLIPTokenizer",
            "transformer": "SD3Transformer2DModel",
            "scheduler": "FlowMatchEulerDiscreteScheduler",
        },
        places=["double"] * 6,
        megabytes=21,
        files=4,
        prompt="a red circle left of a blue square",
        unlearnt=("a cat", "'cat'.*It knows red, "),
    ),
    "demo-video": Kind(
        parts={**DDIM, "unet": "UNetMotionModel", "motion_adapter": "MotionAdapter"},
        places=UNET_PLACES,
        megabytes=6,
        files=1,
        prompt="a cat above a pizza",
        unlearnt=("a cat moving", "'moving'.*Spelled like it: moon"),
    ),
}
MODELS = [pytest.param(name, marks=[pytest.mark.slow] * (name == "demo-video")) for name in KINDS]
SHORT = {"demo-mmdit": {"max_sequence_length": 8}, "demo-video": {"num_frames": 3}}


@pytest.fixture(scope="module")
def pipes():
    """Demo models by name, each loaded once, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: sdattn.load_pipeline(name, device="cpu") for name in KINDS}


@pytest.fixture(scope="module")
def video(pipes):
    return sdattn.generate(pipes["demo-video"], KINDS["demo-video"].prompt, seed=0)[0]


def denoiser_of(pipe):
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


@pytest.mark.parametrize("name", KINDS)
def test_it_is_a_small_pipeline_of_diffusers(pipes, name):
    parts = {part: type(one).__name__ for part, one in pipes[name].components.items() if one}
    assert parts == KINDS[name].parts
    assert demo_of(pipes[name]) is demo_named(name)
    layers = find_denoiser(denoiser_of(pipes[name])).layers
    places = [one.place for one in layers if one.kind in ("cross", "joint")]
    assert places == KINDS[name].places


@pytest.mark.parametrize("name", KINDS)
def test_its_folder_is_small_and_has_nothing_to_run(name):
    files = [path for path in DEMOS[name].rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= KINDS[name].megabytes * 1e6
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt"}
    configs = [path for path in files if path.suffix == ".json"]
    assert not [path for path in configs if re.search(r'"/\w+/\w', path.read_text())]


def digest(path):
    return sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", KINDS)
def test_its_weights_are_those_that_its_training_recorded(name):
    folder = DEMOS[name]
    told = json.loads((folder / "training.json").read_text())
    held = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.safetensors")}
    assert len(held) == KINDS[name].files
    assert {file: digest(path) for file, path in held.items()} == told["sha256"]
    for path in held.values():
        assert all(values.isfinite().all() for values in load_file(path).values())
    # what it was trained with, and is not trained itself
    kept = {"demo-mmdit": (folder, "vae/"), "demo-video": (HOME / "demo", "")}
    if name in kept:
        home, part = kept[name]
        start = {file for file in told["settings"]["start"] if file.startswith(part)}
        assert start
        assert {file: digest(home / file) for file in start}.items() <= (
            told["settings"]["start"].items()
        )


@pytest.mark.parametrize("name", KINDS)
def test_its_weights_are_those_of_the_files(pipes, name):
    """Where names do not fit, transformers draws random weights and only logs it."""
    folders = {part: HOME / source for part, source in LENT.get(name, {}).items()}
    folders |= {path.parent.name: path.parent for path in DEMOS[name].rglob("*.safetensors")}
    for part, folder in folders.items():
        [file] = folder.glob("*.safetensors")
        saved = {key: one for key, one in load_file(file).items() if "position_ids" not in key}
        model = pipes[name].unet if part == "motion_adapter" else getattr(pipes[name], part)
        weights = {key: one for key, one in model.state_dict().items() if "position_ids" not in key}
        for key, one in saved.items():
            inner = key if key in weights else key.removeprefix("text_model.")
            assert torch.equal(weights[inner], one.float()), key
        own = [key for key in weights if name != "demo-video" or "motion_modules" not in key]
        assert part == "motion_adapter" or len(saved) == len(own)
        assert not model.training


@needs_sprites
@pytest.mark.parametrize("name", ["demo", "demo-mmdit"])
def test_diffusers_loads_its_folder_in_one_type(name):
    without = {"text_encoder_3": None, "tokenizer_3": None} if name == "demo-mmdit" else {}
    pipe = diffusers.DiffusionPipeline.from_pretrained(DEMOS[name], **without)
    parts = [one for one in pipe.components.values() if isinstance(one, torch.nn.Module)]
    assert {one.dtype for one in parts} == {torch.float32}


def test_it_can_be_loaded_in_another_type():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = sdattn.load_pipeline("demo-mmdit", device="cpu", dtype=torch.bfloat16)
    parts = [one for one in half.components.values() if isinstance(one, torch.nn.Module)]
    assert {one.dtype for one in parts} == {torch.bfloat16}


@pytest.mark.parametrize("name", MODELS)
def test_words_that_it_never_learnt_are_named(pipes, name):
    prompt, said = KINDS[name].unlearnt
    frames = {"num_frames": 2} if name == "demo-video" else {}
    with pytest.warns(UserWarning, match=said):
        sdattn.generate(pipes[name], prompt, num_inference_steps=1, **frames)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_looking_does_not_change_what_it_draws(pipes, name):
    def draw():
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 3, "output_type": "np", **SHORT.get(name, {})}
        return pipes[name](KINDS[name].prompt, generator=generator, **options)[0]

    before = draw()
    further = {"refine": "self"} if name == "demo-mmdit" else {"kinds": ("cross", "self")}
    with sdattn.capture(pipes[name]), sdattn.capture(pipes[name], **further):
        during = draw()
    assert (before == during).all()


def test_turquoise_is_a_word_of_several_pieces(pipes):
    read = sdattn.read_prompt(pipes["demo"].tokenizer, f"a turquoise {THIRD}")
    assert len(read.find("turquoise")[0]) >= 2


@needs_sprites
def test_each_word_that_it_learnt_is_one_token_of_77(pipes):
    tokenizer = pipes["demo"].tokenizer
    assert tokenizer.model_max_length == 77
    for word in (word for kind in demo_named("demo").words.values() for word in kind):
        assert sdattn.read_prompt(tokenizer, word).find(word) == [(1,)], word


@pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
@pytest.mark.parametrize("text", ["😀 你好", 'a "cat"/dog\\', "naïve café", "x" * 2000])
def test_any_text_can_be_tokenized(pipes, text):
    tokenizer = pipes["demo"].tokenizer
    read = sdattn.read_prompt(tokenizer, text)
    assert all(token.id != tokenizer.unk_token_id for token in read.tokens if not token.special)


@pytest.mark.slow
def test_strange_words_are_named_in_a_warning_and_on_the_page(pipes):
    told = "never learnt 'zebra', 'sofa'.*lists all that it knows"
    with pytest.warns(UserWarning, match=told) as caught:
        run = sdattn.generate(pipes["demo"], ["a zebra on a sofa", PROMPT], num_inference_steps=1)
    assert [one.filename for one in caught] == [__file__]
    pages = [html.unescape(report(one).decode()) for one in map(run.image_run, (0, 1))]
    assert "never learnt 'zebra', 'sofa'" in pages[0] and "never learnt" not in pages[1]
    fold = re.search(r"Which words does it know.*?</details>", pages[0], re.DOTALL)[0]
    assert all(word in fold for kind in demo_named("demo").words.values() for word in kind)
    other = replace(run[0], settings=replace(run[0].settings, model="owner/name"))
    assert "never learnt" not in report(other).decode()


def test_capitals_and_commas_make_no_word_strange(pipes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompt = f"On the left a Red {THING}, on the right a {THIRD.upper()}"
        sdattn.generate(pipes["demo"], prompt, num_inference_steps=1)


def test_its_second_text_encoder_is_the_first_layer_of_the_first(pipes):
    whole = pipes["demo-mmdit"].text_encoder.state_dict()
    for name, one in pipes["demo-mmdit"].text_encoder_2.state_dict().items():
        assert torch.equal(one, whole[name]), name


def test_it_draws_by_its_own_settings(pipes):
    pipe = pipes["demo-mmdit"]
    lengths = set()
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: lengths.add(given["encoder_hidden_states"].shape[1]),
        with_kwargs=True,
    )
    [run] = sdattn.generate(pipe, KINDS["demo-mmdit"].prompt, num_inference_steps=2)
    hook.remove()
    length = demo_named("demo-mmdit").settings["max_sequence_length"]
    assert lengths == {pipe.tokenizer.model_max_length + length}
    assert run.settings.model == "demo-mmdit"
    told = run.settings.options
    assert (told["num_inference_steps"], told["guidance_scale"]) == (2, 2.0)
    assert pipe.vae.config.shift_factor == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("refine", [None, "self"])
def test_words_that_are_asked_about_are_read_as_in_the_prompt(pipes, refine):
    """Its transformer knows of a prompt by attention alone, so that to ask about the prompt is to
    read it again."""
    prompt = KINDS["demo-mmdit"].prompt
    options = {"ask": prompt, "refine": refine, "num_inference_steps": 2}
    run = sdattn.generate(pipes["demo-mmdit"], prompt, **options)
    for word, heatmap in run.asked_heatmaps[0].items():
        own = run.heatmaps[0][word].values
        torch.testing.assert_close(heatmap.values, own, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_what_it_draws_moves_and_the_words_maps_go_with_it(video):
    """The cat is what differs from the gray ground in the upper half, the pizza in the lower."""
    assert len(video.video) == demo_named("demo-video").settings["num_frames"] == 8
    assert video.settings.model == "demo-video" and video.video[0].size == (128, 128)
    assert video.heatmaps["cat"].map.shape[0] == 8
    frames = np.stack([np.asarray(frame) for frame in video.video]).astype(int)
    drawn = abs(frames - np.median(frames, axis=(0, 1, 2))).max(-1) > 60
    for word, half in (("cat", slice(0, 64)), ("pizza", slice(64, 128))):
        places = [np.argwhere(one[half]).mean(0)[::-1] / 128 for one in drawn]
        assert goes_right(places), word
        for number in range(8):
            heat = video.frame(number).heatmaps[word].resize((128, 128)).numpy()
            row, col = np.unravel_index(heat.argmax(), heat.shape)
            assert half.start <= row < half.stop, (word, number)
            assert abs(col / 128 - places[number][0]) < 0.2, (word, number)
