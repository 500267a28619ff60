"""The video model inside the package: what it is, how big, and whose weights it has."""

import json
import re
import warnings
from hashlib import sha256

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sdattn
from scripts.moving import goes_right
from sdattn.loading.outline import outline
from sdattn.loading.pipelines import LENT
from sdattn.models.demos import DEMOS, HOME, demo_named, demo_of
from sdattn.models.facts import default_frames
from sdattn.models.layers import find_layers

FOLDER, NAME = DEMOS["demo-video"], "demo-video"
PROMPT = "a cat above a pizza"


@pytest.fixture(scope="module")
def pipe():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return sdattn.load_pipeline(NAME, device="cpu")


@pytest.fixture(scope="module")
def run(pipe):
    return sdattn.generate(pipe, PROMPT, seed=0)[0]


@pytest.mark.slow
def test_it_is_a_small_animatediff(pipe):
    parts = {name: type(part).__name__ for name, part in pipe.components.items() if part}
    assert parts == {
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "tokenizer": "CLIPTokenizer",
        "unet": "UNetMotionModel",
        "motion_adapter": "MotionAdapter",
        "scheduler": "DDIMScheduler",
    }
    assert demo_of(pipe) is demo_named(NAME)
    layers = [one for one in find_layers(pipe.unet) if one.kind != "temporal"]
    cross = [one for one in layers if one.kind == "cross"]
    assert [one.place for one in cross] == ["down"] * 6 + ["mid"] + ["up"] * 9


def test_it_is_at_most_6_megabytes_of_safetensors():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6e6
    assert {path.suffix for path in files} == {".json", ".safetensors", ".txt"}
    configs = [path for path in files if path.suffix == ".json"]
    assert not [path for path in configs if re.search(r'"/\w+/\w', path.read_text())]


def digest(path):
    return sha256(path.read_bytes()).hexdigest()


def test_its_weights_are_those_that_its_training_recorded():
    told = json.loads((FOLDER / "training.json").read_text())
    held = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*.safetensors")}
    found = {name: digest(path) for name, path in held.items()}
    assert found == told["sha256"]
    start = told["settings"]["start"]  # the model that its motion was trained in
    assert start == {name: digest(HOME / "demo" / name) for name in start}
    for path in held.values():
        assert all(values.isfinite().all() for values in load_file(path).values())


def test_each_part_has_the_weights_of_the_files(pipe):
    for part, source in LENT[NAME].items():
        [file] = (HOME / source).glob("*.safetensors")
        saved = load_file(file)
        for name, value in getattr(pipe, part).state_dict().items():
            if "motion_modules" not in name:
                theirs = saved[name] if name in saved else saved[f"text_model.{name}"]
                assert torch.equal(value, theirs.float()), name
    [file], weights = (FOLDER / "motion_adapter").glob("*.safetensors"), pipe.unet.state_dict()
    for name, value in load_file(file).items():
        assert torch.equal(weights[name], value.float()), name
    assert not pipe.unet.training


@pytest.mark.slow
def test_it_draws_videos_by_its_own_settings(run):
    assert len(run.video) == demo_named(NAME).settings["num_frames"] == 8
    assert run.settings.model == NAME and run.video[0].size == (128, 128)
    assert run.heatmaps["cat"].map.shape[0] == 8


@pytest.mark.slow
def test_what_it_draws_moves_and_the_words_maps_go_with_it(run):
    """The cat is what differs from the gray ground in the upper half, the pizza in the lower."""
    frames = np.stack([np.asarray(frame) for frame in run.video]).astype(int)
    drawn = abs(frames - np.median(frames, axis=(0, 1, 2))).max(-1) > 60
    for word, half in (("cat", slice(0, 64)), ("pizza", slice(64, 128))):
        places = [np.argwhere(one[half]).mean(0)[::-1] / 128 for one in drawn]
        assert goes_right(places), word
        for number in range(8):
            heat = run.frame(number).heatmaps[word].resize((128, 128)).numpy()
            row, col = np.unravel_index(heat.argmax(), heat.shape)
            assert half.start <= row < half.stop, (word, number)
            assert abs(col / 128 - places[number][0]) < 0.2, (word, number)


@pytest.mark.slow
def test_looking_does_not_change_its_video(pipe):
    def draw():
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 2, "num_frames": 3, "output_type": "np"}
        return pipe(PROMPT, generator=generator, **options).frames

    before = draw()
    with sdattn.capture(pipe), sdattn.capture(pipe, kinds=("cross", "self")):
        during = draw()
    assert (before == during).all()


@pytest.mark.slow
def test_words_that_it_never_learnt_are_named(pipe):
    with pytest.warns(UserWarning, match="'moving'.*: cat"):
        sdattn.generate(pipe, "a cat moving", num_inference_steps=1, num_frames=2)


@pytest.mark.slow
def test_its_outline_needs_no_weights(pipe):
    found = outline(NAME)
    assert demo_of(found) is demo_named(NAME)
    assert all(one.is_meta for one in found.unet.state_dict().values())
    assert [one.name for one in find_layers(found.unet)] == [
        one.name for one in find_layers(pipe.unet)
    ]
    assert default_frames(found) == default_frames(pipe) == 8
