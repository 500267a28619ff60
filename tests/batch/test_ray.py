"""`sdattn batch --engine ray`: what the local engine writes, byte for byte, whoever is lost.

Ray begins on two cores of this machine, once for all tests here; actors are killed by their
number in the names of what they note.
"""

import importlib
import json
import os
import signal
import threading
import time
from collections import namedtuple
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.batch_draws import SMALL
from helpers.batch_draws import draw as draw_rows
from helpers.batch_runs import kept_of
from helpers.demo_batches import check_complete, colours, contents, rows, write_lines

from sdattn.batch import Draw, Outcome, Request, open_batch, run_batch
from sdattn.batch.engines.ray_engine import RayActor, RayEngine
from sdattn.batch.input.items import Item
from sdattn.batch.input.plan import Job
from sdattn.batch.storage.folder import BatchFolder

ITEMS = 24


@pytest.fixture(scope="module")
def on_ray():
    """Ray on this machine, with room for two workers."""
    ray = pytest.importorskip("ray", reason="pip install 'sdattn[ray]'")
    # Ray's workers would otherwise wait for every other process of a machine that is at work.
    beside = {"_system_config": {"worker_niceness": 0}, "include_dashboard": False}
    # The GPU is one by name: who asks for it finds that torch has none.
    ray.init("local", num_cpus=2, num_gpus=1, logging_level="ERROR", **beside)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def local(model, tmp_path_factory):
    """All of the items, drawn here: the run's folder."""
    folder = tmp_path_factory.mktemp("local")
    write_lines(folder / "in.jsonl", colours(ITEMS))
    assert draw(model, folder, "run").whole == ITEMS
    return folder


def draw(model, folder, out, **request) -> Outcome:
    usual = {"batch_size": 2, "options": {**SMALL, "num_inference_steps": 2}, "device": "cpu"}
    usual |= {"save": ("image", "maps"), "progress": False, "model": str(model)}
    return run_batch(Request(folder / "in.jsonl", folder / out, **{**usual, **request}))


def noted(root):
    """How many items each worker has noted, by the number of its process."""
    found = {}
    for path in (root / ".batch/done").glob("*"):
        number = path.stem.rpartition("-")[2]
        if number.isdecimal():
            found[int(number)] = path.read_bytes().count(b"\n")
    return found


def kill_one(root, after, killed):
    """Kill the first worker that has noted so many items."""
    end = time.monotonic() + 400
    while not killed and time.monotonic() < end:
        for number, items in noted(root).items():
            if items >= after and not killed:
                os.kill(number, signal.SIGKILL)
                killed.append(number)
        time.sleep(0.002)


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing(on_ray, model, local, tmp_path, capfd):
    """Also not what it held in memory for a file of many items."""
    write_lines(tmp_path / "in.jsonl", colours(ITEMS))
    run, killed, small = tmp_path / "run", [], 60_000  # bytes of a tar: some three items
    watching = threading.Thread(target=kill_one, args=(run, 3, killed))
    watching.start()
    asked = {"format": "webdataset", "shard_bytes": small}
    outcome = draw(model, tmp_path, "run", engine="ray", workers=(2, 2), **asked)
    watching.join()
    assert killed and "a worker has ended too soon" in capfd.readouterr().err
    assert (outcome.whole, outcome.failed, outcome.exit_code) == (ITEMS, 0, 0)
    check_complete(run, ITEMS)
    assert contents(run) == contents(local / "run")


@pytest.mark.weekly
def test_a_run_goes_on_with_the_other_engine(on_ray, model, local, tmp_path, monkeypatch):
    """Named by a path from a folder that Ray was not begun in."""
    write_lines(tmp_path / "in.jsonl", colours(ITEMS))
    monkeypatch.chdir(tmp_path)
    run, before = Path("run"), 0
    for engine, more in (("local", {}), ("ray", {"workers": (1, 2)})):
        stopping = threading.Thread(target=stop_after, args=(run, before + 4))
        stopping.start()
        outcome = draw(model, Path(), "run", engine=engine, **more)
        stopping.join()
        assert outcome.stopped == "enough" and outcome.before == before
        assert before + 4 <= outcome.whole <= ITEMS  # the last may be quicker than the stop
        before = outcome.whole
    assert draw(model, Path(), "run").whole == ITEMS
    check_complete(run, ITEMS)
    there, here = kept_of(run), kept_of(local / "run")
    assert {**there, "batch.json": None} == {**here, "batch.json": None}


