"""`sdattn batch` killed and told to stop: nothing is ever lost.

Real processes, and real launchers where they matter; the demo model on the CPU at two steps.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from helpers.demo_batches import (  # noqa: F401
    LINUX,
    SETTINGS,
    call_batch,
    check_complete,
    colours,
    contents,
    rows,
    stamps,
    wait_until,
    whole,
    write_lines,
)
from helpers.forks import Fork, two_ranks
from helpers.tiers import tiered

from sdattn.batch.reading import open_batch, verify
from sdattn.batch.storage.folder import BatchFolder

pytestmark = pytest.mark.slow  # many processes

# --cpu would start one process only, whatever --num_processes says (accelerate 1.15).
LAUNCH = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
LAUNCH += ["--dynamo_backend", "no", "--main_process_port", "0", "-m", "sdattn", "batch"]
KILLED_ITEMS = 48
MOMENTS = ("starting", "loading", "drawing", "writing")


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


@pytest.mark.weekly
@pytest.mark.skipif(not LINUX, reason="forks processes")
@pytest.mark.parametrize(("kind", "killed"), [("folder", (0, 1)), ("webdataset", (1,))])
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


@pytest.mark.skipif(not LINUX, reason="forks processes")
def test_a_process_draws_what_a_killed_one_left_undone(tmp_path, undisturbed):
    """Where nothing ends it, as a launcher does with the others."""
    number = KILLED_ITEMS // 3
    write_lines(tmp_path / "in.jsonl", colours(number))
    arguments = ["batch", "in.jsonl", *SETTINGS, "--out", "run", "--format", "webdataset"]
    root = tmp_path / "run"
    arguments += ["--shard-mb", "1"]
    ranks = [Fork(*arguments, cwd=tmp_path, variables=one) for one in two_ranks()]
    wait_for_moment("writing", root, ranks[1], 3, random.Random(1))
    ranks[1].kill()
    out, err = ranks[0].communicate(timeout=120)
    assert ranks[0].returncode == 0, err
    assert "process 1 of 2 has ended too soon; the others draw what is missing" in err
    assert f"{number} of {number} items" in " ".join(out.split())
    check_complete(root, number)
    found = contents(root)
    both = found.keys() & undisturbed
    assert both and all(found[item] == undisturbed[item] for item in both)


@pytest.mark.skipif(os.name == "nt", reason="sends signals")
@pytest.mark.parametrize(
    ("name", "code", "kind"),
    tiered([("SIGINT", 130, "folder"), ("SIGTERM", 143, "webdataset")], quick=0, daily=1),
)
def test_a_signal_finishes_what_is_in_hand(batch, tmp_path, name, code, kind):
    write_lines(tmp_path / "in.jsonl", colours(12))
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
    assert 0 < number < 12 and problems == []
    assert f"run/: {number} of 12 items" in out
    assert [row["id"] for row in rows(root / "metadata.jsonl")] == sorted(open_batch(root))
    before = stamps(root)
    again, out, err = batch(*arguments)
    assert again == 0, err
    assert f"{number} of them were there" in out
    assert before.items() <= stamps(root).items()
    check_complete(root, 12)


def ranks_of(launcher):
    """Process ids of the ranks that a launcher has begun."""
    try:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        found = [(int(one), Path(f"/proc/{one}/cmdline").read_bytes()) for one in children]
    except OSError:  # ended meanwhile
        return []
    return [pid for pid, command in found if b"sdattn" in command and b"launch" not in command]


@pytest.mark.weekly
@pytest.mark.skipif(not LINUX, reason="finds processes in /proc")
def test_a_launcher_whose_rank_is_killed_ends_the_other_and_keeps_what_they_finished(
    batch, tmp_path
):
    write_lines(tmp_path / "in.jsonl", colours(20))
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    launcher = Fork(*LAUNCH, *arguments, cwd=tmp_path, of="accelerate-launch")
    wait_until(lambda: whole(root) >= 4, launcher)
    ranks = ranks_of(launcher)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert "SIGTERM: finishing the items in hand" in err
    number, problems = verify(root)
    # it may have been killed while it wrote an item, or between the item and its row
    killed = ("has no row; the next run adds it", ": unfinished, in ")
    problems = [one for one in problems if not any(found in one for found in killed)]
    assert 4 <= number < 20 and problems == [], err
    check_the_rest(batch, root, arguments)


@pytest.mark.weekly
@pytest.mark.skipif(os.name == "nt", reason="sends signals")
def test_ranks_that_a_launcher_tells_to_end_keep_what_they_finished(batch, tmp_path):
    """Which it does when it is told to end itself: each gets SIGTERM."""
    write_lines(tmp_path / "in.jsonl", colours(20))
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    ranks = [Fork("batch", *arguments, cwd=tmp_path, variables=one) for one in two_ranks()]
    wait_until(lambda: whole(root) >= 4, ranks[0])
    for one in ranks:
        one.terminate()
    said = [one.communicate(timeout=60)[1] for one in ranks]
    assert ranks[0].returncode == 143 and ranks[1].returncode in (0, 143), said
    assert any("SIGTERM: finishing the items in hand" in err for err in said)
    assert not any("Traceback" in err for err in said), said
    number, problems = verify(root)
    assert 4 <= number < 20 and problems == [], said
    check_the_rest(batch, root, arguments)


def check_the_rest(batch, root, arguments):
    """The same command does it, and leaves what is there."""
    before = stamps(root)
    code, _, err = batch(*arguments)
    assert code == 0, err
    assert before.items() <= stamps(root).items()
    check_complete(root, 20)
