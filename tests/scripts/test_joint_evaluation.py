"""The evaluation of joint attention: its variants are what generate() and capture() give."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.transformer_rows import sd3

from scripts.evaluation import evaluate_heatmaps
from scripts.evaluation.images import unseen_scenes
from scripts.evaluation.joint import drawn, tables, variants
from scripts.evaluation.measures import score
from scripts.evaluation.records import SPLITS, Records, read_image
from scripts.evaluation.seeing import Subject, as_composed, own_settings, see_shapes
from scripts.scenes.shapes import random_scene
from sdattn import capture, generate, heatmaps
from sdattn.models.demos import RECORD, demo_named

pytestmark = pytest.mark.slow

SHORT = {"num_inference_steps": 4, "height": 32, "width": 32, "max_sequence_length": 64}


@pytest.fixture(scope="module")
def images():
    subject = Subject(sd3(), SHORT, random_scene, see_shapes)
    asked = unseen_scenes(random_scene, 2, seed=5)
    return subject.pipe, asked, list(drawn(subject, asked, 0))


def test_the_default_and_the_columns_are_those_of_generate(images):
    pipe, asked, found = images
    prompts = [prompt for _, _, prompt in asked]
    for name in ("default", "columns"):
        run = generate(pipe, prompts, seed=0, preset=name, **SHORT)
        for image, one in zip(found, run, strict=True):
            assert image.image.tobytes() == one.image.tobytes()
            own, kept = one.heatmaps, image.heatmaps[name]
            columns = [column for column in kept.columns if column in own.columns]
            torch.testing.assert_close(kept.keep(columns).maps, own.keep(columns).maps)


def test_a_block_and_a_part_of_the_steps_are_those_of_a_capture_of_them(images):
    pipe, asked, found = images
    block = "transformer_blocks.1.attn"
    for name, kept in (
        ("block 1", {"layers": [block], "steps": (0.5, 1.0)}),
        ("steps 1/4 to 2/4", {"steps": (0.25, 0.5)}),
    ):
        with capture(pipe, **kept) as store:
            pipe(
                [prompt for _, _, prompt in asked],
                generator=[torch.Generator().manual_seed(seed) for seed in (0, 1)],
                output_type="latent",
                **SHORT,
            )
        for image, own in zip(found, heatmaps(store), strict=True):
            one = image.heatmaps[name]
            torch.testing.assert_close(one.maps, own.keep(one.columns).maps)


@pytest.mark.weekly
def test_words_are_those_of_the_text_that_the_maps_are_of(images):
    """ "Asked" says the objects alone, where the prompt says the background too."""
    _, asked, found = images
    assert any("background" in prompt for _, _, prompt in asked)
    records = Records()
    for image in found:
        read_image(replace(image, seen=as_composed(image.scene)), "set", records)
    figures = records.figures()["set"]
    assert figures["noun"].keys() == figures["colour"].keys() > figures["ground"].keys()
    assert "asked" not in figures["ground"]


def test_figures_are_of_each_split_and_kind():
    records, rng = Records(), np.random.default_rng(0)
    for split in SPLITS:
        records.add((split, "image", "default", "right"), 0, np.array([1.0]))
        for kind in ("noun", "colour"):
            for name in variants(["first", "second"]):
                maps, masks = rng.random((2, 8, 8)), rng.random((2, 8, 8)) > 0.5
                for measure, values in score(maps, masks).items():
                    records.add((split, kind, name, measure), 0, values)
    text = tables(records.figures())
    assert text.count("**Scenes") == 2 and text.count("| block 1, spread |") == 4
    assert text.count("| - |") == 4 * len(variants(["first", "second"]))  # no own object noted


def test_a_model_is_drawn_with_the_settings_beside_its_weights(tmp_path):
    assert own_settings("demo") == demo_named("demo").settings
    (tmp_path / RECORD).write_text(json.dumps({"settings": {"guidance_scale": 3.0}}))
    assert own_settings(tmp_path) == {"guidance_scale": 3.0}


@pytest.mark.weekly
def test_the_command_measures_a_folder(tmp_path, capsys):
    model = tmp_path / "model"
    sd3().save_pretrained(model)
    (model / RECORD).write_text(json.dumps({"settings": SHORT}))
    few = ["--scenes", "2", "--causes", "1", "--work", str(tmp_path / "parts")]
    evaluate_heatmaps.main(["--model", str(model), *few, "--out", str(tmp_path / "out")])
    figures = json.loads((tmp_path / "out/figures.json").read_text())["figures"]
    assert figures.pop("time")
    # A model of random weights draws no objects: all is left out.
    assert {split: entry["image"]["default"]["right"][0] for split, entry in figures.items()} == {
        "for choosing": 0.0,
        "reported": 0.0,
    }
    assert "0.0% of the images are right" in capsys.readouterr().out
