"""The runs that the live page keeps."""

import io
import os
import subprocess
import sys
import tempfile
import zipfile

import pytest
from helpers.tiny_pipelines import make_pipeline
from PIL import Image

from sdattn import generate
from sdattn.app.recent_runs import RecentRuns, own_folder
from sdattn.runs.folder import load_run

SMALL = {"height": 64, "width": 96, "num_inference_steps": 1}


@pytest.mark.slow
def test_a_kept_run_is_all_that_save_writes(tmp_path):
    run = generate(make_pipeline(), "a red cat", seed=7, **SMALL)
    kept = RecentRuns(tmp_path / "kept")
    key = kept.keep(run)
    [(known, files)] = kept.known(["another", key])
    assert known == key and files.title == "a red cat (seed 7)"
    assert (files.page.name, files.archive.name) == ("a-red-cat-7.html", "a-red-cat-7.zip")
    run.save(tmp_path / "saved")
    with zipfile.ZipFile(files.archive) as archive:
        archive.extractall(tmp_path / "out")
    out, saved = tmp_path / "out" / "a-red-cat-7", tmp_path / "saved"
    written = {path.relative_to(saved) for path in saved.rglob("*") if path.is_file()}
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_file()} == written
    assert all((out / name).read_bytes() == (saved / name).read_bytes() for name in written)
    assert files.page.read_bytes() == (saved / "report.html").read_bytes()
    assert load_run(out).heatmaps["cat"].values.shape == (8, 12)
    assert list(files.pages.values()) == [files.page]
    assert Image.open(io.BytesIO(files.small.read_bytes())).size == (96, 64)


def test_images_of_one_run_have_a_folder_each(tmp_path):
    run = generate(make_pipeline(), "a cat", num_images_per_prompt=2, **SMALL)
    kept = RecentRuns(tmp_path)
    [(_, files)] = kept.known([kept.keep(run)])
    names = zipfile.ZipFile(files.archive).namelist()
    assert {name.split("/")[0] for name in names} == {"a-cat-0-0", "a-cat-0-1"}


class OneByte(RecentRuns):
    """A run's file has one byte."""

    def write(self, run, key):
        (self.folder / key).mkdir()
        (self.folder / key / "a.zip").write_bytes(b"a")
        return run


def test_the_oldest_go_first(tmp_path):
    kept = OneByte(tmp_path, most=3)
    keys = [kept.keep(number) for number in range(5)]
    assert [run for _, run in kept.known(keys)] == [2, 3, 4]
    assert {path.name for path in tmp_path.iterdir()} == set(keys[2:])
    kept.most = 0
    keys.append(kept.keep(5))
    assert [run for _, run in kept.known(keys)] == [5]


@pytest.mark.slow
def test_the_oldest_go_when_there_is_no_room_and_the_last_stays(tmp_path):
    run = generate(make_pipeline(), "a cat", **SMALL)
    kept = RecentRuns(tmp_path)
    first = kept.keep(run)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    kept.most = 2 * size
    second, third = kept.keep(run), kept.keep(run)
    assert [key for key, _ in kept.known([third, second, first])] == [third, second]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([second, third])
    kept.most = 1
    last = kept.keep(run)
    assert [key for key, _ in kept.known([first, second, third, last])] == [last]


HOLDS = """
import time
from sdattn.app.recent_runs import own_folder

with own_folder() as folder:
    (folder / "a.txt").write_text("a")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_what_killed_processes_left_goes_and_what_is_used_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HOLDS]
    held = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        _, used = (tmp_path / process.stdout.readline().strip() for process in held)
        held[0].kill()
        held[0].wait()
        with own_folder() as new:
            assert {*tmp_path.iterdir()} == {used, new}
            assert (used / "a.txt").read_text() == "a"
        assert {*tmp_path.iterdir()} == {used}
    finally:
        for process in held:
            process.kill()
            process.wait()
            process.stdout.close()
