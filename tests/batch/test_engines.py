"""Engines map `draw_shard`: in this process, in worker processes, on Ray; who ends is replaced."""

import json
import os
import signal
import sys
import threading
from concurrent.futures.process import BrokenProcessPool

import pytest
from helpers.batch_draws import ALL, SMALL, draw
from helpers.batch_runs import manifest, rows_of
from helpers.tiers import tiered
from helpers.trees import tree

from sdattn.batch import Request, engines
from sdattn.batch.engines import Processes, RayTasks, map_shards
from sdattn.batch.plan import Shard
from sdattn.batch.records import ShardRecord

ROWS = [{"prompt": text, "id": f"i{n}"} for n, text in enumerate(ALL)]


class Counting:
    """An engine that draws nothing."""

    def __init__(self, threads, fail=()):
        self.threads, self.fail = threads, fail
        self.begun, self.most, self.now = [], 0, 0
        self.lock = threading.Lock()

    def draw(self, manifest, shard, tell):
        with self.lock:
            self.begun.append(shard.number)
            self.now += 1
            self.most = max(self.most, self.now)
        if shard.number in self.fail:
            raise OSError("the disk is full")
        with self.lock:
            self.now -= 1
        return ShardRecord(shard.number, "", None, None, [])


def shards(number):
    return (Shard(n, (), "") for n in range(number))


@pytest.mark.parametrize("threads", [1, 3])
def test_every_shard_is_drawn_once_and_so_many_at_a_time(threads):
    engine = Counting(threads)
    found = [record.number for record in map_shards(engine, None, shards(20), None, lambda: False)]
    assert sorted(found) == sorted(engine.begun) == [*range(20)]
    assert engine.most <= threads


def test_after_a_stop_or_an_error_no_shard_is_begun():
    engine, found = Counting(1), []
    for record in map_shards(engine, None, shards(20), None, lambda: len(found) >= 3):
        found.append(record)
    assert len(engine.begun) == len(found) < 6
    engine = Counting(1, fail=[2])
    with pytest.raises(OSError, match="the disk is full"):
        [*map_shards(engine, None, shards(20), None, lambda: False)]
    assert len(engine.begun) <= 4


# Workers


def ends(request, *arguments):
    """A worker's function that ends it, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def says_device(request, *arguments):
    return request.device


@pytest.fixture
def processes():
    engine = Processes(Request("in.txt", "run"), ["cpu", "meta"])
    yield engine
    engine.close()


@pytest.mark.slow
def test_each_worker_has_its_device_and_an_ended_one_is_replaced(processes, capsys):
    found = {processes._call(says_device) for _ in range(2)}
    assert found == {"cpu", "meta"}
    with pytest.raises(BrokenProcessPool):
        processes._call(ends)
    assert capsys.readouterr().err.count("has ended too soon") == 3
    assert {processes._call(says_device) for _ in range(2)} == {"cpu", "meta"}


@pytest.mark.slow
def test_a_shard_that_ends_three_workers_is_recorded_as_failed(
    model, tmp_path, processes, monkeypatch
):
    draw(model, tmp_path / "run", ROWS[:2], shard_items=2)
    monkeypatch.setattr(engines, "draw_shard", ends)
    told = []
    monkeypatch.setattr(processes, "request", Request("in.txt", tmp_path / "run"))
    record = processes.draw(manifest(), Shard(0, jobs(2), "d"), lambda *n: told.append(n))
    assert all("each of 3 workers" in row["failed"] for row in record.rows)
    assert told == [(0, 2)] and len(record.failed) == 2


def jobs(number):
    from sdattn.batch.checks import Job
    from sdattn.batch.items import Item

    items = [Item(str(n), n, "a cat", n, None, None, {}) for n in range(number)]
    return tuple(Job(item, {}, 0) for item in items)


@pytest.mark.slow
@pytest.mark.parametrize("format", tiered(["folder", "webdataset"], quick=0))
def test_worker_processes_draw_what_one_process_draws(model, tmp_path, format, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    usual = {"options": SMALL, "format": format, "shard_items": 2, "batch_size": 2}
    draw(model, tmp_path / "one", ROWS, **usual)
    (tmp_path / "two.jsonl").write_text((tmp_path / "one.jsonl").read_text())
    assert draw(model, tmp_path / "two", ROWS, workers=2, **usual).whole == 8
    assert without_source(tmp_path / "two") == without_source(tmp_path / "one")


def without_source(root):
    found = tree(root)
    document = json.loads(found.pop("batch.json"))
    return found, document["settings"]


# Ray


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")


@pytest.mark.slow
def test_ray_draws_what_one_process_draws(ray, model, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    usual = {"options": SMALL, "shard_items": 2, "batch_size": 2}
    draw(model, tmp_path / "one", ROWS, **usual)
    outcome = draw(model, tmp_path / "two", ROWS, engine="ray", workers=2, **usual)
    assert outcome.whole == 8
    assert without_source(tmp_path / "two") == without_source(tmp_path / "one")
    assert ray.is_initialized()  # it was before


@pytest.mark.slow
def test_on_ray_a_shard_that_ends_three_workers_is_recorded_as_failed(
    ray, model, tmp_path, monkeypatch
):
    draw(model, tmp_path / "run", ROWS[:2], shard_items=2)
    engine = RayTasks(Request("in.txt", str(tmp_path / "run"), device="cpu", workers=1))
    monkeypatch.setattr(engines, "draw_shard", ends)
    record = engine.draw(manifest(), Shard(0, jobs(2), "d"), lambda *n: None)
    assert all("each of 3 workers" in row["failed"] for row in record.rows)
    assert len(rows_of(tmp_path / "run/shards/000000.jsonl")) == 4


def fails(request, *arguments):
    raise OSError("the disk is full")


@pytest.mark.slow
def test_an_error_on_ray_is_the_functions_own(ray, tmp_path, monkeypatch):
    engine = RayTasks(Request("in.txt", str(tmp_path), device="cpu", workers=1))
    monkeypatch.setattr(engines, "draw_shard", fails)
    with pytest.raises(OSError, match="the disk is full"):
        engine.draw(manifest(), Shard(0, (), "d"), lambda *n: None)
