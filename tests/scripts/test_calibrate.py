"""scripts/calibrate.py: the peak below which a model's word is missing."""

import json

import numpy as np
import pytest
import torch
from helpers.tiny_tokenizers import tiny_tokenizer
from sklearn.metrics import roc_auc_score

from scripts import calibrate
from sdattn import Heatmaps, read_prompt
from sdattn.maps.arrival import Calibration


def data(n=60, seed=0):
    rng = np.random.default_rng(seed)
    missing = rng.random(n) < 0.3
    return (rng.normal(1, 0.5, n) - missing).round(1), missing  # with ties


def test_the_threshold_is_the_best_of_all():
    peaks, missing = data()
    found = calibrate.fit("own", "default", peaks.tolist(), missing.tolist())

    def gain(cut):
        return (peaks[missing] < cut).mean() - (peaks[~missing] < cut).mean()

    ranked = np.unique(peaks)
    best = max(map(gain, (ranked[1:] + ranked[:-1]) / 2))
    assert gain(found.lead) == pytest.approx(best) and found.lead not in peaks
    assert (found.words, found.missing) == (60, missing.sum())
    assert found.auc == pytest.approx(roc_auc_score(missing, -peaks))


@pytest.mark.parametrize(
    ("peaks", "missing"),
    [
        ([0.1, float("inf")], [True, False]),
        ([0.1, 0.2], [True, True]),
        ([0.1, 0.2], [False, False]),
        ([0.1, 0.1], [True, False]),
    ],
)
def test_what_tells_nothing_is_refused(peaks, missing):
    with pytest.raises(ValueError, match="Pass images with missing words and others"):
        calibrate.fit("own", "default", peaks, missing)


class Run:
    """A saved run whose words have these peaks."""

    def __init__(self, model, **peaks):
        self.settings = type("Settings", (), {"model": model})
        prompt = read_prompt(tiny_tokenizer(), " and a ".join(peaks))
        maps = torch.zeros(2, 2, len(prompt.tokens))
        for i, word in enumerate(prompt.seen):
            if word.text in peaks:  # in a cell of its own, where the others have a little
                maps[:, :, word.columns[0]] = 0.15
                maps.view(4, -1)[i % 4, word.columns[0]] = peaks[word.text]
        self.heatmaps = Heatmaps(prompt, maps)


def test_a_list_of_looked_at_runs_makes_a_file(tmp_path, monkeypatch, capsys):
    runs = {"a": Run("own", cat=0.8, dog=0.2), "b": Run("own", cat=0.7, dog=0.6)}
    monkeypatch.setattr(calibrate.sdattn, "load_run", runs.__getitem__)
    listed, out = tmp_path / "list.jsonl", tmp_path / "own.json"
    lines = [{"run": "a", "missing": ["dog"]}, {"run": "b", "missing": []}]
    listed.write_text("\n".join(map(json.dumps, lines)))
    calibrate.main([str(listed), "-o", str(out)])
    found = Calibration.read(out)
    assert (found.model, found.preset, found.words, found.missing) == ("own", "default", 4, 1)
    assert found.lead == pytest.approx((0.2 / 0.15 + 0.6 / 0.15) / 2) and found.auc == 1.0
    assert "missing below a lead of" in capsys.readouterr().out

    with pytest.raises(ValueError, match="a: 'cow' is none of cat, dog"):
        calibrate.calibrated([json.dumps({"run": "a", "missing": ["cow"]})])
    runs["b"] = Run("other", cat=0.7, dog=0.6)
    with pytest.raises(ValueError, match="one model"):
        calibrate.calibrated([json.dumps(line) for line in lines])
