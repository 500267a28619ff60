"""What the tabs of the live page make of the values of their fields, without a page and gradio."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.tiny_pipelines import small_pipeline

from sdattn import generate
from sdattn.app import tasks
from sdattn.runs.info import Candidate

FAST = {"num_inference_steps": 1, "height": 64, "width": 96}
FIELDS = {"prompt": " a red cat ", "each_step": False, "negative_maps": False, "seed": 3, **FAST}


@pytest.fixture(scope="module")
def pipe():
    return small_pipeline()


@pytest.fixture(scope="module")
def shown(pipe):
    return generate(pipe, "a red cat", seed=3, **FAST)[0].settings


def done(task, pipe, settings, **asked):
    return task(lambda key: {"shown": settings}[key], pipe, {"run": "shown", **asked})


@pytest.mark.parametrize("each", [False, True])
def test_the_models_own_size_is_not_passed_and_negative_maps_are_there_if_asked_for(pipe, each):
    own = {"height": 128, "width": 128, "num_inference_steps": 2}
    extra = {"each_step": each, "negative_maps": each, "negative_prompt": "dim"}
    [run] = tasks.draw(pipe, {**FIELDS, **own, **extra})
    settings = run.settings
    assert (settings.prompt, settings.seed) == ("a red cat", 3)
    assert settings.options == {"num_inference_steps": 2, "negative_prompt": "dim"}
    assert [*run.more] == ["negative"] * each
    one_side = tasks.draw(pipe, {**FIELDS, "height": 128, "width": 64})[0].settings.options
    assert (one_side["height"], one_side["width"]) == (128, 64)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"refine": True, "prompt": "  a cat "}, {"refine": "self", "prompt": "a cat"}),
        ({"refine": False, "negative_prompt": "  ", "seed": 0}, {"seed": 0}),
        ({"steps": None, "guidance_scale": 0.0}, {"guidance_scale": 0.0}),
    ],
)
def test_fields_without_a_value_are_left_out(asked, expected):
    assert tasks._given(asked) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (" cat ", "a dog, a catfish, a Cat and a dog"),
        ("catfish", "a cat, a dog, a Cat and a cat"),
        ("a cat", "dog, a catfish, a Cat and dog"),
        ("at", "a cat, a catfish, a Cat and a cat"),
    ],
)
def test_a_word_is_swapped_wherever_it_stands(word, expected):
    assert tasks.swapped("a cat, a catfish, a Cat and a cat", word, " dog ") == expected


def test_the_run_that_is_shown_is_drawn_again_with_another_word(pipe, shown):
    run = done(tasks.swap, pipe, shown, word="red", other="blue")
    [_, target] = [one.settings for one in run]
    assert target.prompt == "a blue cat"
    plain = generate(pipe, "a red cat", seed=3, **FAST)
    image, expected = (np.asarray(one[0].image).astype(int) for one in (run, plain))
    assert abs(image - expected).max() <= 1  # two rows are added up in another order than one


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (tasks.swap, {"word": "dog", "other": "cat"}, "dog.*choose a word of 'a red cat'"),
        (tasks.place, {"word": "dog", "box": "0, 0, 1, 1"}, "choose a word of 'a red cat'"),
        (tasks.place, {"word": "cat", "box": "0, 0, 1"}, "left, top, right and bottom"),
        (tasks.place, {"word": "cat", "box": "left half"}, "left, top, right and bottom"),
    ],
)
def test_what_cannot_be_is_refused(pipe, shown, task, fields, message):
    with pytest.raises(ValueError, match=message):
        done(task, pipe, shown, **fields)


def test_a_word_goes_into_its_box(pipe, shown, monkeypatch):
    seen = []
    monkeypatch.setattr(tasks, "guide", lambda *given, **options: seen.append((given, options)))
    done(tasks.place, pipe, shown, word=" cat ", box=" 0, 0.5  1,1 ")
    [(given, options)] = seen
    assert given[:2] == (pipe, "a red cat") and options == {"seed": 3, **FAST}
    [loss] = given[2]
    maps = generate(pipe, "a red cat", seed=3, **FAST)[0].heatmaps
    cat = maps["cat"].map
    share = cat[cat.shape[0] // 2 :].sum() / cat.sum()  # what is outside is lost
    torch.testing.assert_close(loss(maps), 1 - share, atol=1e-6, rtol=0)


def test_a_photo_is_not_drawn_again(pipe, shown):
    photo = replace(shown, explained=object())
    with pytest.raises(ValueError, match="This is a photo, which no seed draws again"):
        done(tasks.best_of, pipe, photo)


@pytest.mark.parametrize(("tried", "seeds"), [(None, [3, 4, 5, 6]), ([5, 9, 7], [10, 11, 12, 13])])
def test_the_next_seeds_come_after_those_that_were_tried(pipe, shown, tried, seeds):
    made = None if tried is None else [Candidate(seed, 0.5) for seed in tried]
    run = done(tasks.best_of, pipe, replace(shown, candidates=made))
    assert sorted(one.seed for one in run[0].settings.candidates) == seeds


@pytest.mark.parametrize(
    ("name", "said"), [({"orig_name": "cat.png"}, "cat.png"), ({}, "The photo")]
)
def test_a_photo_that_cannot_be_read_is_named_as_people_know_it(pipe, tmp_path, name, said):
    (tmp_path / "0a1b").write_bytes(b"no image")
    with pytest.raises(ValueError, match=f"^{said}"):
        tasks.explain(pipe, {"image": {"path": str(tmp_path / "0a1b"), **name}, "prompt": "a cat"})
