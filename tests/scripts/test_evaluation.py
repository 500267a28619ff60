"""The measures of evaluate_heatmaps against their definitions, and a whole small run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.tiny_pipelines import make_pipeline
from PIL import Image
from scripts.evaluation.knockouts import stays, tells_apart, without_words

import sdattn
from scripts.evaluation.images import noised, unseen_scenes
from scripts.evaluation.measures import (
    LEVELS,
    average_precision,
    interval,
    lands_on_own,
    rank_correlation,
    score,
)
from scripts.evaluation.records import Records, read_image
from scripts.evaluation.variants import PEERS
from scripts.scenes.shapes import Scene, SceneObject
from sdattn.maps.masks import otsu
from sdattn.maps.presets import PRESETS
from sdattn.models.sizes import default_size

pytestmark = pytest.mark.slow


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_a_map_that_is_its_mask_is_perfect_and_its_inverse_is_not(rng):
    masks = rng.random((3, 6, 7)) < 0.3
    perfect, wrong = score(0.2 + 0.1 * masks, masks), score(1.0 - masks, masks)
    for measure in ("fixed", "otsu", "pointing", "precision"):
        np.testing.assert_allclose(perfect[measure], 1.0)
    np.testing.assert_allclose(perfect["ious"], 1.0)
    for measure in ("fixed", "otsu", "pointing"):
        np.testing.assert_allclose(wrong[measure], 0.0)
    # all cells but the objects' come first, then all of the objects' at once
    np.testing.assert_allclose(wrong["precision"], masks.mean((1, 2)))


def test_intersection_over_union_cell_by_cell(rng):
    maps, masks = rng.normal(size=(4, 5, 8)), rng.random((4, 5, 8)) < 0.4
    found = score(maps, masks)
    for i in range(4):
        low, high = maps[i].min(), maps[i].max()
        cut = otsu(torch.from_numpy((maps[i] - low) / (high - low)))
        levels = {f"{level}": level for level in LEVELS} | {"fixed": 0.5, "otsu": cut}
        for name, level in levels.items():
            both = either = 0
            for value, true in zip(maps[i].ravel(), masks[i].ravel(), strict=True):
                is_in = (value - low) / (high - low) >= level
                both, either = both + (is_in and true), either + (is_in or true)
            place = found[name][i] if name in found else found["ious"][i, list(levels).index(name)]
            assert place == pytest.approx(both / either)
        assert found["pointing"][i] == masks[i].ravel()[maps[i].argmax()]


def test_average_precision_is_the_area_under_the_steps_of_the_curve(rng):
    values, truth = rng.integers(0, 6, 60).astype(float), rng.random(60) < 0.3  # with many ties
    area, before = 0.0, 0.0
    for level in sorted(set(values), reverse=True):
        above = values >= level
        recall = (above & truth).sum() / truth.sum()
        area += (recall - before) * (above & truth).sum() / above.sum()
        before = recall
    assert average_precision(values, truth) == pytest.approx(area)


def test_rank_correlation_of_a_textbook():
    """Untied ranks: 1 - 6 sum d^2 / (n (n^2 - 1)) (Spearman 1904)."""
    a = np.array([[106.0, 86, 100, 101, 99], [103, 97, 113, 112, 110]])
    b = np.array([[7.0, 0, 27, 50, 28], [29, 20, 12, 6, 17]])
    ranks = [np.argsort(np.argsort(one.ravel())) for one in (a, b)]
    squares = ((ranks[0] - ranks[1]) ** 2).sum()
    assert rank_correlation(a, b) == pytest.approx(1 - 6 * squares / (10 * 99))
    assert rank_correlation(a, np.exp(a / 50)) == pytest.approx(1.0)
    assert rank_correlation(a, -a) == pytest.approx(-1.0)
    tied = rank_correlation(np.array([[1.0, 1, 2, 3]]), np.array([[1.0, 2, 3, 4]]))
    assert tied == pytest.approx(np.corrcoef([1.5, 1.5, 3, 4], [1, 2, 3, 4])[0, 1])
    assert np.isnan(rank_correlation(a, np.ones((2, 5))))


def test_a_word_is_on_its_own_object_where_its_mean_is_higher_there():
    masks = np.zeros((2, 1, 4), dtype=bool)
    masks[0, 0, :2], masks[1, 0, 3] = True, True
    maps = np.array([[[0.9, 0.0, 0.0, 0.4]], [[0.0, 0.5, 9.0, 0.2]]])
    assert lands_on_own(maps, masks).tolist() == [1.0, 0.0]  # 0.45 > 0.4; 0.2 < 0.25


def test_intervals_hold_the_truth_19_times_in_20(rng):
    """Of groups whose members agree: taking them for independent would give half the width."""
    held = 0
    for _ in range(200):
        groups = np.repeat(np.arange(60), 4)
        values = np.repeat(rng.normal(2.0, 1.0, 60), 4)
        mean, low, high = interval(values, groups, rounds=400)
        assert low < mean < high
        held += low <= 2.0 <= high
    assert 180 <= held <= 199


def test_a_small_run_from_images_to_figures():
    pipe = sdattn.load_pipeline("demo")
    pipe.set_progress_bar_config(disable=True)
    records = Records()
    for image in noised(pipe, unseen_scenes(3, seed=1), 0, PEERS):
        assert image.masks is not None
        assert image.heatmaps.keys() == PEERS.keys()
        read_image(image, "noised", records)
    figures = records.figures()["noised"]
    assert figures["image"]["default"]["right"] == (1.0, 1.0, 1.0)
    for name, entry in figures["shape"].items():
        mean, low, high = entry["iou"]
        assert 0 <= low <= mean <= high <= 1
        if name != "default":
            default = figures["shape"]["default"]["iou"][0]
            assert entry["ahead"]["iou"][0] == pytest.approx(default - mean)
    assert figures["shape"]["default"]["iou"][0] > 0.6  # against exact masks


def test_the_scripts_own_images_have_the_size_that_the_model_makes():
    pipe = make_pipeline()
    assert default_size(pipe) == (128, 128)
    [image] = noised(pipe, unseen_scenes(1, seed=1), 0, {"sum": PRESETS["sum"]})
    assert image.image.size == (128, 128)


def scene_of(*things):
    places = ((0.25, 0.5), (0.75, 0.5))
    objects = [
        SceneObject(*thing, place, 0.18) for thing, place in zip(things, places, strict=True)
    ]
    return Scene(tuple(objects), "left of", "gray")


def test_a_word_is_taken_away_only_where_it_is_of_one_object():
    red_circle = ("red", "circle")
    assert tells_apart(scene_of(red_circle, ("blue", "square")))
    assert not tells_apart(scene_of(red_circle, ("red", "square")))
    assert not tells_apart(scene_of(red_circle, ("blue", "circle")))
    assert not tells_apart(Scene(scene_of(red_circle, red_circle).objects[:1], None, "gray"))


def test_what_stays_without_a_word_is_read_from_the_image(monkeypatch):
    """The shape's word away, the object is gone; the colour's away, it has another colour."""
    whole, gone, other = (
        Image.fromarray(scene.draw(128))
        for scene in (
            scene_of(("red", "circle"), ("blue", "square")),
            Scene(scene_of(("red", "circle"), ("blue", "square")).objects[1:], None, "gray"),
            scene_of(("green", "circle"), ("blue", "square")),
        )
    )
    without = {"red": other, "circle": gone}

    def removed(pipe, prompt, word, seed, **options):
        return SimpleNamespace(image=pipe, without=without[word])

    monkeypatch.setattr(sdattn, "knockout", removed)
    scene = scene_of(("red", "circle"), ("blue", "square"))
    row = without_words(whole, scene, "a red circle left of a blue square", 0, {})
    assert row == {"colour": (False, True), "shape": (False, False)}
    assert without_words(other, scene, "", 0, {}) is None  # not what was asked for to begin with
    always = {"colour": (True, True), "shape": (False, True)}
    assert stays([row, always]) == {
        "images": 2,
        "without_colour": {"colour": 0.5, "shape": 1.0},
        "without_shape": {"colour": 0.0, "shape": 0.5},
    }
