"""Two runs side by side: differences against numpy, words matched, what cannot be compared."""

import json
import os
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from helpers.bilinear import stretch
from helpers.demo_words import OTHER, PROMPT, THING
from helpers.overlays import overlaid
from helpers.tiny_tokenizers import tiny_tokenizer
from PIL import Image

from sdattn import Heatmaps, diff, generate, load_run, read_prompt
from sdattn.maps import render
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import preset_of
from sdattn.runs.folder import SavedRun
from sdattn.runs.info import RunSettings

TOKENIZER = tiny_tokenizer()


def run(prompt, seed=0, grid=(4, 6), size=(96, 64), folder="runs/one", passes=2,
        layers=("down.a",), **settings):  # fmt: skip
    """A saved run of random maps, as ``load_run`` would give it."""
    random = torch.Generator().manual_seed(seed)
    maps = torch.rand(*grid, 77, generator=random).softmax(-1)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    heatmaps = Heatmaps(read_prompt(TOKENIZER, prompt), maps)
    held = {name: LayerMap("down", 0, 2, maps[None]) for name in layers}
    own = LayerMaps(held, heatmaps.columns, passes)
    info = RunSettings(prompt=prompt, seed=seed, **settings)
    return SavedRun(Image.fromarray(pixels), heatmaps, own, info, folder=Path(folder))


def values(run, *columns):
    return run.heatmaps.maps.numpy().astype(np.float64)[..., list(columns)].sum(-1)


def in_colours(name, shares):
    """Matplotlib's colours of shares in [0, 1], in [0, 255]."""
    return 255 * matplotlib.colormaps[name](shares)[..., :3]


def labels(comparison):
    return [(w.a.label if w.a else None, w.b.label if w.b else None) for w in comparison.words]


def test_numbers_are_those_of_numpy():
    a, b = run("red cat dog", 1), run("red cat dog", 2)
    for column, word in enumerate(diff(a, b).words, start=1):
        of_a, of_b = values(a, column), values(b, column)
        apart = of_b - of_a
        assert word.difference.dtype == torch.float32
        np.testing.assert_allclose(word.difference, apart, atol=1e-6)
        assert word.correlation == pytest.approx(np.corrcoef(of_a.ravel(), of_b.ravel())[0, 1])
        assert (word.mean_a, word.mean_b) == pytest.approx((of_a.mean(), of_b.mean()))
        place = np.unravel_index(np.abs(apart).argmax(), apart.shape)
        assert word.largest == (pytest.approx(apart[place]), tuple(place))


@pytest.mark.parametrize("finer", ["a", "b"])
def test_another_grid_is_brought_to_the_finer_one(finer):
    coarse, fine = run("red cat", 1), run("red cat", 2, grid=(8, 12), size=(192, 128))
    a, b = (fine, coarse) if finer == "a" else (coarse, fine)
    (word,) = diff(a, b, words=["cat"]).words
    of_a, of_b = (stretch(values(one, 2), (8, 12)) for one in (a, b))
    np.testing.assert_allclose(word.difference, of_b - of_a, atol=1e-6)
    assert word.correlation == pytest.approx(np.corrcoef(of_a.ravel(), of_b.ravel())[0, 1])
    assert word.a.values.shape == a.heatmaps.maps.shape[:2]


def test_a_run_and_itself():
    a = run("red cat", 1)
    found = diff(a, a)
    assert found.settings == {}
    for word in found.words:
        assert not word.difference.any()
        assert word.correlation == pytest.approx(1, abs=1e-12)
        assert word.largest == (0.0, (0, 0))
    last = np.asarray(found.sheet())[-200:-60, -500:-20]  # in the last word's difference
    assert (last == render.colorize_signed(np.zeros((1, 1)))[0, 0]).all()


@pytest.mark.slow
def test_a_flat_map_correlates_with_nothing(tmp_path):
    a, b = run("red cat", 1), run("red cat", 2)
    a.heatmaps.maps[..., 2] = 1 / 77
    red, cat = diff(a, b).words
    assert red.correlation is not None
    assert cat.correlation is None
    diff(a, b).save(tmp_path / "diff")
    words = json.loads((tmp_path / "diff" / "run.json").read_text())["words"]
    assert words[1]["correlation"] is None


