"""What a model's files say, next to what its loaded pipeline says."""

import json

import pytest
from helpers.tiers import tiered

from sdattn import load_pipeline
from sdattn.loading.facts import check_frames, check_names, check_size
from sdattn.models.demos import DEMOS
from sdattn.models.facts import makes_videos, size_unit


def refused(check, *args):
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", tiered(DEMOS, quick=2))
def test_files_refuse_what_the_pipeline_would(name):
    pipe = load_pipeline(name, device="cpu")
    unit = size_unit(pipe)
    wrong = [side for side in range(1, 3 * unit) if refused(check_size, name, {"width": side})]
    assert wrong == [side for side in range(1, 3 * unit) if side % unit]
    assert bool(refused(check_frames, name, {"num_frames": 3})) is not makes_videos(pipe)


def test_a_message_names_the_unit():
    unit = size_unit(load_pipeline("demo", device="cpu"))
    assert f"multiple of {unit} " in refused(check_size, "demo", {"height": 100})


@pytest.mark.parametrize("index", ["{", "[]", "{}", json.dumps({"unet": 3, "vae": [None]})])
def test_files_that_tell_nothing_refuse_nothing(index, tmp_path):
    (tmp_path / "model_index.json").write_text(index)
    asked = {"width": 3, "num_frames": 3}
    assert not refused(check_size, str(tmp_path), asked)
    assert not refused(check_frames, "owner/name", asked)


def test_names_are_checked_by_the_class_of_a_hub_model(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept = tmp_path / "models--owner--name"
    for revision, kind in (("main", "StableDiffusionPipeline"), ("new", "FluxPipeline")):
        (kept / "refs").mkdir(parents=True, exist_ok=True)
        (kept / "refs" / revision).write_text(revision * 10)
        snapshot = kept / "snapshots" / (revision * 10)
        snapshot.mkdir(parents=True)
        (snapshot / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    assert "StableDiffusionPipeline has no option 'foo'" in refused(
        check_names, "owner/name", ["foo"]
    )
    assert not refused(check_names, "owner/name", ["clip_skip"])
    with pytest.raises(ValueError, match="FluxPipeline has no option 'clip_skip'"):
        check_names("owner/name", ["clip_skip"], revision="new")
    assert not refused(check_names, "owner/other", ["foo"])  # loading says what is wrong


def test_names_are_checked_by_the_class_of_a_single_files_settings(tmp_path):
    file, demo = tmp_path / "a.safetensors", str(DEMOS["demo"])
    file.touch()
    with pytest.raises(ValueError, match="StableDiffusionPipeline has no option 'foo'"):
        check_names(str(file), ["foo"], config=demo)
    check_names(str(file), ["clip_skip"], config=demo)
