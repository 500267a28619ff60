"""What a new user gets wrong first: understood, or refused in words that say what to do."""

import errno
import json

import numpy as np
import pytest
import torch
from helpers.tiny_pipelines import make_pipeline
from PIL import Image

from sdattn import capture, edit_image, explain, generate, load_pipeline
from sdattn.errors import AccessError, SdattnWarning, access_error
from sdattn.files.images import as_image
from sdattn.files.writing import whole_folder
from sdattn.maps.heatmap import Heatmap
from sdattn.models.demos import HOME

PROMPT = "a red cat"
QUICK = {"num_inference_steps": 2}
PHOTO = Image.new("RGB", (64, 64), "red")
CALLS = {
    "generate": lambda pipe, *rest, **options: generate(pipe, *rest or [PROMPT], **options),
    "explain": lambda pipe, *rest, **options: explain(pipe, PHOTO, *rest or [PROMPT], **options),
    "edit_image": lambda pipe, *rest, **options: edit_image(
        pipe, *rest or [PROMPT], "a red dog", **options
    ),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture(scope="module")
def pipe():
    return make_pipeline()


@each_call
@pytest.mark.slow
def test_a_model_is_loaded_by_its_name(call, model, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "sdattn.loading.pipelines.find_model", lambda name: (loaded.append(name), model)[1]
    )
    options = {} if call is CALLS["explain"] else QUICK
    assert call("demo", **options).image_runs
    assert loaded == ["demo"]


@each_call
def test_what_is_no_pipeline_is_refused_as_capture_refuses(call, pipe):
    with pytest.raises(TypeError, match="pipeline"):
        capture(None).__enter__()
    for wrong in (None, 3, pipe.unet):
        with pytest.raises(TypeError, match="pipeline"):
            call(wrong)
    with pytest.raises(TypeError, match="prompt"):
        call(pipe, None) if call is not CALLS["edit_image"] else edit_image(pipe, PROMPT, None)
    with pytest.raises(TypeError, match="pipeline first"):
        call(PROMPT, pipe)


def test_a_pipeline_in_the_place_of_an_edits_target_is_refused(pipe):
    with pytest.raises(TypeError, match="pipeline first"):
        edit_image(PROMPT, "a dog", pipe)


@each_call
@pytest.mark.slow
def test_a_random_seed_is_recorded(call, pipe, tmp_path):
    options = {} if call is CALLS["explain"] else QUICK
    run = call(pipe, seed=None, **options)
    assert isinstance(run.seeds[0], int)
    [folder] = run.save(tmp_path / "run")
    assert json.loads((folder / "run.json").read_text("utf-8"))["seed"] == run.seeds[0]
    again = call(pipe, seed=run.seeds[0], **options)
    assert again[0].heatmaps["red"].map.equal(run[0].heatmaps["red"].map)


@pytest.mark.slow
def test_each_image_can_have_a_seed_of_its_own(pipe):
    run = generate(pipe, [PROMPT] * 3, seed=[7, 1, 4], **QUICK)
    assert run.seeds == [7, 1, 4]
    assert "seed 7, 1, 4," in repr(run)
    alone = np.asarray(generate(pipe, PROMPT, seed=1, **QUICK).image, int)
    assert np.abs(alone - np.asarray(run[1].image, int)).max() <= 1  # rounded in another batch
    for wrong in ([1, 2], [1, 2, -1], "7"):
        with pytest.raises(ValueError, match="seed"):
            generate(pipe, [PROMPT] * 3, seed=wrong, **QUICK)


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ({"steps": 3}, "`num_inference_steps`"),
        ({"cfg_scale": 3}, "`guidance_scale`"),
        ({"guidance_scal": 3}, "'guidance_scale'"),
        ({"sed": 3}, "'seed'"),
        ({"generator": torch.Generator()}, "`seed`"),
        ({"num_frames": 3}, "images, not videos"),
        ({"preset": "joint"}, "daam"),
        ({"preset": "damm"}, "'daam'"),
        ({"words": ["redd"]}, "Did you mean 'red'"),
        ({"width": 99999}, "at most 16,384"),
        ({"capture_options": {"layrs": "up"}}, "Did you mean 'layers'"),
        ({"capture_options": ["up"]}, "a dictionary"),
    ],
)
def test_what_was_meant_is_named(pipe, option, meant):
    with pytest.raises((ValueError, KeyError)) as refused:
        generate(pipe, PROMPT, **option)
    assert meant in str(refused.value)


