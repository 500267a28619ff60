"""The measures of evaluate_heatmaps against their definitions, and a whole small run."""

import json

import numpy as np
import pytest
import torch
from helpers.tiny_pipelines import make_pipeline
from safetensors.torch import save_file

from demos.evaluation import evaluate_heatmaps
from demos.evaluation.images import Sample
from demos.evaluation.measures import (
    LEVELS,
    average_precision,
    interval,
    rank_correlation,
    score,
)
from demos.evaluation.records import KINDS, Records, read_image
from demos.evaluation.seeing import Subject, as_composed, function_peak, maps_of
from demos.scenes.emoji import Scene, Thing, random_scene
from demos.sprite_checker import Segmenter
from sdattn import Heatmaps
from sdattn.maps.masks import otsu
from sdattn.models.demos import RECORD
from sdattn.models.reading import read_prompts

pytestmark = pytest.mark.slow


@pytest.fixture
def rng():
    return np.random.default_rng(5)


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


def always_right(scenes, images):
    return [as_composed(scene) for scene in scenes]


@pytest.fixture(scope="module")
def subject():
    settings = {"num_inference_steps": 4, "height": 32, "width": 32}
    return Subject(make_pipeline(), settings, random_scene, always_right)


def scene_of(*things, relation="left of", ground="blue"):
    places = ((0.25, 0.5), (0.75, 0.5))
    found = (
        Thing(noun, "noto", colour, False, place, 0.2)
        for (noun, colour), place in zip(things, places, strict=False)
    )
    return Scene(tuple(found), relation, ground, 0)


def sample_of(pipe, prompt, scene, values):
    """An image whose words have the given maps [64, 64], by word in the prompt's order."""
    [read] = read_prompts(pipe, [prompt])
    maps = torch.zeros(64, 64, len(read.tokens))
    words = scene.words(prompt)
    counts: dict[str, int] = {}
    for word, one in zip(words, values, strict=True):
        columns = read.find(word.text)[counts.setdefault(word.text, 0)]
        counts[word.text] += 1
        maps[..., list(columns)] = torch.from_numpy(one).float()[..., None] / len(columns)
    heatmaps = {"default": Heatmaps(read, maps)}
    return Sample(3, scene, prompt, 0, None, as_composed(scene), heatmaps)


def test_each_word_is_measured_on_what_it_is_about(subject):
    """The blue of the ground comes before the blue of the car; and each has its own map."""
    scene = scene_of(("car", "blue"), ("cat", None))
    car, cat = scene.masks(64).astype(float)
    prompt = "on a blue background a blue car left of a cat"
    sample = sample_of(subject.pipe, prompt, scene, [1 - car - cat, car, car, cat])
    assert [word.kind for word in scene.words(prompt)] == ["ground", "colour", "noun", "noun"]
    records = Records()
    read_image(sample, "set", records)
    figures = records.figures()["set"]
    assert figures["image"]["default"]["right"] == (1.0, 1.0, 1.0)
    for kind, count in zip(KINDS, (2, 1, 1), strict=True):
        entry = figures[kind]["default"]
        assert entry["n"] == count
        for measure in ("iou", "fixed", "pointing", "precision"):
            assert entry[measure][0] == pytest.approx(1.0), (kind, measure)
        assert ("own" in entry) == (kind != "ground")
    words = scene.words(prompt)
    peaks = [float(one.values.max()) for one in maps_of(words, sample.heatmaps["default"])]
    np.testing.assert_allclose(peaks, 1.0, rtol=1e-5)
    assert function_peak(words, sample.heatmaps["default"]) == 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that knows nothing and a checker that does not either."""
    here = tmp_path_factory.mktemp("evaluation")
    make_pipeline().save_pretrained(here / "model")
    settings = {"num_inference_steps": 2, "guidance_scale": 2.0}
    (here / "model" / RECORD).write_text(json.dumps({"settings": settings}))
    save_file(Segmenter().state_dict(), here / "checker.safetensors")
    told = {"overlap": 0.0123, "objects": 0.5, "colours": 0.25}
    (here / "checker.json").write_text(json.dumps(told))
    return here


def given(folder):
    paths = {"--model": "model", "--checker": "checker.safetensors", "--work": "parts"}
    return [part for name, path in paths.items() for part in (name, str(folder / path))]


def test_the_command_measures_a_folder_and_goes_on_where_it_stopped(folder, tmp_path, capsys):
    few = ["--scenes", "2", "--inverted", "1", "--causes", "1", "--pairs", "2"]
    asked = [*given(folder), *few, "--out", str(tmp_path)]
    evaluate_heatmaps.main(asked)
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert {"noised, reported", "noised, for choosing", "pairs noised", "time"} <= figures.keys()
    assert figures["drawn, reported"]["image"]["default"]["n"] == 1
    assert (tmp_path / "plot.png").exists()
    parts = {path: path.stat().st_mtime_ns for path in (folder / "parts").glob("*-*.json")}
    assert len(parts) == 6
    told = capsys.readouterr().out
    assert "IoU on composed scenes is 0.012" in told
    evaluate_heatmaps.main(asked)
    assert capsys.readouterr().out == told
    assert parts == {path: path.stat().st_mtime_ns for path in parts}
    with pytest.raises(SystemExit, match="--work"):
        evaluate_heatmaps.main([*asked, "--seed", "1"])