def stop_after(root, number):
    """Once so many items are there, of which some may have been before."""
    end = time.monotonic() + 400
    while len(list(root.glob("items/*/*"))) < number and time.monotonic() < end:
        time.sleep(0.002)
    (root / ".batch/stop").write_text("enough")


@pytest.mark.slow
def test_what_fails_is_noted(on_ray, model, tmp_path, monkeypatch):
    class Failing(RayActor):
        def draw(self, batch, wanted, size):
            hook = self.pipe.unet.register_forward_pre_hook(lambda *_: 1 / 0)
            if batch[0].item.prompt != "a dog":
                hook.remove()
            super().draw(batch, wanted, size)
            hook.remove()

    monkeypatch.setattr("sdattn.batch.engines.ray_engine.RayActor", Failing)
    prompts = ["a cat", {"prompt": "a dog", "width": 13}, "a dog", "a"]
    asked = {"engine": "ray", "batch_size": 1, "progress": False, "workers": (1, 1)}
    outcome = draw_rows(model, tmp_path / "run", prompts, **asked)
    assert (outcome.whole, outcome.failed, outcome.bad_lines) == (2, 1, 1)
    bad, failed = sorted(rows(tmp_path / "run" / "errors.jsonl"), key=lambda row: row["line"])
    assert bad["line"] == 2 and failed["id"] == "000003"
    assert failed["reason"] == "ZeroDivisionError: division by zero"
    assert on_ray.is_initialized()  # by somebody else, who goes on


@pytest.mark.weekly
@pytest.mark.skipif(torch.cuda.is_available(), reason="Ray's GPU is one")
def test_an_error_of_a_worker_is_that_of_the_run(on_ray, model, tmp_path):
    """Here that there is no GPU, which a worker takes where Ray has one."""
    with pytest.raises(ValueError, match="cuda"):
        draw_rows(model, tmp_path / "run", ["a cat"], engine="ray", progress=False, device=None)
    assert BatchFolder(tmp_path / "run").lock.free()


@pytest.fixture
def crew_of(on_ray, tmp_path, monkeypatch):
    """Makes a crew of so many workers, at least and at most, of a class."""
    crews = []

    def make(kind, workers, request=Request):
        monkeypatch.setattr("sdattn.batch.engines.ray_engine.RayActor", kind)
        asked = request("in.txt", tmp_path / "run", device="cpu", workers=workers)
        folder = BatchFolder(tmp_path / "run")
        folder.open("job")
        crews.append(RayEngine(asked, folder, "job"))
        return crews[-1]

    yield make
    for engine in crews:
        engine.close()
        engine.folder.close()


def job_of(prompt, shape=0):
    return Job(Item(prompt, 1, prompt, 0, None, None, {}), {}, shape)


def noting(folder):
    """Workers without a model that note what they are asked for."""

    class Noting(RayActor):
        def note(self, *what):
            """Whether that is noted for the first time, by anyone."""
            with (folder / "noted").open("a+") as file:
                file.seek(0)
                noted = [line.split(" ", 1)[1] for line in file.read().splitlines()]
                file.write(f"{os.getpid()} {json.dumps(what)}\n")
            return json.dumps(what) not in noted

        def load(self):
            time.sleep(0.5 * self.note("load"))
            self.note("loaded")
            return namedtuple("Loaded", "weights video_format")("model", None)

        def batch_size(self, jobs, share):
            if self.note("size", len(jobs), share):
                os._exit(1)
            return 2

        def check(self, items):
            return items, []

        def draw(self, batch, wanted, size):
            name = batch[0].item.prompt
            self.note(name, wanted, size)
            time.sleep(0.2 * (name == "slow"))
            if name == "deadly":
                os._exit(1)
            if name == "ill":
                raise OSError("no such disk")

        def finish(self):
            self.note("finish")

    return Noting


