"""`sdattn batch` under fire: killed, out of space, refused, fed with rubbish. Nothing is ever lost.

Processes of their own wherever signals, locks or disks matter, and real launchers where they do;
the demo model on the CPU at two steps.
"""

import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from forks import Fork, in_own_namespace, two_ranks
from safetensors.torch import load_file, save_file

import sdattn
from sdattn.batch.folder import BatchFolder
from sdattn.batch.reading import open_batch, status, verify
from sdattn.models.loading import size_unit
from sdattn.models.outline import outline

DEMO = Path(sdattn.__file__).parent / "models" / "demo"
COMMAND = [sys.executable, "-m", "sdattn", "batch"]
# --cpu would start one process only, whatever --num_processes says (accelerate 1.15).
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
LAUNCH += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
LAUNCH += ["--dynamo_backend", "no", "--main_process_port", "0", "-m", "sdattn", "batch"]
SETTINGS = ["--steps", "2", "--save", "image,maps", "--batch-size", "2", "--device", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
KILLED_ITEMS = 48
MOMENTS = ("starting", "loading", "drawing", "writing")
LINUX = Path("/proc/self/task").exists()


def colours(number):
    names = ("red", "green", "blue", "yellow")
    return [
        {"prompt": f"a {names[i % 4]} circle and a {names[i // 4 % 4]} square"}
        for i in range(number)
    ]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def start(*arguments, launch=COMMAND, cwd):
    return subprocess.Popen(
        [*launch, *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def batch(sdattn):
    """The same without a process: (exit code, stdout, stderr)."""
    return partial(sdattn, "batch")


def stamps(root):
    """Which file holds each item that is there, and when it was written: (inode, mtime)."""
    found = {}
    for path in [*root.glob("items/*/*/run.json"), *root.glob("shards/*.safetensors")]:
        known = path.stat()
        found[path.relative_to(root)] = known.st_ino, known.st_mtime_ns
    return found


def whole(root):
    """How many items are there."""
    if not (root / "batch.json").exists():
        return 0
    return len(list(BatchFolder(root).layout.find()))


def contents(root):
    layout = BatchFolder(root).layout
    return {item: layout.read(item, place) for item, place in sorted(layout.find())}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_complete(root, number):
    """Every item exactly once, as it was written, with one row, and nothing unfinished."""
    assert verify(root) == (number, [])
    expected = [f"{line:06d}" for line in range(1, number + 1)]
    assert sorted(item for item, _ in BatchFolder(root).layout.find()) == expected
    assert [row["id"] for row in rows(root / "metadata.jsonl")] == expected
    assert rows(root / "errors.jsonl") == []
    assert list((root / ".batch/tmp").iterdir()) == []
    assert list((root / ".batch/done").iterdir()) == []


# Killed, and told to stop


def wait_until(seen, process):
    """Fails if the process ends before."""
    end = time.monotonic() + 60
    while not seen():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for_unfinished(root, seconds=0.5):
    """Until some item is being written: moments that are left to chance would miss them all."""
    end, seen = time.monotonic() + seconds, set(root.glob("items/*/*"))
    while time.monotonic() < end and not os.listdir(root / ".batch/tmp"):
        new = set(root.glob("items/*/*")) - seen
        if any(not (one / "run.json").exists() for one in new):
            return
        seen |= new


def wait_for_moment(moment, root, rank, more, chance):
    """Until a run is where it is to be killed; for items, until there are ``more`` than before."""
    before, number = BatchFolder(root).lock.holder, whole(root)
    if moment == "starting":  # processes find each other, the first reads the input
        time.sleep(chance.uniform(0, 0.5))
        return
    wait_until(lambda: BatchFolder(root).lock.holder not in ({}, before), rank)
    if moment == "loading":  # the model, then what the folder holds
        time.sleep(chance.uniform(0, 0.7))
        return
    wait_until(lambda: whole(root) >= number + more, rank)
    if moment == "writing":
        wait_for_unfinished(root)
    elif moment == "drawing":
        time.sleep(chance.uniform(0, 0.1))  # what an item takes
    else:
        os.mkfifo(root / ".batch/tmp/metadata.jsonl")  # where who gathers the rows gets no further
        wait_until(lambda: whole(root) == KILLED_ITEMS, rank)
        time.sleep(0.3)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Every eighth batch of the input, drawn without a kill, by one process: (id, its files)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_lines(folder / "in.jsonl", colours(KILLED_ITEMS))
    arguments = ["in.jsonl", *SETTINGS, "--part", "3/8", "--out", "run"]
    process = Fork("batch", *arguments, cwd=folder)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return contents(folder / "run")


@pytest.mark.skipif(not LINUX, reason="forks processes")
@pytest.mark.parametrize(
    ("kind", "killed"), [("folder", (0, 1)), ("shard", (1,))], ids=["folder", "shard"]
)
def test_ranks_that_are_killed_lose_nothing(tmp_path, undisturbed, kind, killed):
    """Each rank is killed in each moment, in any order, and one more at the end of the run."""
    chance = random.Random(1)
    write_lines(tmp_path / "in.jsonl", colours(KILLED_ITEMS))
    arguments = ["batch", "in.jsonl", *SETTINGS, "--out", "run"]
    arguments += ["--format", kind, "--shard-mb", "1"]
    root = tmp_path / "run"
    kills = [(moment, rank) for moment in MOMENTS for rank in killed]
    chance.shuffle(kills)
    known = {}
    for moment, rank in [*kills, ("gathering", 0)]:
        ranks = [Fork(*arguments, cwd=tmp_path, variables=one) for one in two_ranks()]
        wait_for_moment(moment, root, ranks[rank], chance.randint(1, 3), chance)
        ranks[rank].kill()
        for one in ranks:
            one.terminate()  # as a launcher does with the others
        for one in ranks:
            one.communicate(timeout=60)
        assert ranks[rank].returncode == -signal.SIGKILL, moment  # it had not ended before
        now = stamps(root)
        assert known.items() <= now.items()  # nothing lost, nothing written twice
        known = now
    ranks = [Fork(*arguments, cwd=tmp_path, variables=one) for one in two_ranks()]
    for one in ranks:
        _, err = one.communicate(timeout=120)
        assert one.returncode == 0, err
    assert known.items() <= stamps(root).items()
    check_complete(root, KILLED_ITEMS)
    found = contents(root)
    assert len(undisturbed) == KILLED_ITEMS / 8
    assert all(found[item] == files for item, files in undisturbed.items())


@pytest.mark.skipif(os.name == "nt", reason="sends signals")
@pytest.mark.parametrize(
    ("name", "code", "kind"), [("SIGINT", 130, "folder"), ("SIGTERM", 143, "shard")]
)
def test_a_signal_finishes_what_is_in_hand(batch, tmp_path, name, code, kind):
    write_lines(tmp_path / "in.jsonl", colours(30))
    arguments = ["in.jsonl", *SETTINGS, "--out", "run", "--format", kind, "--shard-mb", "1"]
    root = tmp_path / "run"
    process = Fork("batch", *arguments, cwd=tmp_path)
    wait_until(lambda: whole(root) >= 1, process)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"sdattn: {name}: finishing the items in hand" in err
    assert f"sdattn: stopped early ({name}); the same command does the rest" in err
    assert "Traceback" not in err
    number, problems = verify(root)
    assert 0 < number < 30 and problems == []
    assert f"run/: {number} of 30 items" in out
    assert [row["id"] for row in rows(root / "metadata.jsonl")] == sorted(open_batch(root))
    before = stamps(root)
    again, out, err = batch(*arguments)
    assert again == 0, err
    assert f"{number} of them were there" in out
    assert before.items() <= stamps(root).items()
    check_complete(root, 30)


def ranks_of(launcher):
    """Process ids of the ranks that a launcher has begun."""
    try:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        found = [(int(one), Path(f"/proc/{one}/cmdline").read_bytes()) for one in children]
    except OSError:  # ended meanwhile
        return []
    return [pid for pid, command in found if b"sdattn" in command and b"launch" not in command]


@pytest.mark.skipif(not LINUX, reason="finds processes in /proc")
@pytest.mark.parametrize("ended", ["the launcher", "a rank"])
def test_a_launcher_that_ends_early_ends_its_ranks_and_keeps_what_they_finished(
    batch, tmp_path, ended
):
    """It is told to, or does so itself when a rank is killed."""
    write_lines(tmp_path / "in.jsonl", colours(30))
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    launcher = start(*arguments, launch=LAUNCH, cwd=tmp_path)
    wait_until(lambda: whole(root) >= 4, launcher)
    ranks = ranks_of(launcher)
    assert len(ranks) == 2
    if ended == "a rank":
        os.kill(ranks[0], signal.SIGKILL)
    else:
        launcher.terminate()
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert "SIGTERM: finishing the items in hand" in err
    number, problems = verify(root)
    if ended == "a rank":  # it may have been killed between an item and its row
        problems = [one for one in problems if "has no row; the next run adds it" not in one]
    assert 4 <= number < 30 and problems == [], err
    before = stamps(root)
    code, _, err = batch(*arguments)
    assert code == 0, err
    assert before.items() <= stamps(root).items()
    check_complete(root, 30)


# Disks


@pytest.fixture
def may_mount():
    """Skips where no namespace of its own may be made, and none to mount in."""
    try:
        command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespace of its own may be made here: {error}")


def said(folder, name):
    """(exit code, stdout, stderr) of a step in a namespace."""
    out, err = ((folder / f"{name}.{end}").read_text() for end in ("out", "err"))
    return int((folder / f"{name}.code").read_text()), out, err


@pytest.mark.usefixtures("may_mount")
@pytest.mark.parametrize("kind", ["folder", "shard"])
def test_a_full_disk_is_told_and_what_was_finished_stays(tmp_path, kind):
    number = 30
    write_lines(tmp_path / "in.jsonl", colours(number))
    (tmp_path / "disk").mkdir()
    command = ["batch", "in.jsonl", "--out", "disk/run", *SETTINGS]
    command += ["--format", kind, "--shard-mb", "1"]
    full = ["full", "still"] if kind == "folder" else ["full"]
    steps = [
        "mount -t tmpfs -o size=3m none disk",
        *[(name, *command) for name in full],
        "find disk/run/.batch/tmp -mindepth 1 >left",
        ("check", "batch", "--verify", "disk/run"),
        "cp -a disk/run before",
        "mount -o remount,size=200m disk",
        ("again", *command),
        "cp -a disk/run after",
    ]
    in_own_namespace(steps, cwd=tmp_path)
    for name in full:
        code, out, err = said(tmp_path, name)
        assert code == 1
        assert "Traceback" not in err
        assert len(err.splitlines()) == 1, err
        assert "No space left on device" in err
        assert "What was finished stays in disk/run" in err
    assert (tmp_path / "left").read_text() == ""
    code, out, err = said(tmp_path, "check")
    assert code == 0, err
    done = int(re.search(r"(\d+) items read, 0 problems", out)[1])
    assert 5 < done < number
    code, out, err = said(tmp_path, "again")
    assert code == 0, err
    # cp -a keeps times: what was there was not written again
    earlier, later = (
        {path: one[1] for path, one in stamps(tmp_path / name).items()}
        for name in ("before", "after")
    )
    assert earlier.items() <= later.items()
    check_complete(tmp_path / "after", number)


@pytest.mark.usefixtures("may_mount")
def test_a_disk_that_cannot_be_written(tmp_path, batch):
    write_lines(tmp_path / "in.jsonl", colours(4))
    assert batch("in.jsonl", *SETTINGS, "--out", "run")[0] == 0
    before = stamps(tmp_path / "run")
    (tmp_path / "disk").mkdir()
    steps = [
        "mount -t tmpfs -o ro none disk",
        ("new", "batch", "in.jsonl", *SETTINGS, "--out", "disk/run"),
        "mount --bind run run",
        "mount -o remount,bind,ro run",
        ("old", "batch", "in.jsonl", *SETTINGS, "--out", "run"),
        ("status", "batch", "--status", "run"),
        ("verify", "batch", "--verify", "run"),
    ]
    in_own_namespace(steps, cwd=tmp_path)
    for name, where in (("new", "disk/run"), ("old", "run")):
        code, _, err = said(tmp_path, name)
        assert code == 1
        assert err.splitlines() == [f"sdattn: Cannot write to {where}: Read-only file system."]
    code, out, err = said(tmp_path, "status")
    assert (code, err) == (0, "")
    assert "4 items are whole, the input has 4" in out and "not running" in out
    code, out, err = said(tmp_path, "verify")
    assert (code, err) == (0, "")
    assert "4 items read, 0 problems" in out
    assert stamps(tmp_path / "run") == before


@pytest.mark.parametrize("full", ["the items", "the rows"])
def test_a_disk_that_fills_up_at_any_file_is_told_once(batch, tmp_path, monkeypatch, full):
    write_lines(tmp_path / "in.jsonl", colours(6))
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_):
        raise error

    def replace(source, target, really=os.replace):
        refuse() if str(target).endswith("metadata.jsonl") and whole(root) else None
        really(source, target)

    with monkeypatch.context() as patches:
        if full == "the items":
            patches.setattr("sdattn.batch.layouts.write_files", refuse)
            patches.setattr(BatchFolder, "stop", refuse)
        else:
            patches.setattr("sdattn.batch.folder.os.replace", replace)
        code, _, err = batch(*arguments)
    assert code == 1
    assert len(err.splitlines()) == 1, err
    assert "No space left on device. What was finished stays in run" in err
    assert list((root / ".batch/tmp").iterdir()) == []
    assert verify(root) == (0 if full == "the items" else 6, [])
    before = stamps(root)
    code, _, err = batch(*arguments)
    assert code == 0, err
    assert before.items() <= stamps(root).items()
    check_complete(root, 6)


@pytest.mark.skipif(not LINUX, reason="limits the size of files")
def test_a_row_is_noted_whole_or_refused(tmp_path):
    import resource

    folder = BatchFolder(tmp_path / "run")
    folder.open("job")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    noted = []
    row = {"place": "items/0000/1", "fingerprint": "f", "prompt": "a cat" * 20}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as if the disk were full there
    try:
        with pytest.raises(OSError, match="space|large"):
            for line in range(100):
                folder.journals.note("done", "rank", {"id": f"{line:06d}", "line": line, **row})
                noted.append(f"{line:06d}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder.journals.note("done", "rank", {"id": "later", "line": 100, **row})
    assert list(folder.journals.rows()) == [*noted, "later"]
    assert folder.journals.gather() == len(noted) + 1
    folder.lock.release()


# Folders that are not this run's


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_what_is_no_batch_run_is_left_alone(batch, tmp_path, force):
    write_lines(tmp_path / "in.jsonl", colours(2))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "photos/items").mkdir(parents=True)
    (tmp_path / "photos/holiday.jpg").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, _, err = batch("in.jsonl", *SETTINGS, "--out", "file", *force)
    assert code == 1
    assert err.splitlines() == ["sdattn: file is a file. Choose another --out."]
    code, _, err = batch("in.jsonl", *SETTINGS, "--out", "photos", *force)
    assert code == 1
    assert err.splitlines() == [
        "sdattn: photos is no batch run's folder: it has no batch.json, but holiday.jpg, items. "
        "Choose another --out."
    ]
    code, _, err = batch("in.jsonl", *SETTINGS, "--out", "file/run", *force)
    assert code == 1
    assert "Cannot write to file/run: Not a directory." in err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("kind", ["folder", "shard"])
def test_other_prompts_and_steps_are_refused_and_force_makes_anew_only_them(batch, tmp_path, kind):
    lines = colours(4)
    write_lines(tmp_path / "in.jsonl", lines)
    arguments = ["in.jsonl", *SETTINGS, "--out", "run", "--format", kind]
    root = tmp_path / "run"
    assert batch(*arguments)[0] == 0
    before, first = stamps(root), contents(root)

    write_lines(tmp_path / "in.jsonl", [*lines[:3], {"prompt": "a white triangle"}])
    code, _, err = batch(*arguments)
    assert code == 1 and len(err.splitlines()) == 1
    assert "run belongs to another run: the input is another one (in.jsonl: 4 items, now 4)" in err
    assert "--force" in err
    assert (stamps(root), contents(root)) == (before, first)
    code, out, err = batch(*arguments, "--force")
    assert code == 0, err
    assert "3 of them were there" in out
    check_complete(root, 4)
    second = contents(root)
    assert [item for item in second if second[item] != first[item]] == ["000004"]
    assert open_batch(root)["000004"].info["prompt"] == "a white triangle"
    if kind == "folder":
        assert changed(before, stamps(root)) == {Path("items/0000/000004/run.json")}

    before = stamps(root)
    steps = [*arguments[:1], "--steps", "3", *arguments[3:]]
    code, _, err = batch(*steps)
    assert code == 1 and len(err.splitlines()) == 1
    assert "options {'num_inference_steps': 2} is now {'num_inference_steps': 3}" in err
    assert stamps(root) == before
    code, out, err = batch(*steps, "--force")
    assert code == 0, err
    assert "were there" not in out
    check_complete(root, 4)
    assert all(len(one.info["timesteps"]) == 3 for one in open_batch(root).values())
    before = stamps(root)
    code, out, _ = batch(*steps)
    assert code == 0 and "4 of them were there" in out
    assert stamps(root) == before


def test_other_weights_under_the_same_name_are_refused(batch, tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    write_lines(tmp_path / "in.jsonl", colours(4))
    arguments = ["in.jsonl", *SETTINGS, "--out", "run", "--model", "./model"]
    root = tmp_path / "run"
    assert batch(*arguments)[0] == 0
    before, first = stamps(root), contents(root)
    [path] = (tmp_path / "model/unet").glob("*.safetensors")
    weights = load_file(path)
    weights["conv_in.weight"].view(-1)[0] += 0.5
    save_file(weights, path, metadata={"format": "pt"})
    code, _, err = batch(*arguments)
    assert code == 1 and len(err.splitlines()) == 1
    assert "run belongs to another run: the model's weights or configuration" in err
    assert (stamps(root), contents(root)) == (before, first)
    code, out, err = batch(*arguments, "--force")
    assert code == 0, err
    assert "were there" not in out
    check_complete(root, 4)
    now = contents(root)
    assert all(now[item]["image.png"] != first[item]["image.png"] for item in first)
    assert changed(before, stamps(root)) == set(before)


def changed(before, after):
    return {path for path in before if after.get(path) != before[path]}


@pytest.mark.skipif(not LINUX, reason="stops a process")
def test_two_runs_in_one_folder(batch, tmp_path):
    write_lines(tmp_path / "in.jsonl", colours(20))
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    first = Fork("batch", *arguments, cwd=tmp_path)
    try:
        wait_until(lambda: whole(root) >= 3, first)
        first.send_signal(signal.SIGSTOP)  # alive, and no further
        number, before = whole(root), stamps(root)
        assert number < 20
        code, _, err = batch(*arguments)
        assert code == 1 and len(err.splitlines()) == 1
        who = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
        host = subprocess.run(["uname", "-n"], capture_output=True, text=True).stdout.strip()
        assert f"run is being written by another job: {who} on {host} (process {first.pid}" in err
        code, out, _ = batch("--status", "run")
        assert code == 0
        said = " ".join(out.split())
        assert f"{status(root).whole} items are whole, the input has 20" in said
        assert number - 2 <= status(root).whole <= number  # a row is noted once an item is whole
        assert f"running: {who} on {host} (process {first.pid}, since " in said
        assert stamps(root) == before
    finally:
        first.kill()
        first.communicate(timeout=60)
    code, out, _ = batch("--status", "run")
    assert code == 0 and "not running" in out
    code, out, err = batch(*arguments)
    assert code == 0, err
    assert f"{number} of them were there" in out
    assert before.items() <= stamps(root).items()
    check_complete(root, 20)


# Items and lines that cannot be drawn


BROKEN = {"prompt": "a red circle", "guidance_rescale": "much"}  # noticed in the pipeline only


def test_items_that_fail_never_stop_the_others(batch, tmp_path):
    lines = colours(9)
    for i in (2, 5, 6):
        lines[i] = {**BROKEN, "seed": 70 + i}
    write_lines(tmp_path / "in.jsonl", lines)
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    code, out, err = batch(*arguments)
    assert code == 1
    assert "6 of 9 items" in out and "3 failed, see errors.jsonl" in " ".join(out.split())
    assert verify(root) == (6, [])
    failed = rows(root / "errors.jsonl")
    assert [one["id"] for one in failed] == ["000003", "000006", "000007"]
    for one, line in zip(failed, (3, 6, 7), strict=True):
        assert (one["line"], one["seed"], one["prompt"]) == (line, 69 + line, "a red circle")
        assert one["options"] == {"guidance_rescale": "much"}
        assert one["reason"].startswith("TypeError: '>' not supported between")
        assert one["traceback"].startswith("Traceback") and "guidance_rescale" in one["traceback"]
    told = status(root)
    assert (told.items, told.whole, told.failed) == (9, 6, 3)

    before = stamps(root)
    code, out, _ = batch(*arguments)  # tries them again, and nothing else
    assert code == 1
    assert "6 of them were there" in out and "3 failed" in out
    assert rows(root / "errors.jsonl") == failed
    assert stamps(root) == before

    for i in (2, 5, 6):
        lines[i] = {**lines[i], "guidance_rescale": 0.5}
    write_lines(tmp_path / "in.jsonl", lines)
    code, out, err = batch(*arguments, "--force")
    assert code == 0, err
    assert before.items() <= stamps(root).items()
    check_complete(root, 9)


def test_too_many_items_that_fail_end_the_run(batch, tmp_path):
    write_lines(tmp_path / "in.jsonl", [*colours(2), *[BROKEN] * 8, *colours(6)])
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    code, _, err = batch(*arguments, "--max-errors", "2")
    assert code == 1
    assert "stopped early (2 item(s) have failed, which is --max-errors)" in err
    assert "the same command does the rest" in err
    failed = [one["id"] for one in rows(root / "errors.jsonl")]
    assert failed[:2] == ["000003", "000004"] and len(failed) <= 4
    number, problems = verify(root)
    assert number < 8 and problems == []
    assert batch(*arguments)[0] == 1
    assert verify(root) == (8, [])
    assert len(rows(root / "errors.jsonl")) == 8


def hostile(chance, unit):
    """A line that is no item: bytes without the line feed."""
    kind = chance.randrange(9)
    if kind == 0:
        text = ['{"prompt": "a cat"', "no JSON", '{"prompt": "a cat",}', "{'prompt': 'a cat'}"]
        return chance.choice([*text, "[1, 2", '{"prompt": "a" "cat"}', '{"a": 1} {']).encode()
    if kind == 1:
        return chance.choice(["5", '"a cat"', "null", "[]", '[{"prompt": "a cat"}]', "{}"]).encode()
    if kind == 2:
        prompts = [5, None, [], {}, True, 0.5, ["a cat"], "", " ", "\u3000\t", "\u00a0"]
        return json.dumps({"prompt": chance.choice(prompts)}).encode()
    if kind == 3:
        side = chance.choice(["width", "height"])
        values = ["NaN", "Infinity", "-Infinity", "1e400", "0", "-64", "64.0", '"64"', "true"]
        values += ["[64]", "{}", str(64 + chance.randrange(1, unit)), "1" * 200, "99999999"]
        return f'{{"prompt": "a cat", "{side}": {chance.choice(values)}}}'.encode()
    if kind == 4:
        ids = ["../evil", "a/b", "/tmp/evil", "..", ".", "", "a\0b", "x" * 5000, "🦊", "con", "a."]
        ids += ["../../sentinel/evil", "..\\evil", "~/evil", "$HOME", ".batch", "a\nb", "-rf", " a"]
        return json.dumps({"prompt": "a cat", "id": chance.choice([*ids, 1.5, ["a"], {}])}).encode()
    if kind == 5:
        return json.dumps({"prompt": "a cat", "id": chance.choice(["good-1", "GOOD-2"])}).encode()
    if kind == 6:
        wrong = [("seed", -1), ("seed", "1"), ("seed", 2**63), ("seed", 1.5), ("seed", True)]
        wrong += [("words", "cat"), ("words", []), ("words", [1]), ("words", ["unicorn"])]
        wrong += [("guidance_scale", "much"), ("negative_prompt", 5), ("num_inference_steps", 0)]
        wrong += [("num_inference_steps", 2000), ("num_images_per_prompt", 2), ("colour", "red")]
        wrong += [("generator", 1), ("output_type", "latent"), ("__class__", 1), ("a b", 1)]
        return json.dumps({"prompt": "a cat", **dict([chance.choice(wrong)])}).encode()
    if kind == 7:
        text = ["\\ud800", "\\udfff"]
        return f'{{"prompt": "a cat {chance.choice(text)}"}}'.encode()
    raw = [b'{"prompt": "a \xff cat"}', b'{"prompt": "a \0 cat"}', b"\x80\x81", b"\0" * 50]
    raw += [b'{"prompt": "a", "prompt": "b"}', b"[" * 5000, b'{"prompt": ' + b"[" * 100]
    return chance.choice([*raw, b'{"prompt": "a cat", "x": ' + b"[" * 30 + b"]" * 30 + b"}"])


GOOD = (
    {"id": "good-1", "prompt": "a red circle"},
    {"id": "good-2", "prompt": "a red circle 🦊 and emoji"},
    {"id": "good-3", "prompt": "a red circle and " + "x" * 5000},
    {"id": "good-4", "prompt": "../../evil \\ / \0".replace("\0", "'\"`$(touch evil)")},
    {"id": "good-5", "prompt": "a red circle", "words": ["red circle"]},
    {"id": "good-6", "prompt": "a red circle", "negative_prompt": "a blue square"},
    {"id": 7, "prompt": "ein roter Kreis, größer"},
    {"id": "a.b_c-d", "prompt": "a red circle", "seed": 2**63 - 1},
    {"id": "x" * 100, "prompt": "%s {0} \r \u2028 \u202e"},
    {"id": "good-10", "prompt": "a red circle", "num_inference_steps": 1, "guidance_scale": 1},
)


def hostile_input():
    """A thousand lines, ten of them good, some blank: the bytes and the numbers of the bad ones."""
    chance = random.Random(8)
    unit = size_unit(outline("demo"))
    good = sorted(chance.sample(range(2, 999), 7))
    places = {0: GOOD[0], 1: GOOD[1], 999: GOOD[2], **dict(zip(good, GOOD[3:], strict=True))}
    blank = set(chance.sample(sorted(set(range(1000)) - set(places)), 20))
    lines = []
    for i in range(1000):
        one = json.dumps(places[i], ensure_ascii=False).encode() if i in places else b" "
        lines.append(one if i in places or i in blank else hostile(chance, unit))
    bad = [i + 1 for i in range(1000) if i not in places and i not in blank]
    return b"\n".join(lines), bad


def test_a_thousand_hostile_lines(batch, tmp_path, monkeypatch):
    data, bad = hostile_input()
    assert len(bad) == 970
    home = tmp_path / "sentinel/home"
    home.mkdir(parents=True)
    (home / "in.jsonl").write_bytes(data)

    def listed():
        return {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}

    before = listed()
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    monkeypatch.chdir(home)
    code, _, err = batch(*arguments, "--strict")
    assert code == 1
    assert "Nothing was drawn, as --strict asks." in err.splitlines()[-1]
    assert told_lines(err) == bad
    assert listed() == before

    process = start(*arguments, cwd=home)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert told_lines(err) == bad
    assert "10 of 10 items" in out and "970 lines could not be read" in " ".join(out.split())
    root = home / "run"
    errors = rows(root / "errors.jsonl")
    assert [one["line"] for one in errors] == bad
    assert all(one["reason"] and len(one["text"]) <= 200 for one in errors)
    assert verify(root) == (10, [])
    assert sorted(open_batch(root)) == sorted(str(one["id"]) for one in GOOD)
    prompts = {item: one.info["prompt"] for item, one in open_batch(root).items()}
    assert prompts == {str(one["id"]): one["prompt"] for one in GOOD}
    inside = root.relative_to(tmp_path)
    outside = {path for path in listed() if inside not in (path, *path.parents)}
    assert outside == before


def told_lines(err):
    """The numbers of the lines that stderr tells of, and nothing else but sdattn's own lines."""
    assert all(line.startswith("sdattn: ") for line in err.splitlines())
    return [int(one) for one in re.findall(r"^sdattn: line (\d+): \S", err, re.MULTILINE)]


# Kinds of input


def test_every_kind_of_input_gives_the_same_items(batch, tmp_path, monkeypatch):
    prompts = ["a red circle", 'a "green" square, and a blue one', "größer 🦊"]
    (tmp_path / "in.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    lines = "".join(json.dumps({"prompt": one}) + "\n" for one in prompts)
    (tmp_path / "in.jsonl").write_text(lines)
    quoted = [one.replace('"', '""') for one in prompts]
    table = [f'{n + 1:06d},"{one}",{n}' for n, one in enumerate(quoted)]
    (tmp_path / "in.csv").write_text("\n".join(["id,prompt,seed", *table]), encoding="utf-8")

    def drawn(source, out):
        code, _, err = batch(source, *SETTINGS, "--out", out)
        assert code == 0, err
        assert verify(tmp_path / out) == (3, [])
        found = contents(tmp_path / out)
        for files in found.values():  # a CSV's first line is its header
            info = json.loads(files["run.json"])
            assert info.pop("line") in range(1, 5)
            del info["checksum"]  # which is of the line as well
            files["run.json"] = info
        return found

    expected = drawn("in.jsonl", "of-jsonl")
    assert [one["run.json"]["prompt"] for one in expected.values()] == prompts
    assert drawn("in.txt", "of-txt") == expected
    assert drawn("in.csv", "of-csv") == expected
    for name in ("in.jsonl", "in.txt"):
        piped = io.BytesIO((tmp_path / name).read_bytes())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped))
        assert drawn("-", f"piped-{name}") == expected