def test_the_list_of_options_has_only_those_that_can_be_passed(pipe):
    with pytest.raises(ValueError, match="guidance_scale") as refused:
        generate(pipe, PROMPT, xyz=1)
    assert not {"generator,", "output_type,", "return_dict,"} & set(str(refused.value).split())


@pytest.mark.slow
@pytest.mark.parametrize("call", [generate, explain], ids=["generate", "explain"])
def test_a_word_that_is_asked_about_warns_as_a_prompt_does(call, demo):
    given = ("a cat",) if call is generate else (PHOTO, "a cat")
    options = {"num_inference_steps": 1} if call is generate else {"timesteps": [100]}
    with pytest.warns(SdattnWarning, match="'dragon'"):
        call(demo, *given, ask="dragon, dog", **options)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: load_pipeline("demo", devic="cpu"), "'devic'.*mean 'device'"),
        (lambda: load_pipeline("demo", torch_dtype="fp16"), "'torch_dtype'.*mean 'dtype'"),
        (lambda: load_pipeline(None), "NoneType.*name"),
        (lambda: capture(None, step="all"), "'step'.*mean 'steps'"),
        (lambda: capture(None, xyz=1), "'xyz'.*It has: target, layers"),
    ],
)
def test_a_keyword_that_is_none_names_the_nearest(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_an_edit_is_refused_beyond_its_memory(pipe, monkeypatch):
    monkeypatch.setattr(type(pipe.scheduler), "step", lambda *_, **__: pytest.fail("it stepped"))
    with pytest.raises(ValueError, match="max_bytes.*smaller images"):
        edit_image(pipe, PROMPT, "a red dog", max_bytes=10, **QUICK)


@each_call
def test_what_no_model_could_take_is_refused_before_one_is_loaded(call, tmp_path):
    """Of the demo only its index is there, so that to load it fails in other words."""
    index = json.loads((HOME / "demo" / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for options, message in (
        ({"seed": -1}, "seed=-1"),
        ({"preset": "damm"}, "Did you mean 'daam'"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidence_scale": 2}, "Did you mean 'guidance_scale'"),
    ):
        with pytest.raises(ValueError, match=message):
            call(tmp_path, **options)
    with pytest.raises(ValueError, match="is empty"):
        call(tmp_path, " ")
    with pytest.raises((ValueError, OSError)) as failed:
        call(tmp_path)
    assert "demo" not in str(failed.value) and "option" not in str(failed.value)


def test_other_names_of_overlays_options_are_told():
    heatmap = Heatmap("cat", torch.eye(2), (1,))
    for name, ours in (("colormap", "cmap"), ("opacity", "alpha"), ("alfa", "alpha")):
        with pytest.raises(TypeError, match=f"{name}.*Did you mean '{ours}'"):
            heatmap.overlay(PHOTO, **{name: 1})


def test_a_map_lies_over_an_image_of_any_kind_in_its_own_size(tmp_path):
    heatmap = Heatmap("cat", torch.tensor([[0.5, 0.25], [0.0, 0.0]]), (1,))
    assert (heatmap.peak, heatmap.mean) == (0.5, 0.1875)
    PHOTO.save(tmp_path / "red.png")
    array = np.asarray(PHOTO)
    bare = heatmap.overlay(PHOTO, caption=False)
    assert bare.size == PHOTO.size
    for alike in (array, array / 255, tmp_path / "red.png", str(tmp_path / "red.png")):
        assert heatmap.overlay(alike, caption=False).tobytes() == bare.tobytes()
    other = heatmap.overlay(PHOTO, caption=False, cmap="viridis", alpha=0.5)
    assert other.tobytes() != bare.tobytes()
    for option in ({"cmap": "viridiss"}, {"alpha": 3}):
        with pytest.raises(ValueError, match=next(iter(option))):
            heatmap.overlay(PHOTO, **option)
    for wrong, kind in ((None, TypeError), (array[None], ValueError), (array * 1.0, ValueError)):
        with pytest.raises(kind, match="image"):
            as_image(wrong)
    with pytest.raises(FileNotFoundError, match="blue"):
        as_image(tmp_path / "blue.png")


def test_an_error_of_the_system_names_the_file_and_what_to_do(tmp_path):
    with pytest.raises(AccessError, match=r"run is full\. Free"), whole_folder(tmp_path / "run"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []
    missing = access_error(FileNotFoundError(errno.ENOENT, "No such file", "a.png"))
    assert isinstance(missing, FileNotFoundError)
    assert missing.errno == errno.ENOENT
    assert "a.png" in str(missing)
    other = OSError(errno.EIO, "Input/output error", "a.png")
    assert access_error(other) is other