def noted_in(folder, name):
    """The numbers of the processes that noted it, and what they were given."""
    lines = [line.split(" ", 1) for line in (folder / "noted").read_text().splitlines()]
    pairs = [(int(process), json.loads(what)) for process, what in lines]
    return [(process, given) for process, (what, *given) in pairs if what == name]


@pytest.mark.weekly
def test_a_crew_whose_workers_end_and_fail(crew_of, tmp_path, monkeypatch):
    worker, noted = noting(tmp_path), partial(noted_in, tmp_path)
    monkeypatch.setattr("sdattn.batch.engines.ray_engine._TRIES", 2)
    engine = crew_of(worker, (2, 2))
    assert engine.load().weights == "model" and len(noted("loaded")) == 2  # at least
    good, deadly = job_of("good"), job_of("deadly")
    assert engine.batch_size([good, good, deadly, job_of("wide", 1), good]) == 2
    assert [rest for _, rest in noted("size")] == [[2, 2]] * 2  # one of a shape; a second worker
    assert engine.check([good.item]) == ([good.item], [])

    wanted = {"deadly": "1", "good": "2", "other": "3"}
    engine.draw([[deadly], [good, job_of("whole")]], wanted, "")
    assert engine.lost and noted("finish")
    assert [rest for _, rest in noted("good")] == [[{"good": "2"}, 2]]
    assert not engine.folder.journals.failures()
    engine.draw([[deadly]], wanted, "")
    assert len(noted("deadly")) == 2
    reason = "each of 2 workers that drew it ended (ActorDiedError)"
    assert engine.folder.journals.failures()["deadly"]["reason"] == reason

    with pytest.raises(OSError, match="^no such disk$"):
        engine.draw([[job_of("ill")], *([job_of("slow")] for _ in range(9))], wanted, "")
    assert len(noted("slow")) < 9 and not engine.lost
    assert noted("ill")[0][0] in {who for who, _ in noted("finish")}


def light(of_each):
    """A worker and a request that need nothing of sdattn where they come; each worker has loaded
    what ``of_each`` says."""

    class Worker:
        def __init__(self, request, job, cwd):
            pass

        def load(self):
            return namedtuple("Loaded", "weights video_format")(of_each(), None)

    class Light(Request):
        def __reduce__(self):
            return dict, ()

    return Worker, Light


@pytest.mark.weekly
def test_workers_that_have_loaded_different_models(crew_of):
    worker, request = light(lambda: str(os.getpid()))
    with pytest.raises(ValueError, match="have loaded different models"):
        crew_of(worker, (2, 2), request).load()


@pytest.mark.weekly
def test_workers_that_ray_has_no_room_for(crew_of, monkeypatch, capfd):
    tell = RayEngine._tell_of_waiting

    def tell_and_leave(engine):
        tell(engine)
        if len(engine.free) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("sdattn.batch.engines.ray_engine._PATIENCE", 0.5)
    monkeypatch.setattr(RayEngine, "_tell_of_waiting", tell_and_leave)
    worker, request = light(str)
    with pytest.raises(KeyboardInterrupt):
        crew_of(worker, (3, 3), request).load()
    assert capfd.readouterr().err.splitlines()[-1] == (
        "sdattn: waiting: 2 of 3 workers have loaded the model; each takes a CPU, and Ray has 2; "
        "asked for 1 to 3 workers it would start as many as fit"
    )


@pytest.mark.weekly
def test_without_a_gpu_it_says_what_workers_take(crew_of, monkeypatch, capfd):
    engine = crew_of(RayActor, (1, 1))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    engine._connect()
    assert "GPU" not in capfd.readouterr().err  # --device cpu was asked for
    engine.request = replace(engine.request, device=None)
    engine._connect()
    assert engine.takes == "CPU" and engine.request.device == "cpu"
    assert "no GPU now, so each worker takes a CPU; the device cuda waits" in capfd.readouterr().err


