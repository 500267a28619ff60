"""What a batch run may be asked for."""

import os
import sys

import pytest
from helpers.batch_draws import ALL, SMALL, draw, quick_garbage, watch_models  # noqa: F401
from helpers.tiers import tiered

from sdattn import cli
from sdattn.batch import Request, run_batch


@pytest.mark.slow
def test_a_model_may_be_a_path(model, tmp_path):
    (tmp_path / "in.txt").write_text("a cat\n")
    request = Request(tmp_path / "in.txt", tmp_path / "run", model, SMALL, device="cpu")
    assert run_batch(request).whole == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": "many"}, "batch_size='many'"),
        ({"format": "zip"}, "format='zip'.*parquet"),
        ({"save": ("image", "sound")}, "save=.sound"),
        ({"save": ()}, r"save=\(\)"),
        ({"part": (0, 2)}, r"part=\(0, 2\)"),
        ({"part": (3, 2)}, r"part=\(3, 2\)"),
    ],
)
def test_what_cannot_be_asked_is_told_before_anything_is_read(tmp_path, asked, message):
    with pytest.raises(ValueError, match=message):
        run_batch(Request(tmp_path / "none.txt", tmp_path / "run", **asked))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "asked", tiered([["--format", "zip"], ["--save", "image,"], ["--status", "run"]], 2)
)
def test_what_cannot_be_asked_is_an_error_of_usage(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    source = [] if "--status" in asked else ["in.txt"]
    monkeypatch.setattr(sys, "argv", ["sdattn", "batch", *source, "--out", "run", *asked])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