def test_words_are_matched_by_text_and_occurrence():
    found = diff(run("a Cat, a dog and a red cat"), run("red A cat and the CAT cat"))
    assert labels(found) == [
        ("a", "A"), ("Cat", "cat"), (",", None), ("a", None), ("dog", None), ("and", "and"),
        ("a", None), ("red", "red"), ("cat", "CAT"), (None, "the"), (None, "cat"),
    ]  # fmt: skip
    lone = found.words[-1]
    assert lone.label == "cat"
    assert lone.mean_a is lone.difference is lone.correlation is lone.largest is None
    assert lone.mean_b > 0


def test_chosen_words_and_phrases_come_in_their_order():
    a, b = run("red cat dog red cat"), run("dog red CAT", 1)
    found = diff(a, b, words=["dog", "Red cat"])
    assert [word.label for word in found.words] == ["dog", "Red cat", "Red cat"]
    np.testing.assert_allclose(
        found.words[1].difference, values(b, 2, 3) - values(a, 1, 2), atol=1e-6
    )
    assert found.words[2].b is None
    with pytest.raises(KeyError, match="'cow'.*A: .*dog.*B: .*CAT"):
        diff(a, b, words=["cow"])
    with pytest.raises(ValueError, match="pass a list"):
        diff(a, b, words="cat")