@pytest.mark.weekly
def test_a_machine_that_has_no_sdattn(crew_of, capfd):
    worker, request = light(str)
    request.__reduce__ = lambda _: (importlib.import_module, ("not_installed_there",))
    with pytest.raises(RuntimeError, match="No module named 'not_installed_there'"):
        crew_of(worker, (1, 1), request).load()
    assert capfd.readouterr().err.count("a worker has ended too soon") == 3


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray to itself
def test_draw_in_ones_own_ray_program(on_ray, model, local):
    prompts = [{**row, "seed": i} for i, row in enumerate(colours(4))]
    options = {**SMALL, "num_inference_steps": 2}
    found = (
        on_ray.data.from_items(prompts)
        .map_batches(
            Draw,
            fn_constructor_kwargs={"model": str(model), "options": options, "device": "cpu"},
            batch_size=2,
            compute=on_ray.data.ActorPoolStrategy(size=1),
            num_cpus=0.5,
        )
        .take_all()
    )
    items = open_batch(local / "run")
    for row in found:
        item = items[f"{row['seed'] + 1:06d}"]
        location = local / "run" / "items" / "0000" / f"{row['seed'] + 1:06d}"
        assert row["maps"] == (location / "maps.safetensors").read_bytes()
        np.testing.assert_array_equal(row["image"], np.asarray(item.image))
        assert [word["word"] for word in row["statistics"]] == list(row["words"])


# Without Ray


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("sdattn.batch.engines.worker._LOOKS", 1)
    monkeypatch.chdir(Path.cwd())  # to come back to
    with pytest.raises(OSError, match="is not the run's folder.*all machines share"):
        RayActor(Request("in.txt", tmp_path / "run"), "job", str(tmp_path)).load()
    assert Path.cwd() == tmp_path  # where relative paths start, that of the model too


def test_an_engine_that_is_not_installed_is_refused_before_anything_is_done(invoke, monkeypatch):
    monkeypatch.setattr("sdattn.batch.input.request.find_spec", lambda name: None)
    code, out, err = invoke("batch", "none.txt", "--out", "run", "--engine", "ray")
    assert code == 1 and out == ""
    assert "--engine ray needs Ray: pip install 'sdattn[ray]'" in err
    assert len(err.splitlines()) == 1 and not Path("run").exists()


def test_the_engine_and_its_workers_are_asked_of_the_run(invoke, monkeypatch):
    seen = []
    monkeypatch.setattr("sdattn.batch.run.run_batch", seen.append)
    monkeypatch.setattr("sdattn.batch.input.request.find_spec", lambda name: name)
    for workers in ((), ("--workers", "4"), ("--workers", "1:8")):
        assert invoke("batch", "in.txt", "--out", "run", "--engine", "ray", *workers)[0] == 0
    assert invoke("batch", "in.txt", "--out", "run")[0] == 0
    asked = [(request.engine, request.workers) for request in seen]
    assert asked == [("ray", None), ("ray", (4, 4)), ("ray", (1, 8)), ("local", None)]


@pytest.mark.parametrize("text", ["0", "2:1", "x", "1:", ":2", "-1", "1:2:3"])
def test_workers_that_cannot_be(invoke, text):
    code, _, err = invoke("batch", "in.txt", "--out", "run", "--engine", "ray", f"--workers={text}")
    assert code == 2
    assert "is neither N nor MIN:MAX" in " ".join(err.split())


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"workers": (1, 2)}, "workers.*engine='ray'"),
        ({"engine": "dask"}, "engine='dask'"),
        ({"engine": "ray", "workers": (3, 2)}, r"workers=\(3, 2\)"),
        ({"engine": "ray", "device": "cuda:1"}, "names one device for all workers"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_asked_of_an_engine(asked, reason):
    with pytest.raises(ValueError, match=reason):
        Request("in.txt", "run", **asked).check()
