"""A worker by itself, and the same as an actor that finds its own way to the folder."""

import json
from pathlib import Path

import pytest
import torch
from helpers.batch_draws import SMALL, quick_garbage  # noqa: F401
from helpers.batch_runs import files_of
from helpers.claimed_runs import claimed

from sdattn import generate
from sdattn.batch.engines.ray_engine import RayActor
from sdattn.batch.engines.worker import Loaded, Worker, load
from sdattn.batch.storage.formats import FORMATS

ROWS = [
    {"prompt": "a red cat", "id": "first"},
    {"prompt": "a dog", "id": "second", "seed": 7},
    {"prompt": "dog and cat", "id": "third", "words": ["cat"]},
]
pytestmark = pytest.mark.slow


@pytest.fixture
def run(model, tmp_path):
    """A run whose folder is claimed; it is closed in the end."""
    opened = []

    def make(**asked):
        opened.append(claimed(model, tmp_path / "run", ROWS, **asked))
        return opened[-1]

    yield make
    for made in opened:
        made.folder.close()


def noted(folder, kind="done"):
    lists = [path.read_text() for path in (folder.hidden / kind).glob("*")]
    return [json.loads(line) for text in lists for line in text.splitlines()]


def test_items_are_what_generate_makes_of_them(run, tmp_path):
    made = run()
    with Worker(made.pipe, made.folder, "here", made.request, 3) as worker:
        for job in made.jobs:  # alone, as generate() runs it, for the same bits
            worker.draw([job], made.wanted)
    rows = {row["id"]: row for row in noted(made.folder)}
    assert set(rows) == {"first", "second", "third"}
    for job in made.jobs:
        item = job.item
        words = None if item.words is None else list(item.words)
        alone = generate(made.pipe, item.prompt, seed=item.seed, words=words, **SMALL)
        path = Path(made.folder.root, rows[item.id]["place"])
        files = files_of(path)
        alone.save(tmp_path / item.id)
        expected = files_of(tmp_path / item.id)
        info = json.loads(files["run.json"])
        assert (info["id"], info["line"]) == (item.id, item.line)
        assert info["fingerprint"] == made.wanted[item.id]
        assert files["image.png"] == expected["image.png"]
        assert files["maps.safetensors"] == expected["maps.safetensors"]


@pytest.mark.parametrize("format", FORMATS)
def test_only_what_is_wanted_is_written_and_on_the_disk_in_the_end(run, format):
    made = run(format=format)
    wanted = {"second": made.wanted["second"]}
    with Worker(made.pipe, made.folder, "here", made.request, 3) as worker:
        worker.draw(made.jobs, wanted)  # the others run along, for the same bits
    assert [row["id"] for row in noted(made.folder)] == ["second"]
    assert [item for item, _ in made.folder.layout.find()] == ["second"]


def test_an_item_that_cannot_be_drawn_is_noted_with_its_reason(run):
    made = run(max_errors=1)
    made.pipe.text_encoder.register_forward_pre_hook(refuse)
    with Worker(made.pipe, made.folder, "here", made.request, 3) as worker:
        worker.draw(made.jobs, made.wanted)
    failed = noted(made.folder, "failed")
    assert failed and not noted(made.folder)
    assert failed[0]["reason"] == "RuntimeError: no text today"
    assert "Traceback" in failed[0]["traceback"] and failed[0]["prompt"] == "a red cat"
    assert made.folder.stopped == "1 item(s) have failed, all that max_errors allows"


def refuse(*_):
    raise RuntimeError("no text today")


def test_what_is_held_back_is_not_written_after_an_error(run):
    made = run(format="webdataset")
    with pytest.raises(KeyboardInterrupt):
        with Worker(made.pipe, made.folder, "here", made.request, 3) as worker:
            worker.draw(made.jobs, made.wanted)
            raise KeyboardInterrupt
    assert not list(made.folder.layout.find())


def test_what_is_loaded_is_known_by_its_weights(model, run):
    made = run()
    first = Loaded.of(made.pipe)
    assert first == Loaded.of(load(made.request, "cpu"))
    assert first.pipeline == "StableDiffusionPipeline" and first.dtype == "float32"
    with torch.no_grad():
        made.pipe.unet.conv_in.weight[0, 0, 0, 0] += 1
    assert Loaded.of(made.pipe).weights != first.weights


# As an actor


@pytest.fixture
def actor(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run(format="webdataset")
    worker = RayActor(made.request, "job", str(tmp_path))
    yield made, worker
    worker.folder.close()  # what the end of an actor's process does


def test_an_actor_draws_into_the_folder_of_its_job(actor):
    made, worker = actor
    loaded = worker.load()
    assert loaded == Loaded.of(made.pipe)
    jobs, bad = worker.check([job.item for job in made.jobs])
    assert [job.item for job in jobs] == [job.item for job in made.jobs] and not bad
    assert worker.batch_size(jobs, 3) >= 1
    worker.draw(jobs[:2], made.wanted, 2)
    assert not list(worker.folder.layout.find())  # one file of many items, still open
    worker.finish()
    assert sorted(item for item, _ in worker.folder.layout.find()) == ["first", "second"]
    worker.draw(jobs[2:], made.wanted, 2)
    worker.finish()
    worker.finish()  # of no effect a second time
    assert len(list(worker.folder.layout.find())) == 3
    assert {row["id"] for row in noted(worker.folder)} == {"first", "second", "third"}


def test_an_actor_of_another_job_is_refused(actor, monkeypatch):
    made, _ = actor
    monkeypatch.setattr("sdattn.batch.engines.worker._LOOKS", 1)
    with pytest.raises(OSError, match="is not the run's folder"):
        RayActor(made.request, "another", ".").load()
