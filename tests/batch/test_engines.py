"""Engines map `draw_shard`: in this process, in worker processes, on Ray; who ends is replaced, and
only a shard that ends them alone is to blame."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.spawn import get_preparation_data

import pytest
import torch
from helpers.batch_draws import ALL, SMALL, draw, watch_models  # noqa: F401
from helpers.batch_runs import manifest, rows_of
from helpers.tiers import tiered
from helpers.trees import tree

from sdattn.batch import Request, engines
from sdattn.batch.drawing import DeviceLostError, check_device
from sdattn.batch.engines import Processes, RayTasks, WorkerLostError, map_shards
from sdattn.batch.plan import Shard
from sdattn.batch.records import ShardRecord

META = torch.device("meta")
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
    return (Shard(n, ()) for n in range(number))


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


# Workers that are lost


class Losing(Counting):
    """An engine whose workers end: `losses` times for a shard of that number, or for each one once
    `limit` records are drawn, as if its machines were gone."""

    def __init__(self, out, threads, losses=(), limit=10**9):
        super().__init__(threads)
        self.request = Request("in.txt", out)
        self.losses, self.limit = Counter(losses), limit
        self.drawn = 0

    def describe(self):
        if self.drawn >= self.limit:
            raise RuntimeError("no worker lives")

    def draw(self, manifest, shard, tell):
        record = super().draw(manifest, shard, tell)
        if self.drawn >= self.limit or self.losses[shard.number] > 0:
            self.losses[shard.number] -= 1
            raise WorkerLostError("the process ended.")
        self.drawn += 1
        return record


def drawn_with(engine, number):
    """{shard: the reason of its failure, or None}, in the order of the records."""
    named = (Shard(n, jobs(1)) for n in range(number))
    told = []
    found = {}
    for record in map_shards(
        engine, manifest(shards=99), named, lambda *n: told.append(n), lambda: False
    ):
        assert record.number not in found
        found[record.number] = record.rows[0]["failed"] if record.rows else None
    assert told == [(0, 1)] * sum(reason is not None for reason in found.values())
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_a_shard_that_is_lost_with_its_machine_is_drawn_again(tmp_path, threads):
    """Four of five machines go at once; two shards are lost twice, one four times."""
    engine = Losing(tmp_path, threads, {1: 1, 2: 1, 3: 2, 5: 1, 7: 2, 8: 4})
    assert drawn_with(engine, 10) == dict.fromkeys(range(10))
    assert list(tmp_path.glob("shards/*")) == []  # no failure was published
    assert Counter(engine.begun) == Counter([*range(10), 1, 2, 3, 3, 5, 7, 7, 8, 8, 8, 8])


@pytest.mark.parametrize("threads", [1, 2])
def test_only_a_shard_that_ends_three_workers_alone_has_failed(tmp_path, threads):
    engine = Losing(tmp_path, threads, {3: 10**6, 6: 10**6})
    found = drawn_with(engine, 9)
    assert [n for n in found if found[n]] == [3, 6]
    assert found[3].startswith("each of 3 workers that drew nothing but its shard ended: the proc")
    assert [*found][-2:] == [3, 6] and engine.begun[-6:] == [3, 3, 3, 6, 6, 6]
    assert [row["id"] for row in rows_of(tmp_path / "shards/000003.jsonl")[1:-1]] == ["0"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("left", [0, 1, 2, 3, 30])
def test_if_all_workers_are_lost_nothing_is_called_failed(tmp_path, threads, left):
    """Whether many or few shards are left then; the same command draws them."""
    engine = Losing(tmp_path, threads, limit=4)
    if left == 0:
        assert len(drawn_with(engine, 4)) == 4
        return
    with pytest.raises(RuntimeError, match="no worker lives|in a row ended.*the same command"):
        drawn_with(engine, 4 + left)
    assert list(tmp_path.glob("shards/*")) == []
    assert len(engine.begun) <= 4 + 2 * (threads + 3)


def test_many_shards_that_end_their_workers_do_not_end_a_run(tmp_path):
    """Ten of thirty, none next to another: with no other shard left between them, too."""
    engine = Losing(tmp_path, 1, dict.fromkeys(range(0, 30, 3), 10**6))
    found = drawn_with(engine, 30)
    assert sorted(n for n in found if found[n]) == [*range(0, 30, 3)]


def test_a_stop_leaves_lost_shards_to_the_next_command(tmp_path):
    engine = Losing(tmp_path, 1, {0: 10**6})
    seen = []
    named = (Shard(n, jobs(1)) for n in range(3))
    for record in map_shards(engine, manifest(shards=99), named, None, lambda: len(seen) == 2):
        seen.append(record.number)
    assert seen == [1, 2] and engine.begun == [0, 1, 2]


class NoWorkers(engines._Workers):
    """Workers that end at once, whatever they are asked."""

    asked = 0

    def _call(self, function, *arguments):
        self.asked += 1
        raise WorkerLostError("the process ended.")


def test_a_model_that_no_worker_can_load_ends_the_run():
    workers = NoWorkers(Request("in.txt", "run"), 2)
    with pytest.raises(RuntimeError, match="3 workers in a row ended and drew nothing"):
        workers.describe()
    assert workers.asked == 3
    for left in (1, 5, 20):
        with pytest.raises(RuntimeError, match="in a row ended and drew nothing"):
            [*map_shards(workers, None, shards(left), None, lambda: False)]


def test_a_device_that_answers_nothing_is_lost():
    """A tensor of the device meta has no value to read, like any of a GPU after a fault."""
    check_device(torch.device("cpu"))
    with pytest.raises(DeviceLostError, match="meta no longer answers: .*the same command"):
        check_device(torch.device("meta"))


def test_an_item_that_met_a_lost_device_has_not_failed(model, tmp_path, watched, tiny_pipe):
    watched.forbidden = tiny_pipe.tokenizer("cat").input_ids[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdattn.batch.drawing.check_device", lambda _: check_device(META))
        with pytest.raises(DeviceLostError):
            draw(model, tmp_path / "run", ["a dog", "red", "a cat"], batch_size=1, shard_items=1)
    assert all(len(rows_of(path)) == 3 for path in (tmp_path / "run/shards").glob("*.jsonl"))
    watched.forbidden = None
    outcome = draw(model, tmp_path / "run", ["a dog", "red", "a cat"], batch_size=1, shard_items=1)
    assert (outcome.whole, outcome.failed) == (3, 0)


# Workers


def ends(request, *arguments):
    """A worker's function that ends it, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def loses_its_device(request, *arguments):
    raise DeviceLostError("cuda:0 no longer answers")


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
    for end in (ends, loses_its_device):
        with pytest.raises(WorkerLostError, match="ended too soon"):
            processes._call(end)
    assert capsys.readouterr().err.count("has ended too soon") == 2
    assert {processes._call(says_device) for _ in range(2)} == {"cpu", "meta"}


