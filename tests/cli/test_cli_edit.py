"""`sdattn edit` of a prompt and of an image."""

import json
import os
from pathlib import Path

import pytest
from helpers.command_lines import said
from PIL import Image

from sdattn import load_run


@pytest.mark.slow
def test_edit_writes_both_runs_side_by_side(invoke, model):
    options = ("--model", model, "--steps", "2", "--device", "cpu", "--guidance", "3")
    edited = ("--blend", "cat", "--weight", "dog=2", "--cross", "0.5", "--self", "0.5")
    code, out, err = invoke("edit", "a red cat", "a red dog", *options, *edited)
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert ["open", "outputs/a-red-cat-edit-0/edit.html"] in rows
    assert ["mode", "replace"] in rows
    assert "dog" in out
    folder = "outputs/a-red-cat-edit-0"
    assert load_run(f"{folder}/target").info["prompt"] == "a red dog"
    info = json.loads(Path(folder, "run.json").read_text())
    assert info["weights"] == {"dog": 2.0}
    assert info["blend"] == [["cat"], ["dog"]]
    assert info["cross_replace_steps"] == info["self_replace_steps"] == 0.5
    assert invoke("show", f"{folder}/target", "dog")[0] == 0
    code, _, err = invoke("edit", "a red cat", "a red dog", *options)
    assert code == 2
    assert "exists already" in err


@pytest.mark.slow
def test_edit_of_an_image_reports_how_well_it_came_back(invoke, model):
    Image.new("RGB", (150, 120), (200, 40, 40)).save("photo.png")
    options = ("--model", model, "--steps", "2", "--device", "cpu", "--guidance", "3")
    code, out, err = invoke(
        "edit", "a red cat", "a red dog", "--image", "photo.png", "--out", "edit", *options
    )
    assert code == 0, err
    found = json.loads(Path("edit/run.json").read_text())["reconstruction_psnr"]
    assert f"reconstruction  {found:.1f} dB" in " ".join(out.split("\n"))
    for phase in ("inverting: ", "null-text: ", "drawing: "):
        assert phase in err
    with Image.open("edit/source/image.png") as image:
        assert image.size == (144, 112)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("a cat",), 2, "'a red cat' has 3 words, 'a cat' has 2"),
        (("a red dog", "--weight", "dog"), 2, "is not WORD=FACTOR"),
        (("a red dog", "--weight", "dog=much"), 2, "is not WORD=FACTOR"),
        (("a red dog", "--weight", "dog=nan"), 2, "weight of 'dog' is nan"),
        (("a red dog", "--blend", "bird"), 2, "'bird' is in none of the prompts"),
        (("a red dog", "--cross", "30"), 2, "'--cross': "),
        (("a red dog", "--image", "nothing.png"), 2, "nothing.png"),
        (("a red dog", "--image", "notes.txt"), 2, "is not a readable image"),
        (("a red dog", "--image", "photo.png", "--width", "64"), 2, "--image"),
    ],
)
@pytest.mark.slow
def test_edits_that_cannot_be(invoke, model, monkeypatch, arguments, code, message):
    Image.new("RGB", (64, 64)).save("photo.png")
    with open("notes.txt", "w") as file:
        file.write("words")
    options = ("--model", model, "--device", "cpu", "--mode", "replace")
    monkeypatch.setattr("sdattn.edit.invert", lambda *_, **__: pytest.fail("inverted first"))
    for more in ((), ("--image", "photo.png")):  # a long inversion does not come first
        found, _, err = invoke("edit", "a red cat", *more, *arguments, *options)
        assert found == code
        assert message in said(err)
    assert not os.path.exists("outputs") or not os.listdir("outputs")


@pytest.mark.slow
def test_an_edit_beyond_max_memory_is_refused_before_it_draws(invoke, model):
    options = ("--model", model, "--steps", "2", "--device", "cpu", "--max-memory", "2kB")
    code, _, err = invoke("edit", "a red cat", "a red dog", *options)
    assert code == 2 and "--max-memory 2000: " in err
    assert not os.path.exists("outputs") or not os.listdir("outputs")


@pytest.mark.slow
def test_the_mmdit_is_edited_and_its_folder_read_back(invoke):
    source, target = "a red circle left of a blue square", "a red circle left of a blue star"
    options = ("--model", "demo-mmdit", "--device", "cpu", "--steps", "4", "--out", "edit")
    edited = ("--blend", "square", "--weight", "star=1.5")
    code, out, err = invoke("edit", source, target, *options, *edited)
    assert code == 0, err
    assert ["mode", "replace"] in [line.split() for line in out.splitlines()]
    info = json.loads(Path("edit/run.json").read_text())
    assert info["options"]["max_sequence_length"] == 8
    assert info["cross_replace_steps"] == info["self_replace_steps"] == 0.3
    assert info["blend"] == [["square"], ["star"]]
    assert info["weights"] == {"star": 1.5}
    assert "a red circle" in Path("edit/edit.html").read_text(encoding="utf-8")
    saved = load_run("edit/target")
    assert saved.info["prompt"] == target
    assert "star" in saved.heatmaps.words
    code, out, err = invoke(
        "edit", source, target, *options, "--image", "edit/source/image.png", "--out", "again"
    )
    assert code == 0, err
    again = json.loads(Path("again/run.json").read_text())
    assert again["options"]["guidance_scale"] == 1.0
    assert again["reconstruction_psnr"] > 20
    assert "null-text" not in err
