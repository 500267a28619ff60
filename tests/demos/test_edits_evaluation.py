"""demos/evaluation/evaluate_edits.py, with images whose objects are known."""

import json
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from demos.evaluation import evaluate_edits
from demos.evaluation.evaluate_edits import cases, finder, is_right, judge, wilson
from demos.scenes import emoji, shapes
from demos.scenes.shapes import Scene, SceneObject

LEFT = SceneObject("red", "circle", (0.25, 0.5), 0.18)
RIGHT = SceneObject("blue", "square", (0.75, 0.5), 0.18)
STAR, FAR = replace(LEFT, shape="star"), replace(RIGHT, centre=(0.75, 0.75))
THIRD = SceneObject("green", "ring", (0.5, 0.15), 0.12)


@pytest.fixture
def see():
    find = finder("demo-mmdit", None)
    return lambda *objects: find(Image.fromarray(Scene(objects, "left of", "gray").draw()))


@pytest.fixture
def case():
    red = ("circle", "red"), ("square", "blue")
    return evaluate_edits.Case(red, (("star", "red"), red[1]), 0, "noun", "a", "b", "left of", 0)


def test_an_edit_is_judged_by_what_stands_where_the_objects_were(see, case):
    before = see(LEFT, RIGHT)
    assert is_right(case, before)
    assert judge(case, before, see(STAR, RIGHT)) == (True, True)
    assert judge(case, before, before) == (False, True)
    assert judge(case, before, see(STAR, FAR)) == (True, False)
    assert judge(case, before, see(STAR, replace(RIGHT, colour="pink"))) == (True, False)
    assert judge(case, before, see(STAR, RIGHT, THIRD)) == (True, False)
    assert judge(case, before, []) == (False, False)


def test_a_source_is_right_only_with_its_objects_alone_as_they_should_stand(see, case):
    for objects in ((LEFT,), (STAR, RIGHT), (LEFT, RIGHT, THIRD)):
        assert not is_right(case, see(*objects))
    swapped = replace(LEFT, centre=RIGHT.centre), replace(RIGHT, centre=LEFT.centre)
    assert not is_right(case, see(*swapped))


@pytest.mark.parametrize("make", [emoji.random_scene, shapes.random_scene])
def test_a_swap_changes_one_word_of_a_scene_that_training_never_saw(make):
    found = cases(make, 40, Namespace(scene_seed=7, seed=100))
    assert [one.seed for one in found] == [*range(100, 140)]
    assert {one.kind for one in found} == {"noun", "colour"}
    for one in found:
        changed, other = one.index, 1 - one.index
        assert one.before[other] == one.after[other]
        part = 1 if one.kind == "colour" else 0
        assert one.before[changed][part] != one.after[changed][part]
        assert one.before[changed][1 - part] == one.after[changed][1 - part]
        assert one.after[changed][part] not in {name[part] for name in one.before}
        swaps = [pair for pair in zip(one.source.split(), one.target.split(), strict=True)
                 if len(set(pair)) == 2 and not set(pair) <= {"a", "an"}]  # fmt: skip
        assert len(swaps) == 1 and swaps[0][0].strip(",") == one.word


def test_wilson():
    """Wilson 1927; numbers by statsmodels' proportion_confint(method="wilson")."""
    assert wilson(46, 50) == pytest.approx((0.811620, 0.968447), abs=1e-5)
    assert wilson(0, 10) == pytest.approx((0, 0.277533), abs=1e-5)


def test_what_is_drawn_is_kept_and_the_figures_are_those_of_the_images(monkeypatch, tmp_path):
    scenes, drawn, random_scene = {}, [], shapes.random_scene

    def make(rng, **options):
        scene = random_scene(rng, **options)
        scenes.update(dict.fromkeys(scene.prompts(), scene))
        return scene

    def image(scene):
        return Image.fromarray(scene.draw())

    def edit(pipe, source, target, **options):
        drawn.append(source)
        return SimpleNamespace(images=[image(scenes[source])] * 2)  # changes nothing

    fake = SimpleNamespace(
        load_pipeline=lambda *_, **__: SimpleNamespace(set_progress_bar_config=lambda **_: None)
    )
    monkeypatch.setattr(evaluate_edits, "sdattn", fake)
    monkeypatch.setattr(evaluate_edits.shapes, "random_scene", make)
    monkeypatch.setattr(evaluate_edits, "edit", edit)
    monkeypatch.setattr(evaluate_edits, "call_pipeline", lambda *_: None)
    monkeypatch.setattr(evaluate_edits, "images_of", lambda _: [Image.new("RGB", (64, 64))])
    asked = ["--model", "demo-mmdit", "--cases", "6", "--work", str(tmp_path)]
    evaluate_edits.main(asked)
    assert len(drawn) == 6
    told = json.loads((tmp_path / "figures.json").read_text())
    n = len(told["cases"])
    assert n >= 4  # the checker of shapes reads nearly all of them
    assert told["figures"]["edited"]["changed"] == pytest.approx([0, *wilson(0, n)])
    assert told["figures"]["edited"]["kept"] == pytest.approx([1, *wilson(n, n)])
    assert told["figures"]["no control"]["kept"][0] == 0
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.height == 3 * sheet.width // n
        assert np.asarray(sheet)[-sheet.height // 3 :].max() == 0
    evaluate_edits.main(asked)
    assert len(drawn) == 6  # nothing is drawn twice