@pytest.mark.slow
def test_a_shard_that_ends_its_workers_is_recorded_as_failed(
    model, tmp_path, processes, monkeypatch
):
    draw(model, tmp_path / "run", ROWS[:2], shard_items=2)
    monkeypatch.setattr(engines, "draw_shard", ends)
    told = []
    request = Request("in.txt", tmp_path / "run", str(model))
    monkeypatch.setattr(processes, "request", request)
    monkeypatch.setattr(engines, "describe", says_device)  # as a worker that lives
    shard = Shard(0, jobs(2))
    [record] = map_shards(
        processes, manifest(shards=99), [shard], lambda *n: told.append(n), lambda: False
    )
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


SCRIPT = """
from sdattn.batch import Request
from sdattn.batch.engines import Processes

print("the script runs")
engine = Processes(Request("in.txt", "run"), ["cpu"])
print(engine._call(format), flush=True)
engine.close()
import __main__
assert __main__.SCRIPT is None
"""


def test_a_worker_is_told_of_no_script_to_run(monkeypatch):
    """And the script is there again after its process has begun, or could not."""
    script, told = sys.modules["__main__"], []
    monkeypatch.setattr(script, "__spec__", None)
    monkeypatch.setattr(script, "__file__", "script.py", raising=False)

    class Pool:
        def __init__(self, *_):
            pass

        __enter__ = __exit__ = lambda self, *_: self

        def submit(self, *_):
            told.append(get_preparation_data("worker"))
            raise BrokenProcessPool

    monkeypatch.setattr(engines, "ProcessPoolExecutor", Pool)
    engine = Processes(Request("in.txt", "run"), ["cpu"])
    with pytest.raises(WorkerLostError):
        engine._call(says_device)
    assert not any(name.startswith("init_main") for name in told[0])
    assert any(name.startswith("init_main") for name in get_preparation_data("worker"))
    assert sys.modules["__main__"] is script


@pytest.mark.slow
def test_a_script_without_a_main_block_runs_once(tmp_path):
    """Its workers do not run it again."""
    (tmp_path / "script.py").write_text(f"SCRIPT = None\n{SCRIPT}")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the script runs\nRequest(source='in.txt'")
    assert done.stdout.count("the script runs") == 1


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
def test_on_ray_a_shard_that_ends_its_workers_is_recorded_as_failed(
    ray, model, tmp_path, monkeypatch
):
    draw(model, tmp_path / "run", ROWS[:2], shard_items=2)
    engine = RayTasks(Request("in.txt", str(tmp_path / "run"), device="cpu", workers=1))
    monkeypatch.setattr(engines, "draw_shard", ends)
    monkeypatch.setattr(engines, "describe", says_device)
    shard = Shard(0, jobs(2))
    [record] = map_shards(engine, manifest(shards=99), [shard], lambda *n: None, lambda: False)
    assert all("each of 3 workers" in row["failed"] for row in record.rows)
    assert len(rows_of(tmp_path / "run/shards/000000.jsonl")) == 4


def fails(request, *arguments):
    raise OSError("the disk is full")


@pytest.mark.slow
def test_an_error_on_ray_is_the_functions_own(ray, tmp_path, monkeypatch):
    engine = RayTasks(Request("in.txt", str(tmp_path), device="cpu", workers=1))
    monkeypatch.setattr(engines, "draw_shard", fails)
    with pytest.raises(OSError, match="the disk is full"):
        engine.draw(manifest(), Shard(0, ()), lambda *n: None)