def test_settings_that_differ():
    own = {"guidance_scale": 2.0, "eta": 0.0}
    of_b = {"guidance_scale": 3.0, "eta": 0.0, "negative_prompt": "dog " * 50}
    times = [9, 5, 3, 2, 1], [9, 5, 3, 2, 0]
    a = run("red cat", 1, model="demo", options=own, versions={"torch": "2.5"}, timesteps=times[0])
    b = run("red cat", 1, model="demo", options=of_b, versions={"torch": "2.6"}, timesteps=times[1])
    found = diff(a, b)
    assert found.settings == {
        "guidance_scale": (2.0, 3.0),
        "negative_prompt": (None, "dog " * 50),
        "version of torch": ("2.5", "2.6"),
        "timesteps": (a.info["timesteps"], b.info["timesteps"]),
    }
    told = found.told_settings()
    assert told["guidance_scale"] == ("2.0", "3.0")
    assert told["timesteps"] == ("9 … 1 (5)", "9 … 0 (5)")
    assert told["negative_prompt"][0] == "-"
    assert len(told["negative_prompt"][1]) == 60


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (("x/one", "y/two"), ("one", "two")),
        (("x/one", "y/one"), ("x/one", "y/one")),
        (("one", "x/one/../one"), ("one", "x/one")),
        (("x/one", "x/one"), ("one", "one")),
    ],
)
def test_runs_are_called_after_their_folders(folders, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = (run("red cat", folder=one) for one in folders)
    found = diff(a, b).names
    if folders[0] == "one":  # the folder above is pytest's own
        found = (Path(found[0]).name, found[1])
    assert found == names
    assert diff(a, b, names=("with", "without")).names == ("with", "without")


def of_preset(preset, **options):
    made = run("red cat", **options)
    made.heatmaps.preset = preset
    return made


def not_finite():
    made = run("red cat")
    made.heatmaps.maps[0, 0, 0] = torch.nan
    return made


DEFAULT, REFINED = (preset_of("default", refine=refine) for refine in (None, "self"))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (run("red cat"), run("red cat", grid=(6, 4), size=(64, 96)), "A.*96x64.*B.*64x96"),
        (of_preset(REFINED), run("red cat"), "A.*refine='self'.*B.*refine=None"),
        (of_preset(DEFAULT), of_preset(replace(DEFAULT, steps="last")), "steps='last'"),
        (of_preset(preset_of("daam")), of_preset(preset_of("daam"), passes=8), "over 2 and 8 st"),
        (run("red cat"), not_finite(), "B.*finite"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        diff(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (of_preset(REFINED), of_preset(REFINED)),
        (run("red cat"), run("red cat", passes=8)),  # means
        (run("red cat"), of_preset(replace(DEFAULT, steps="mean"))),
        (run("red cat"), of_preset(replace(DEFAULT, steps=(0.0, 0.5)))),
    ],
)
def test_means_over_other_steps_are_compared(a, b):
    assert diff(a, b).settings == {}


def test_maps_of_other_layers_are_told():
    a, b = run("red cat"), run("red cat", layers=("down.a", "up.b"))
    with pytest.warns(UserWarning, match="0.*only A.*1.*only B"):
        diff(a, b)


@pytest.fixture(scope="module")
def drawn(demo):
    prompts = [PROMPT, f"a green star left of a blue {OTHER}"]
    return generate(demo, prompts, seed=3, num_inference_steps=2)


@pytest.fixture(scope="module")
def folders(drawn, tmp_path_factory):
    return drawn.save(tmp_path_factory.mktemp("demo") / "run")


@pytest.mark.slow
def test_runs_in_memory_and_in_folders_are_the_same(drawn, folders):
    here, there = diff((drawn, 0), (drawn, 1)), diff(str(folders[0]), load_run(folders[1]))
    assert (here.names, there.names) == (("A", "B"), ("run-0", "run-1"))
    assert here.settings == there.settings == {
        "prompt": here.prompts, "seed": (3, 4),
    }  # fmt: skip
    assert here.image_b.tobytes() == there.image_b.tobytes()
    assert labels(here) == labels(there)
    for one, other in zip(here.words, there.words, strict=True):
        if one.difference is not None:  # folders hold float16
            torch.testing.assert_close(one.difference, other.difference, atol=1e-3, rtol=0)


def test_an_image_of_several_must_be_chosen(drawn):
    with pytest.raises(ValueError, match=r"2 image.*\(run, 1\)"):
        diff(drawn, (drawn, 0))
    with pytest.raises(ValueError, match="asked for 2"):
        diff((drawn, 0), (drawn, 2))
    with pytest.raises(TypeError, match="Asked to compare a dict"):
        diff({}, (drawn, 0))
    alone = replace(drawn, image_runs=drawn.image_runs[:1])
    assert diff(alone, (drawn, 1)).settings["seed"] == (3, 4)


def test_the_sheet_shows_all_maps_on_one_scale():
    a, b = run("red cat", 1, size=(576, 384)), run("red dog", 2, size=(576, 384))
    sheet = diff(a, b).sheet()
    width, height = 576 + 6, render.caption(a.image, "A").height + 6
    top = sheet.height - 4 * height  # the images, then red, cat, dog

    def tile(row, column):
        left = 6 + column * width
        return sheet.crop((left, top + row * height, left + 576, top + row * height + 384))

    assert tile(0, 0).tobytes() == a.image.tobytes()
    assert tile(0, 1).tobytes() == b.image.tobytes()
    apart = np.abs(np.asarray(b.image, dtype=int) - np.asarray(a.image))
    np.testing.assert_array_equal(np.asarray(tile(0, 2)), apart)
    of_a, of_b = (stretch(values(one, 1), (384, 576)) for one in (a, b))
    highest = max(values(one, column).max() for one in (a, b) for column in (1, 2))
    for column, image, map_ in ((0, a.image, of_a), (1, b.image, of_b)):
        shown = np.asarray(tile(1, column), dtype=float)
        np.testing.assert_allclose(shown, overlaid(image, map_ / highest), atol=6)  # a colour on
    most = np.abs(values(b, 1) - values(a, 1)).max()
    expected = in_colours("RdBu_r", 0.5 + (of_b - of_a) / (2 * most))
    np.testing.assert_allclose(np.asarray(tile(1, 2), dtype=float), expected, atol=6)
    for place in ((2, 1), (2, 2), (3, 0), (3, 2)):  # cat is not in B, dog not in A
        assert len(tile(*place).getcolors()) == 1


@pytest.mark.slow
def test_a_comparison_is_saved_whole_and_once(tmp_path):
    found = diff(run("red cat", 1), run("red dog", 2), names=("one", "two"))
    folder = found.save(tmp_path / "diff")
    assert sorted(os.listdir(folder)) == ["diff.html", "diff.png", "run.json"]
    assert (folder / "diff.html").read_bytes() == found.page()
    with Image.open(folder / "diff.png") as image:
        assert image.tobytes() == found.sheet().tobytes()
    saved = json.loads((folder / "run.json").read_text())
    assert saved["format"] == "sdattn-diff-1"
    assert [one["name"] for one in saved["runs"]] == ["one", "two"]
    assert saved["settings"] == {"prompt": ["red cat", "red dog"], "seed": [1, 2]}
    red, cat, dog = saved["words"]
    value, (row, col) = found.words[0].largest
    assert red == {
        "word": "red",
        "mean": [found.words[0].mean_a, found.words[0].mean_b],
        "correlation": found.words[0].correlation,
        "largest": {"value": value, "cell": [row, col]},
        "grid": [4, 6],
    }
    assert (cat["mean"][1], cat["largest"], dog["mean"][0]) == (None, None, None)
    with pytest.raises(FileExistsError, match="exists already"):
        found.save(folder)
    found.save(folder, force=True)
    assert os.listdir(tmp_path) == ["diff"]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.slow
def test_the_command_line_writes_and_tells(invoke, folders):
    code, out, err = invoke("diff", *folders)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["open", "outputs/run-0-vs-run-1/diff.html"] in rows
    assert ["other", "files", "diff.png,", "run.json"] in rows
    assert sorted(os.listdir("outputs/run-0-vs-run-1")) == ["diff.html", "diff.png", "run.json"]
    for text in (f"a green star left of a blue {OTHER}", "seed   │ 3", "correlation", THING):
        assert text in out
    word = diff(*folders, words=[OTHER]).words[0]
    value, (row, col) = word.largest
    pixel = f"{(col + 0.5) * 8:.0f}, {(row + 0.5) * 8:.0f}"  # 16 cells on 128 pixels
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    (cells,) = (one for one in table if one[:1] == [OTHER])
    means = [f"{word.mean_a:.2g}", f"{word.mean_b:.2g}", f"{word.correlation:.2g}"]
    assert cells == [OTHER, *means, f"{value:+.2g}", pixel]


@pytest.mark.slow
def test_items_of_batch_runs(invoke):
    Path("prompts.txt").write_text(f"a red {THING}\na red {OTHER}\n")
    options = ("--steps", "1", "--device", "cpu", "--batch-size", "2", "--save", "image,maps")
    for out, seed in (("one", "0"), ("two", "5")):
        code, _, err = invoke("batch", "prompts.txt", "--out", out, "--seed", seed, *options)
        assert code == 0, err
    assert invoke("diff", "one", "two", "--item", "000001")[0] == 0
    saved = json.loads(Path("outputs/one-000001-vs-two-000001/run.json").read_text())
    assert saved["settings"] == {"seed": [0, 5]}
    items = ("--item", "000001", "--item", "000002")
    assert invoke("diff", "one", "one", "red", *items, "--out", "here")[0] == 0
    saved = json.loads(Path("here/run.json").read_text())
    assert [one["word"] for one in saved["words"]] == ["red"]
    assert [one["name"] for one in saved["runs"]] == ["one/000001", "one/000002"]
    assert [one["prompt"] for one in saved["runs"]] == [f"a red {THING}", f"a red {OTHER}"]


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (("cow",), 2, "'cow' is in neither run. A: 'cow' is not in the prompt. Its words are: a,"),
        (("--item", "1"), 2, "which has no items"),
        (("--item", "1", "--item", "2", "--item", "3"), 2, "once for both runs, or twice"),
    ],
)
def test_comparisons_that_cannot_be(invoke, folders, more, code, message):
    found, _, err = invoke("diff", *folders, *more)
    assert found == code
    assert message in " ".join(err.replace("│", " ").split())
    assert os.listdir() == []


def test_a_run_that_is_not_there(invoke, folders):
    code, _, err = invoke("diff", folders[0], "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "There is no folder nowhere." in err
