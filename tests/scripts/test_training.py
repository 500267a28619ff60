"""How the demo model is trained: the states by which a prompt is read, runs taken up again."""

import argparse
import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from helpers import training_process
from helpers.forks import fork
from torch import nn

from scripts.scenes.shapes import COLOURS, SHAPES
from scripts.training import autoencoder, fit, record, train_demo_model
from scripts.training.autoencoder import vae_psnr
from scripts.training.data import TOKENS, make_scenes, make_tokenizer
from scripts.training.fit import Fit, note
from scripts.training.losses import captions, split, text_states
from scripts.training.models import new_text_encoder

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_unseen_scenes(monkeypatch):
    """How well images come back is told of four scenes, not of hundreds, which take seconds."""
    few = partial(vae_psnr, count=4)
    monkeypatch.setattr(train_demo_model, "vae_psnr", few)
    monkeypatch.setattr(autoencoder, "vae_psnr", lambda vae, seed, count: few(vae, seed))


@pytest.fixture(scope="module")
def scenes():
    return make_scenes(3, 400)


@pytest.fixture(scope="module")
def encoder(scenes):
    tokenizer = make_tokenizer(scenes)
    torch.manual_seed(0)
    return new_text_encoder(tokenizer).eval(), tokenizer


def columns(tokenizer, prompt):
    """The token columns of each word, from the tokenizer's own spans."""
    read = tokenizer(prompt, return_offsets_mapping=True, add_special_tokens=False)
    spans = read["offset_mapping"]
    words = [match.span() for match in re.finditer(r"\w+|,", prompt)]
    return [
        [1 + i for i, (start, end) in enumerate(spans) if first <= start and end <= last]
        for first, last in words
    ]


@torch.no_grad()
def states(encoder, prompt):
    text, tokenizer = encoder
    ids = tokenizer(prompt, padding="max_length", max_length=TOKENS, return_tensors="pt").input_ids
    return text(ids).last_hidden_state[0]


def mistaken_captions(scenes, seed, count):
    said = captions(np.random.default_rng(seed), scenes, torch.arange(count), (0, 0, 1))
    return [one for one in said if one.prompt], sum(one.prompt == "" for one in said)


def test_each_word_is_relied_on_for_what_it_says_itself(scenes, encoder):
    """Colours know the scene, shapes a scene of other colours, all else one of other shapes too."""
    said, _ = mistaken_captions(scenes, 0, 80)
    with torch.no_grad():
        found = text_states(*encoder, said)
    own = set()
    for caption, one in zip(said, found, strict=True):
        texts = (caption.prompt, *caption.mistaken)
        read, last = [states(encoder, text) for text in texts], len(texts) - 1
        places = [columns(encoder[1], text) for text in texts]
        words = [split(text) for text in texts]
        for i, word in enumerate(words[0]):
            if last == 2:  # mistaken about all objects
                source = 0 if word in COLOURS else 1 if word in SHAPES else 2
            else:
                changed = word != words[1][i] and word not in ("a", "an")
                source = 0 if changed else 1
            there = places[source][i]
            torch.testing.assert_close(one[places[0][i]], read[source][there], atol=2e-5, rtol=1e-4)
            own |= {word} if source == 0 else set()
        ends = [at[-1][-1] + 1 for at in places]
        torch.testing.assert_close(one[ends[0]], read[last][ends[last]], atol=2e-5, rtol=1e-4)
    assert own == {*COLOURS, *SHAPES}  # "turquoise", of more pieces, and "an" orange one too


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


def test_processes_that_began_apart_train_the_same_network(tmp_path):
    processes = [fork(training_process.train, rank, tmp_path) for rank in (0, 1)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    ends = [torch.load(tmp_path / f"end-{rank}.pt") for rank in (0, 1)]
    for name in ends[0]:
        assert torch.equal(ends[0][name], ends[1][name])


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
