"""demos/evaluation/evaluate_arrival.py, with images and maps that are known."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.tiny_tokenizers import tiny_tokenizer
from PIL import Image
from sklearn.metrics import roc_auc_score

from demos.evaluation import arrival, evaluate_arrival
from demos.evaluation.arrival import MEASURES, Drawn, measured
from demos.evaluation.evaluate_arrival import choices, figures, part_of, told_apart
from demos.evaluation.seeing import Subject
from demos.scenes import emoji
from sdattn import read_prompt


def drawn(number, there, steps=10):
    """A prompt of two things whose maps have a peak exactly where the thing is."""
    rng = np.random.default_rng(number)
    scene = emoji.random_scene(rng, held_out=True, n_objects=2)
    prompt = read_prompt(tiny_tokenizer(), scene.prompts()[0])
    there = np.array(there)
    maps = torch.full((len(there), steps, 4, 4, len(prompt.tokens)), 1e-3)
    for seed, found in enumerate(there):
        for noun, is_there in enumerate(found):
            word = next(w for w in prompt.seen if w.text == scene.objects[noun].noun)
            peak = (0.5 if is_there else 0.05) * (1 + 0.01 * rng.random())
            maps[seed, :, noun, noun, word.columns[0]] = peak
    nouns = tuple(thing.noun for thing in scene.objects)
    affinity = torch.eye(16).expand(len(there), 16, 16)
    columns = tuple(range(len(prompt.tokens)))
    images = [Image.new("RGB", (128, 128))] * len(there)
    right = there.all(1)
    return Drawn(number, scene, prompt, nouns, there, right, images, maps, columns, affinity)


CASES = [
    drawn(i, there)
    for i, there in enumerate(
        [
            [[True, True], [True, False]],
            [[True, False], [False, True]],
            [[False, True], [True, True]],
            [[True, True], [True, True]],
        ]
        * 2
    )
]


def test_maps_that_show_all_choose_as_the_checker_does():
    told = choices(CASES, 2)
    right = np.stack([one.right for one in CASES])
    assert told["prompts"] == 8
    assert told["1"]["random"][0] == pytest.approx(right.mean())
    assert told["2"]["judge"][0] == pytest.approx(right.any(1).mean())
    for share, price in (("0.2", 1.2), ("0.3", 1.3), ("0.5", 1.5), ("1.0", 2.0)):
        assert told["2"][share]["score"][0] == pytest.approx(right.any(1).mean())
        assert told["2"][share]["price"] == price


def test_early_maps_choose_by_the_early_steps_alone():
    one = drawn(0, [[True, True], [True, False]])
    one.maps[0, :3] = 1e-3  # the first seed's words come later
    early = choices([one], 2)["2"]
    assert early["0.2"]["score"][0] == early["0.3"]["score"][0] == 0
    assert early["0.4"]["score"][0] == early["0.5"]["score"][0] == early["1.0"]["score"][0] == 1


def test_a_seed_is_judged_by_the_last_step_before_the_decision():
    assert part_of(0.3, 20) == pytest.approx((5.5 / 20, 5.5 / 20))  # the sixth of six steps
    assert part_of(0.5, 10) == pytest.approx((0.45, 0.45)) and part_of(1.0, 20) == (0.5, 1.0)


def test_how_well_missing_nouns_are_told_apart():
    told = told_apart(CASES, 1.0)
    assert (told["nouns"], told["missing"]) == (32, 8)
    assert told["peak"] == [1, 1, 1]
    noisy = [*CASES, drawn(8, [[True, True]])]
    noisy[-1].maps[:] = 1e-3
    noisy[-1].maps[:] += torch.rand(noisy[-1].maps.shape) * 0.05
    values = np.concatenate(
        [measured(one, s, 0.5, 1)["peak"] for one in noisy for s in range(len(one.right))]
    )
    absent = np.concatenate([~one.there.ravel() for one in noisy])
    found = told_apart(noisy, 1.0)["peak"]
    assert found[0] == pytest.approx(roc_auc_score(absent, -values))
    assert found[1] <= found[0] <= found[2]


def test_measures_are_higher_for_a_map_with_an_object():
    there = torch.full((8, 8), 0.01)
    there[2:4, 2:4] = 0.6
    spread = torch.full((8, 8), 0.02)
    spread[5, 5], spread[1, 6] = 0.06, 0.055
    for name, measure in MEASURES.items():
        found = measure(torch.stack([there, spread]))
        assert found[0] > found[1], name
    [cells] = MEASURES["top cells"](there[None]).exp()
    assert float(cells) == pytest.approx(0.6)  # the mean of 2 of 64


def test_labels_by_eye_say_what_is_missing_and_what_is_too_much():
    scene = emoji.random_scene(np.random.default_rng(0), held_out=True, n_objects=2)
    first, second = (thing.noun for thing in scene.objects)
    judge = arrival.by_eye({"7": ["", second, "more", f"{first} more"]})
    there, right = judge((7, scene, ""), [])
    assert there.tolist() == [[True, True], [True, False], [True, True], [False, True]]
    assert right.tolist() == [True, False, False, False]


def test_further_prompts_of_three_things_do_not_depend_on_how_many_come_before():
    few, many = (arrival.prompts_of(emoji.random_scene, n, 3, 78) for n in (2, 4))
    assert few[2:] == many[4:] and few[:2] == many[:2]
    assert [one[0] for one in few] == [0, 1, 200, 201, 202]
    assert {len(scene.objects) for _, scene, _ in few[2:]} == {3}


def test_halves_choose_and_report():
    told = figures(CASES, seeds=2, model="demo")
    assert told["for choosing"]["all"]["candidates"]["prompts"] == 4
    assert told["reported"]["two things"]["auc"]["1.0"]["peak"][0] == 1
    assert 10 < told["calibration"]["lead"] < 500
    assert told["flagged"]["missing nouns"] == 1 and told["flagged"]["other nouns"] == 0


def test_the_sheet_frames_the_seed_with_the_highest_score():
    sheet = np.asarray(evaluate_arrival.sheet([CASES[2]], below=2.0))
    green = np.argwhere((sheet == evaluate_arrival.CHOSEN).all(-1))
    assert green[:, 1].min() >= 128 and len(green)  # the second image has both its things
    assert sheet.shape[1] == 2 * 128


@pytest.mark.slow
def test_what_is_drawn_is_read_again(tmp_path, monkeypatch):
    import sdattn

    pipe = sdattn.load_pipeline("demo")
    pipe.set_progress_bar_config(disable=True)

    def see(scenes, images):
        everything = tuple((thing.noun, None) for thing in scenes[0].objects)
        return [SimpleNamespace(things=everything, objects=True) for _ in images]

    settings = {"num_inference_steps": 4, "guidance_scale": 7.5}
    subject = Subject(pipe, settings, emoji.random_scene, see)
    monkeypatch.setattr(evaluate_arrival, "subject_of", lambda *_: subject)
    asked = ["--prompts", "2", "--three", "0", "--seeds", "2", "--work", str(tmp_path)]
    with pytest.raises(ValueError, match="are missing"):
        evaluate_arrival.main(asked)  # the checker saw everything: nothing to tell apart
    [first, _] = arrival.prompts_of(emoji.random_scene, 2, 0, 78)
    found = arrival.read(pipe, first, tmp_path / "0.safetensors", arrival.by_checker(see))
    assert json.loads((tmp_path / "options.json").read_text())["seeds"] == "2"
    run = sdattn.generate(pipe, first[2], seed=[0, 100_000], num_images_per_prompt=2, **settings)
    for seed in (0, 1):
        expected = run.heatmaps[seed]
        maps = found.heatmaps(seed, 0.5, 1.0)
        for one in maps.occurrences():
            own = expected.maps[..., [expected.columns.index(c) for c in one.columns]].sum(-1)
            torch.testing.assert_close(one.values, own, rtol=2e-3, atol=1e-4)
