"""How the demo model is trained: runs that are taken up again, and what is recorded of them."""

import argparse
import json

import pytest
import torch
from torch import nn

from demos.training import fit, record
from demos.training.fit import Fit, note

pytestmark = pytest.mark.slow


def small_fit(work, steps, loss_of=None):
    """A line fitted to points: few weights, the whole loop."""
    torch.manual_seed(7)
    line = nn.Linear(3, 1)
    slow = nn.Linear(3, 1)
    slow.load_state_dict(line.state_dict())

    def loss(step):
        _, chosen = fit.pick(step, 5, torch.arange(50), batch=4)
        if step == loss_of:
            raise KeyboardInterrupt
        points = torch.randn(len(chosen), 3)
        return (line(points) - points.sum(1, keepdim=True)).square().mean()

    Fit("line", {"line": line}, (1e-2,), loss, steps, 0.5, {"line": slow}, lambda _: None).run(work)
    return torch.cat([value.flatten() for one in (line, slow) for value in one.parameters()])


def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    wanted = small_fit(whole, 12)
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1.0)  # after each step
    with pytest.raises(KeyboardInterrupt):
        small_fit(broken, 12, loss_of=7)
    kept = torch.load(broken / "line.pt")
    assert kept["step"] == 7 and kept["seconds"] > 0
    assert torch.equal(small_fit(broken, 12), wanted)
    assert not list(broken.glob("*.new"))


def settings(tmp_path, **changes):
    made = {"seed": 1, "chunks": 2, "start": None, "out": tmp_path / "out", "work": tmp_path}
    return argparse.Namespace(**{**made, "snapshot": False, **changes})


def test_a_run_is_recorded_and_not_mixed_with_another(tmp_path):
    record.begin_sitting(tmp_path, settings(tmp_path))
    torch.save({"step": 300, "seconds": 12.6}, tmp_path / "vae.pt")
    record.begin_sitting(tmp_path, settings(tmp_path, snapshot=True))
    with pytest.raises(SystemExit, match="'chunks': 2.*'chunks': 3"):
        record.begin_sitting(tmp_path, settings(tmp_path, chunks=3))
    for step, loss in ((100, 0.5), (200, 0.4), (200, 0.3)):  # a step done twice
        note(tmp_path, "vae", step, loss=loss)
    note(tmp_path, "vae", 200, decibels=20.1234567)
    out = tmp_path / "out"
    (out / "vae").mkdir(parents=True)
    (out / "vae" / "w.safetensors").write_bytes(b"abc")
    record.write_record(tmp_path, out)
    made = json.loads((out / "training.json").read_text())
    assert made["settings"] == {"seed": 1, "chunks": 2, "start": None}
    assert [one["from"] for one in made["sittings"]] == [{}, {"vae": 300}]
    assert all(one["versions"]["torch"] == torch.__version__ for one in made["sittings"])
    assert made["stages"] == {"vae": {"steps": 300, "seconds": 13}}
    assert made["curve"] == {
        "vae": {"100": {"loss": 0.5}, "200": {"loss": 0.3, "decibels": 20.123}}
    }
    # of "abc", from FIPS 180-2
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert made["sha256"] == {"vae/w.safetensors": digest}
    after = tmp_path / "after"  # a run that begins with what this one made
    after.mkdir()
    record.begin_sitting(after, settings(after, start=out))
    begun = json.loads((after / "run.json").read_text())
    assert begun["settings"]["start"] == {"vae/w.safetensors": digest}
    (out / "vae" / "w.safetensors").write_bytes(b"abd")
    with pytest.raises(SystemExit, match="Pass the same options"):
        record.begin_sitting(after, settings(after, start=out))
