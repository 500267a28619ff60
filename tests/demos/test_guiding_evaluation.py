"""demos/evaluation/evaluate_guiding.py, with runs whose images and maps are known."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from demos.evaluation import evaluate_guiding
from demos.evaluation.seeing import Subject, see_shapes
from demos.scenes import shapes


@pytest.fixture
def drawn(monkeypatch):
    """The prompts drawn: without guidance all is at the wrong place, with it as asked."""
    subject, calls = Subject(None, {}, shapes.random_scene, see_shapes), []
    scenes = {}

    def make(rng, **options):
        scene = shapes.random_scene(rng, **options)
        scenes.update(dict.fromkeys(scene.prompts(), scene))
        return scene

    def run(prompt, image, values):
        calls.append(prompt)
        noun = scenes[prompt].objects[0].shape
        return [SimpleNamespace(image=image, heatmaps={noun: SimpleNamespace(values=values)})]

    def generate(pipe, prompt, seed):
        even = torch.ones(16, 16)
        return run(prompt, Image.new("RGB", (64, 64)), even)

    def guide(pipe, prompt, losses, *, seed, scale):
        assert scale == 0.5
        values = torch.zeros(16, 16)
        values[8, 8] = 1  # in every box of half the side
        return run(prompt, Image.fromarray(scenes[prompt].draw()), values)

    monkeypatch.setattr(
        evaluate_guiding,
        "subject_of",
        lambda *_: SimpleNamespace(pipe=None, make=make, see=subject.see),
    )
    monkeypatch.setattr(evaluate_guiding.sdattn, "generate", generate)
    monkeypatch.setattr(evaluate_guiding, "guide", guide)
    return calls


def test_the_figures_are_those_of_the_images_and_maps(drawn, tmp_path, capsys):
    asked = ["--cases", "3", "--scale", "0.5", "--work", str(tmp_path)]
    evaluate_guiding.main(asked)
    assert len(drawn) == 6
    told = json.loads((tmp_path / "figures.json").read_text())
    without, with_ = told["figures"]["without"], told["figures"]["with"]
    # a quarter of an even map; corners of the box lie on cells
    assert without["share, mean"] == without["share, least"] == pytest.approx(0.25)
    assert (without["share >= 0.8"], without["just the object"]) == (0, 0)
    assert (with_["just the object"], with_["and its colour"]) == (1, 1)
    inside = [case["box"][0] <= 0.5 and case["box"][1] <= 0.5 for case in told["cases"]]
    assert all(inside)
    table = capsys.readouterr().out
    assert "| share, mean | 0.25 |" in table
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (3 * 128, 2 * 128)
    evaluate_guiding.main(asked)  # nothing is drawn twice
    assert len(drawn) == 6
    assert json.loads((tmp_path / "figures.json").read_text())["cases"] == told["cases"]
    with pytest.raises(SystemExit, match="other options"):
        evaluate_guiding.main([*asked, "--steps", "0.5"])
