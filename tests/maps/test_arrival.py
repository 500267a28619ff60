"""Heatmaps.score() and missing(): which words of a prompt arrived in the image."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.tiny_tokenizers import tiny_tokenizer

from sdattn import Heatmaps, read_prompt
from sdattn.maps.arrival import WEAK, Calibration, calibration_of
from sdattn.models.demos import DEMOS

PROMPT = "a red cat and a dog"
PEAKS = {"red": 0.9, "cat": 0.6, "dog": 0.1, "a": 0.01, "and": 0.02}
CALIBRATION = Calibration("demo", "default", lead=4.0, words=9, missing=3, auc=0.9)


def planted(text=PROMPT, **peaks):
    """Heatmaps of a prompt whose words have one peak each, in cells of their own, on a ground."""
    prompt = read_prompt(tiny_tokenizer(), text)
    maps = torch.full((4, 6, len(prompt.tokens)), 1e-3)
    for i, word in enumerate(prompt.seen):
        maps.view(24, -1)[i, word.columns[0]] = {**PEAKS, **peaks}[word.text]
    return Heatmaps(prompt, maps)


def strength(values):
    """ln(peak) - rival, by hand in float64: patches are filled from the peak."""
    cells = np.asarray(values, np.float64)
    peak, rows, cols = cells.max(), *cells.shape
    patch = {tuple(int(at) for at in np.unravel_index(cells.argmax(), cells.shape))}
    margin = max(1, round(min(rows, cols) / 16))

    def around(some, width):
        near = range(-width, width + 1)
        found = {(r + i, c + j) for r, c in some for i in near for j in near}
        return {(r, c) for r, c in found if 0 <= r < rows and 0 <= c < cols}

    while True:
        grown = {cell for cell in around(patch, 1) if cells[cell] >= peak / 2}
        if grown == patch:
            break
        patch = grown
    away = [cells[cell] for cell in np.ndindex(rows, cols) if cell not in around(patch, margin)]
    return math.log(peak) - max(away, default=0.0) / peak


@pytest.mark.parametrize("size", [(16, 16), (5, 3), (32, 48)])
def test_the_score_is_the_mean_of_logarithms_of_peaks_less_their_rivals(size):
    generator = torch.Generator().manual_seed(size[0])
    smooth = torch.rand(1, 77, 4, 4, generator=generator) ** 4
    maps = torch.nn.functional.interpolate(smooth, size, mode="bicubic")[0].clamp(min=0)
    hm = Heatmaps(read_prompt(tiny_tokenizer(), PROMPT), maps.movedim(0, -1).contiguous())
    each = [strength(hm[word].values) for word in ("cat", "dog")]
    assert hm.score() == pytest.approx(np.mean(each), abs=1e-5)


def test_a_second_patch_is_a_rival_and_the_slope_of_the_first_is_none():
    hm = planted()
    once = hm.score(["cat"])
    assert once == pytest.approx(math.log(0.6) - 1e-3 / 0.6, abs=1e-5)
    twice = hm.maps[..., hm["cat"].columns[0]]
    twice[1, 2] = 0.29  # next to the peak, below half of it: its slope
    assert hm.score(["cat"]) == once
    twice[3, 5] = 0.45
    assert hm.score(["cat"]) == pytest.approx(math.log(0.6) - 0.45 / 0.6, abs=1e-5)


def test_chosen_words_and_phrases_are_scored_each_occurrence_for_itself():
    hm = planted()
    assert hm.score(["red"]) == pytest.approx(strength(hm["red"].values), abs=1e-5)
    assert hm.score(["red cat"]) == pytest.approx(strength(hm["red cat"].values), abs=1e-5)
    both = planted("a cat and a cat")
    both.maps.view(24, -1)[4, both.find("cat")[1].columns[0]] = 0.06
    each = [strength(one.values) for one in both.find("cat")]
    assert both.score() == pytest.approx(sum(each) / 2, abs=1e-5) and each[0] != each[1]
    assert both.score(["cat"]) == both.score()


def test_a_word_without_attention_has_a_finite_score_below_all_others():
    hm = planted()
    hm.maps[..., hm["dog"].columns[0]] = 0
    assert -100 < hm.score(["dog"]) < math.log(1e-30)


def test_without_things_the_content_words_are_scored_and_without_both_it_is_refused():
    assert planted("a red and a red").score() == planted().score(["red"])
    none = planted("a and a")
    assert none.judged() == []
    with pytest.raises(ValueError, match=r"'a and a' .* names a thing. Pass `words`"):
        none.score()
    assert planted().keep(planted()["cat"].columns).score() == planted().score(["cat"])


@pytest.mark.parametrize("words", ["cat", []])
def test_words_that_are_no_list_are_refused(words):
    for ask in (planted().score, planted().missing):
        with pytest.raises(ValueError, match="a list of words and phrases"):
            ask(words)
    with pytest.raises(KeyError, match="cow"):
        planted().missing(["cow"])


def test_a_word_whose_peak_hardly_leads_is_weak():
    hm = planted()
    at = hm.maps.view(24, -1)[:, hm["cat"].columns[0]]
    for other, found in ((0.1 / WEAK + 1e-4, ["dog"]), (0.1 / WEAK - 1e-4, [])):
        at[5] = other  # the cat's value where the dog's is highest
        assert [one.word for one in hm.missing()] == found
    at[5] = 0.08
    [dog] = hm.missing()
    assert (dog.verdict, dog.columns, dog.below) == ("weak", hm["dog"].columns, WEAK)
    assert dog.lead == pytest.approx(0.1 / 0.08) and dog.peak == pytest.approx(0.1)
    assert dog.instead == "dog"
    assert hm.missing(["dog"]) == []  # no other word is judged
    at[5] = 0.2
    assert hm.missing()[0].instead == "cat" and hm.missing()[0].lead == pytest.approx(0.5)


def test_words_without_any_attention_are_weak_and_equal_words_do_not_compete():
    hm = planted()
    hm.maps[..., hm["dog"].columns[0]] = 0
    assert [one.word for one in hm.missing()] == ["dog"]
    both = planted("a cat and a cat")
    both.maps[..., both.find("cat")[1].columns[0]] = both.maps[..., both.find("cat")[0].columns[0]]
    assert both.missing() == []
    assert planted().missing(["red cat", "cat"]) == []  # they share columns


def test_a_word_below_its_models_threshold_is_missing_and_the_weakest_comes_first(tmp_path):
    hm = planted()
    cells = hm.maps.view(24, -1)
    cells[5, hm["cat"].columns[0]] = 0.09  # the dog leads by 1.11
    cells[2, hm["dog"].columns[0]] = 0.2  # its own peak from now on, where the cat leads by 3
    cells[2, hm["red"].columns[0]] = 0.3  # and red is no judged word
    CALIBRATION.write(tmp_path / "own.json")
    for calibration in (CALIBRATION, tmp_path / "own.json", str(tmp_path / "own.json")):
        found = hm.missing(calibration=calibration)
        told = [(one.word, one.verdict, one.below, one.instead) for one in found]
        assert told == [("dog", "missing", 4.0, "cat"), ("cat", "missing", 4.0, "cat")]
        assert [one.lead for one in found] == pytest.approx([0.2 / 0.6, 3.0])
    assert [one.word for one in hm.missing(calibration=replace(CALIBRATION, lead=1.0))] == ["dog"]


def test_a_video_is_judged_over_all_frames():
    hm = planted()
    maps = torch.stack([hm.maps * 0.5, hm.maps])
    assert Heatmaps(hm.prompt, maps).score() == hm.score()
    assert Heatmaps(hm.prompt, maps).missing() == hm.missing()


def test_a_calibration_is_for_its_preset_and_what_is_written_is_read(tmp_path):
    path = tmp_path / "own.json"
    CALIBRATION.write(path)
    assert Calibration.read(path) == CALIBRATION
    other = Calibration("demo", "daam", lead=0.2, words=9, missing=3, auc=0.9)
    with pytest.raises(ValueError, match="preset 'daam'.*'default'"):
        planted().missing(calibration=other)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "lead": 0.5}, indent=1) + "\n")
    with pytest.raises(ValueError, match=r"checksum differs.*scripts\.calibrate"):
        Calibration.read(path)
    with pytest.raises(FileNotFoundError, match=r"no calibration .*scripts\.calibrate"):
        planted().missing(calibration=tmp_path / "none.json")


def test_only_demos_are_calibrated_here():
    found = calibration_of("demo")
    assert found is not None and found.model == "demo" and found.lead > 0
    assert (DEMOS["demo"] / "calibration.json").exists()
    assert calibration_of("owner/name") is None and calibration_of(None) is None


def test_a_map_of_zeros_has_the_least_peak_and_no_rival():
    found = planted()
    found.maps[..., list(found["cat"].columns)] = 0
    assert found.score(["cat"]) == pytest.approx(math.log(torch.finfo(torch.float32).tiny))
