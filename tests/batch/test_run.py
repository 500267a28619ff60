"""`run_batch` from the first line to the last file: resuming, refusing, stopping, retrying."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.batch_draws import ALL, SMALL, draw, watch_models  # noqa: F401
from helpers.batch_runs import FORMATS, rows_of
from helpers.tiers import tiered
from helpers.trees import tree

from sdattn.batch import Request, checking, open_batch, run_batch, status, verify
from sdattn.batch import run as module
from sdattn.batch.engines import worker_devices
from sdattn.batch.records import read_manifest, read_record
from sdattn.batch.request import Outcome, part_of_environment
from sdattn.batch.run import forecast
from sdattn.files.place import Place

EIGHT = [{"prompt": text, "id": f"i{n}"} for n, text in enumerate(ALL)]


def drawn_files(root):
    """The run's files, but for batch.json, which names the list."""
    return {name: data for name, data in tree(root).items() if name != "batch.json"}


def records(root):
    return sorted(root.glob("shards/*.jsonl"))


def test_a_run_has_its_items_in_the_order_of_the_list_and_again_draws_nothing(
    model, tmp_path, watched
):
    outcome = draw(model, tmp_path / "run", EIGHT)
    assert (outcome.items, outcome.before, outcome.whole, outcome.failed) == (8, 0, 8, 0)
    assert outcome.exit_code == 0
    ids = [f"i{n}" for n in range(8)]
    assert [row["id"] for row in rows_of(tmp_path / "run/metadata.jsonl")] == ids
    batch = open_batch(tmp_path / "run")
    assert [*batch] == ids
    assert [batch[at].settings.id for at in (0, 5, -1)] == ["i0", "i5", "i7"]
    for beyond in (8, -9):
        with pytest.raises(KeyError, match="0 to 7"):
            batch[beyond]
    page = batch._repr_html_()
    assert page.count("<img") == 8 and all(name in page for name in ids)
    assert verify(tmp_path / "run") == (8, [])
    files, calls = tree(tmp_path / "run"), len(watched.rows)
    outcome = draw(model, tmp_path / "run", EIGHT)
    assert (outcome.before, outcome.whole, len(watched.rows)) == (8, 8, calls)
    assert tree(tmp_path / "run") == files


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_missing_is_drawn_and_the_rest_kept(model, tmp_path, watched, format):
    draw(model, tmp_path / "run", EIGHT, format=format)
    files = tree(tmp_path / "run")
    first, second, *_ = records(tmp_path / "run")
    first.unlink()
    data = read_record(Place(tmp_path / "run"), 1).data
    if data is not None:
        (tmp_path / "run" / data.name).unlink()
    else:
        second.unlink()
    calls = len(watched.rows)
    draw(model, tmp_path / "run", EIGHT, format=format)
    assert tree(tmp_path / "run") == files
    assert calls <= len(watched.rows) < 2 * calls


def test_parts_in_folders_of_their_own_are_merged_by_copying(model, tmp_path):
    draw(model, tmp_path / "run", EIGHT)
    for part in (1, 2):
        draw(model, tmp_path / f"part-{part}", EIGHT, part=(part, 2))
    shutil.copytree(tmp_path / "part-2", tmp_path / "part-1", dirs_exist_ok=True)
    assert draw(model, tmp_path / "part-1", EIGHT).before == 8
    assert drawn_files(tmp_path / "part-1") == drawn_files(tmp_path / "run")


OTHER_RUNS = {  # why a folder is refused, and what was asked of it
    "format folder is now webdataset": {"format": "webdataset", "batch_size": 1},
    "the input is another one": {"options": {**SMALL, "num_inference_steps": 2}},
    "save image, maps is now image": {"save": ("image",)},
    "shard_items the default is now 3": {"shard_items": 3},
    "items as before, but other texts, seeds or options": {"seed": 5},
}


def test_another_runs_folder_is_refused(model, tmp_path):
    draw(model, tmp_path / "run", EIGHT[:4])
    files = tree(tmp_path / "run")
    for reason, changes in OTHER_RUNS.items():
        with pytest.raises(ValueError, match="belongs to another run: .*Choose another") as refused:
            draw(model, tmp_path / "run", EIGHT[:4], **changes)
        assert reason in str(refused.value)
        assert tree(tmp_path / "run") == files


@pytest.mark.parametrize("reason", tiered(OTHER_RUNS))
def test_force_changes_another_runs_folder(model, tmp_path, reason):
    changes = OTHER_RUNS[reason]
    draw(model, tmp_path / "run", EIGHT[:4])
    draw(model, tmp_path / "run", EIGHT[:4], force=True, **changes)
    draw(model, tmp_path / "other", EIGHT[:4], **changes)
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (0, 0))
    assert verify(tmp_path / "run") == (4, [])
    draw(model, tmp_path / "run", EIGHT[:4], **changes)  # removes what no record names
    assert drawn_files(tmp_path / "run") == drawn_files(tmp_path / "other")


@pytest.mark.parametrize("format", tiered(FORMATS))
def test_a_run_goes_on_after_a_limit(model, tmp_path, watched, format):
    """The same bytes as without one; it draws only the shards that it needs."""
    draw(model, tmp_path / "run", EIGHT, format=format)
    calls = len(watched.rows)
    some = draw(model, tmp_path / "some", EIGHT, format=format, limit=3)
    assert (some.items, some.whole, some.exit_code) == (4, 4, 0)
    assert len(open_batch(tmp_path / "some")) == 4
    found = status(tmp_path / "some")
    assert (found.items, found.whole, found.shards, found.done) == (8, 4, 4, 2)
    rest = draw(model, tmp_path / "some", EIGHT, format=format)
    assert (rest.before, rest.whole, len(watched.rows)) == (4, 8, 2 * calls)
    assert drawn_files(tmp_path / "some") == drawn_files(tmp_path / "run")


def test_of_two_inputs_at_once_in_a_new_folder_one_is_refused(model, tmp_path):
    """Before, the last to write batch.json had it, and the run was a mix of two."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in EIGHT))
    usual = {"options": SMALL, "device": "cpu", "save": ("image",), "shard_items": 1}
    requests = [Request(source, tmp_path / "run", str(model), seed=n, **usual) for n in (0, 100)]

    def end(request):
        try:
            return run_batch(request).whole
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        ends = sorted(pool.map(end, requests), key=lambda found: isinstance(found, str))
    assert ends[0] == 8 and "belongs to another run: the input" in ends[1]
    seeds = [row["seed"] for row in rows_of(tmp_path / "run/metadata.jsonl")]
    assert seeds in ([*range(8)], [*range(100, 108)])
    assert verify(tmp_path / "run") == (8, [])


def test_a_run_that_another_command_changes_says_so_and_is_not_mixed(model, tmp_path, monkeypatch):
    """With ``force``, while the first one draws."""
    other = draw(model, tmp_path / "other", EIGHT[:4], seed=100)
    manifest = (tmp_path / "other/batch.json").read_bytes()
    add = module.Progress.add

    def change(self, whole, failed):
        (tmp_path / "run/batch.json").write_bytes(manifest)
        add(self, whole, failed)

    with monkeypatch.context() as patch:
        patch.setattr(module.Progress, "add", change)
        with pytest.raises(ValueError, match="Another command has changed it meanwhile"):
            draw(model, tmp_path / "run", EIGHT[:4])
    assert status(tmp_path / "run").whole == len(open_batch(tmp_path / "run")) == 0
    assert "000000.jsonl is of another run" in verify(tmp_path / "run")[1][0]
    assert draw(model, tmp_path / "run", EIGHT[:4], seed=100).whole == other.whole
    assert verify(tmp_path / "run") == (4, [])


def test_a_kill_before_bad_lines_are_written_is_no_end(model, tmp_path, monkeypatch):
    publish = Place.publish

    def full(self, name, parts):
        if name == "bad_lines.jsonl":
            raise OSError(28, "No space left on device")
        publish(self, name, parts)

    rows = [*EIGHT[:2], {"prompt": 5}]
    with monkeypatch.context() as patch:
        patch.setattr(Place, "publish", full)
        with pytest.raises(OSError, match="same command does the rest"):
            draw(model, tmp_path / "run", rows)
    assert draw(model, tmp_path / "run", rows).whole == 2
    assert verify(tmp_path / "run") == (2, [])


@pytest.mark.parametrize("format", FORMATS)
def test_an_item_in_anothers_place_is_not_read_as_the_other(model, tmp_path, format):
    draw(model, tmp_path / "run", EIGHT[:2], format=format)
    if format == "folder":
        first, second = sorted((tmp_path / "run/shards/000000").iterdir())
        first.rename(tmp_path / "kept"), second.rename(first), (tmp_path / "kept").rename(second)
    else:
        [tar] = (tmp_path / "run/shards").glob("*.tar")
        swapped = tar.read_bytes().replace(b"i0.", b"xx.").replace(b"i1.", b"i0.")
        tar.write_bytes(swapped.replace(b"xx.", b"i1."))
    for name in ("i0", "i1"):
        with pytest.raises(ValueError, match=f"does not hold '{name}'|cannot be read"):
            open_batch(tmp_path / "run")[name]


def test_lines_that_are_added_leave_full_shards_as_they_are(model, tmp_path, watched):
    same = [{"prompt": "a cat", "id": f"i{n}"} for n in range(6)]
    draw(model, tmp_path / "run", same[:4], shard_items=2)
    before = [path.read_bytes() for path in records(tmp_path / "run")]
    calls = len(watched.rows)
    outcome = draw(model, tmp_path / "run", same, shard_items=2, force=True)
    assert (outcome.before, outcome.whole, len(watched.rows) - calls) == (4, 6, 1)
    assert [path.read_bytes() for path in records(tmp_path / "run")][:2] == before
    draw(model, tmp_path / "run", same[:2], shard_items=2, force=True)
    assert len(records(tmp_path / "run")) == 1 and len(open_batch(tmp_path / "run")) == 2


@pytest.mark.parametrize("format", tiered(FORMATS))
def test_failed_items_stay_failed_until_they_are_retried_and_the_others_are_kept(
    model, tmp_path, watched, tiny_pipe, format
):
    watched.forbidden = tiny_pipe.tokenizer("and").input_ids[1]
    outcome = draw(model, tmp_path / "run", EIGHT, format=format)
    assert (outcome.whole, outcome.failed, outcome.exit_code) == (6, 2, 1)
    rows = rows_of(tmp_path / "run/errors.jsonl")
    assert [row["id"] for row in rows] == ["i2", "i7"]
    assert all("boom" in row["failed"] and "Traceback" in row["traceback"] for row in rows)
    watched.forbidden = None
    watched.rows.clear()
    assert draw(model, tmp_path / "run", EIGHT, format=format).failed == 2
    assert watched.rows == []
    outcome = draw(model, tmp_path / "run", EIGHT, format=format, retry_failed=True)
    assert (outcome.whole, outcome.failed) == (8, 0)
    assert sum(watched.rows) == 4  # batches without a failure are not drawn again
    assert rows_of(tmp_path / "run/errors.jsonl") == []
    assert verify(tmp_path / "run") == (8, [])


@pytest.mark.parametrize("format", tiered(FORMATS))
def test_what_a_new_record_replaces_goes_at_once(model, tmp_path, watched, tiny_pipe, format):
    """Else a pattern like shards/*.tar finds items twice, or such as are no longer in the list."""

    def check(*ids):
        """Compare what is there with what the records name."""
        place = Place(tmp_path / "run")
        there = {f"shards/{name}" for name in place.files("shards", deep=True)}
        named = {name for name in there if name.endswith(".jsonl")}
        for number in range(len(named)):
            places = read_record(place, number).places
            named |= {name for name in there if name.startswith(tuple(places))}
        assert there == named
        assert [*open_batch(tmp_path / "run")] == [*ids]

    watched.forbidden = tiny_pipe.tokenizer("and").input_ids[1]
    draw(model, tmp_path / "run", EIGHT[1:4], format=format)
    watched.forbidden = None
    draw(model, tmp_path / "run", EIGHT[1:4], format=format, retry_failed=True)
    check("i1", "i2", "i3")
    draw(model, tmp_path / "run", EIGHT[1:5], format=format, force=True)
    check("i1", "i2", "i3", "i4")
    draw(model, tmp_path / "run", EIGHT[1:5], format=format, force=True, seed=9)
    check("i1", "i2", "i3", "i4")
    draw(model, tmp_path / "run", EIGHT[4:5], format=format, force=True)
    check("i4")
    assert verify(tmp_path / "run") == (1, [])


def test_so_many_failures_end_the_run(model, tmp_path, watched, tiny_pipe):
    watched.forbidden = tiny_pipe.tokenizer("cat").input_ids[1]
    rows = [{"prompt": "a cat"} for _ in range(40)]
    outcome = draw(model, tmp_path / "run", rows, shard_items=2, max_errors=4)
    assert outcome.failed < 20
    assert outcome.stopped.endswith("item(s) have failed, as many as `max_errors` allows")
    assert outcome.exit_code == 1


def test_bad_lines_are_named_and_listed(model, tmp_path, capsys):
    rows = [*EIGHT[:2], {"prompt": 5}, {"prompt": "a cat", "widht": 64}]
    outcome = draw(model, tmp_path / "run", rows)
    assert (outcome.whole, outcome.bad_lines, outcome.exit_code) == (2, 2, 1)
    listed = rows_of(tmp_path / "run/bad_lines.jsonl")
    assert [row["line"] for row in listed] == [3, 4]
    told = capsys.readouterr().err
    assert "line 3: prompt=5" in told and "line 4:" in told and "widht" in told
    with pytest.raises(ValueError, match="Nothing was drawn"):
        draw(model, tmp_path / "strict", rows, strict=True)
    assert not (tmp_path / "strict").exists()
    with pytest.raises(ValueError, match="None of 2 lines can be drawn: prompt=5"):
        draw(model, tmp_path / "none", [{"prompt": 5}] * 2)


def test_a_table_of_all_words_is_those_of_the_items_maps(model, tmp_path):
    draw(model, tmp_path / "run", ["cat cat", "a red dog"])
    batch = open_batch(tmp_path / "run")
    table = batch.to_dataframe()
    assert [*table.word] == ["cat", "cat", "a", "red", "dog"]
    assert [*table.occurrence] == [0, 1, 0, 0, 0]
    assert [*table.id] == [*batch][:1] * 2 + [*batch][1:] * 3
    for name, words in table.groupby("id"):
        heatmaps = batch[name].heatmaps
        for row in words.itertuples():
            own = heatmaps.find(row.word)[row.occurrence].values.double()
            expected = float(own.max()), float(own.mean())
            assert (row.peak, row.mean) == pytest.approx(expected, rel=1e-4)


def test_a_forecast_writes_nothing(model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": "a cat"}) + "\n" for _ in range(24)))
    usual = {"options": SMALL, "device": "cpu", "save": ("image", "maps"), "batch_size": 2}
    for format in FORMATS:
        request = Request(source, tmp_path / format, model=str(model), format=format, **usual)
        found = forecast(request)
        assert not (tmp_path / format).exists()
        assert (found.items, found.shards, found.bad_lines) == (24, 12, 0)
        assert found.seconds > 0
        run_batch(request)
        made = tree(tmp_path / format)
        assert abs(found.files - len(made)) <= 2
        data = sum(len(held) for name, held in made.items() if ".jsonl" not in name)
        assert 0.8 * data < found.nbytes < 1.1 * data


def test_a_forecast_of_what_cannot_be_drawn_says_so(model, tmp_path, watched, tiny_pipe):
    watched.forbidden = tiny_pipe.tokenizer("dog").input_ids[1]
    source = tmp_path / "in.txt"
    source.write_text("a dog\n")
    usual = {"options": SMALL, "device": "cpu"}
    with pytest.raises(RuntimeError, match="000001, 'a dog', cannot be drawn: .*boom"):
        forecast(Request(source, tmp_path / "run", model=str(model), **usual))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_finishes_the_shards_in_hand(model, tmp_path, monkeypatch, name):
    rows = [{"prompt": "a cat"} for _ in range(12)]
    add = module.Progress.add

    def once(self, whole, failed):
        if not self.whole:
            os.kill(os.getpid(), getattr(signal, name))
        add(self, whole, failed)

    monkeypatch.setattr(module.Progress, "add", once)
    before = signal.getsignal(getattr(signal, name))
    outcome = draw(model, tmp_path / "run", rows, shard_items=2)
    assert signal.getsignal(getattr(signal, name)) is before
    assert outcome.stopped == name and 0 < outcome.whole < 12
    assert outcome.exit_code == {"SIGINT": 130, "SIGTERM": 143}[name]
    monkeypatch.undo()
    assert draw(model, tmp_path / "run", rows, shard_items=2).whole == 12
    assert verify(tmp_path / "run") == (12, [])


@pytest.mark.parametrize("launched", [None, "LOCAL_RANK", "SLURM_JOB_ID"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_ends_at_once_but_an_echo_does_not(monkeypatch, launched, name):
    """A launcher repeats within seconds what its processes already got."""
    for variable in ("LOCAL_RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    if launched:
        monkeypatch.setenv(launched, "0")
    number, ended = getattr(signal, name), []
    before = signal.getsignal(number)
    with module._Stops() as stops:
        signal.raise_signal(number)
        monkeypatch.setattr(signal, "raise_signal", ended.append)
        for seconds, ends in ((0, False), (0.3, not launched), (4, True)):
            stops._first -= seconds
            os.kill(os.getpid(), number)
            assert bool(ended) == ends
            signal.signal(number, stops._hear)
    assert stops.reason == name and {*ended} == {number}
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("format", tiered(FORMATS))
def test_two_commands_at_once_in_one_folder_end_well_and_with_equal_bytes(model, tmp_path, format):
    """As threads, so that they meet; in processes with kills each week, see test_killed."""
    usual = {"options": SMALL, "device": "cpu", "save": ("image", "maps"), "batch_size": 2}
    draw(model, tmp_path / "alone", EIGHT, format=format)
    source = tmp_path / "alone.jsonl"
    request = Request(source, tmp_path / "both", str(model), format=format, **usual)
    with ThreadPoolExecutor(2) as pool:
        outcomes = [*pool.map(run_batch, [request] * 2)]
    assert [outcome.whole for outcome in outcomes] == [8, 8]
    assert drawn_files(tmp_path / "both") == drawn_files(tmp_path / "alone")


def test_summaries_have_every_record_whoever_ends_last(model, tmp_path, monkeypatch):
    """Another command publishes a record while this one writes its summaries."""
    draw(model, tmp_path / "run", EIGHT)
    last = records(tmp_path / "run")[-1]
    data = last.read_bytes()
    last.unlink()
    write, place = checking._summaries, Place(tmp_path / "run")

    def meanwhile(*args):
        yield from write(*args)
        if not last.exists():
            last.write_bytes(data)

    monkeypatch.setattr(checking, "_summaries", meanwhile)
    checking.write_summaries(place, checking.read_manifest(place))
    assert len(rows_of(tmp_path / "run/metadata.jsonl")) == 8


@pytest.mark.parametrize("changes", [{}, {"retry_failed": True}])
def test_the_last_part_to_end_writes_the_summaries(model, tmp_path, monkeypatch, changes, capsys):
    """The others neither write them nor read the records of all."""
    calls = []
    write = checking.write_summaries
    monkeypatch.setattr(module, "write_summaries", lambda *args: calls.append(args) or write(*args))
    for which in (2, 1, 3):
        outcome = draw(model, tmp_path / "run", EIGHT, part=(which, 3), **changes)
        assert outcome.exit_code == 0
        is_last = which == 3
        assert len(calls) == is_last == (tmp_path / "run/index.html").is_file()
        said = capsys.readouterr().err
        assert ("shards that are not drawn yet: " in said) != is_last
    assert verify(tmp_path / "run") == (8, [])
    records(tmp_path / "run")[0].unlink()  # part 1 is lost after all
    draw(model, tmp_path / "run", EIGHT, part=(2, 3))
    assert len(calls) == 1
    checking.summarize(tmp_path / "run")
    listed = [row["id"] for row in rows_of(tmp_path / "run/metadata.jsonl")]
    assert listed == [*open_batch(tmp_path / "run")] and 0 < len(listed) < 8


def test_a_part_that_ended_does_not_follow_the_records_of_others(model, tmp_path, monkeypatch):
    """Another part publishes a record whenever this one has written a file."""
    draw(model, tmp_path / "run", EIGHT)
    written = []
    publish = Place.publish

    def meanwhile(place, name, parts):
        publish(place, name, parts)
        written.append(name)
        os.utime(records(tmp_path / "run")[0], (1000 + len(written),) * 2)

    monkeypatch.setattr(Place, "publish", meanwhile)
    checking.write_summaries(Place(tmp_path / "run"), read_manifest(Place(tmp_path / "run")))
    assert written == 2 * ["metadata.jsonl", "errors.jsonl", "index.html"]


def test_status_is_read_from_the_records_alone(model, tmp_path):
    rows = [{"prompt": "a cat", "id": f"i{n}"} for n in range(8)]
    draw(model, tmp_path / "run", rows, shard_items=2)
    os.utime(tmp_path / "run/batch.json", (900, 900))
    for number, path in enumerate(records(tmp_path / "run")):
        os.utime(path, (1000 + 10 * number, 1000 + 10 * number))
    (tmp_path / "run/shards/000003.jsonl").unlink()
    found = status(tmp_path / "run")
    assert (found.items, found.whole, found.failed, found.began) == (8, 6, 0, 900)
    assert (found.shards, found.done) == (4, 3)
    files = tree(tmp_path / "run/shards").items()
    data = [held for name, held in files if name[:6] != "000003" and name[-6:] != ".jsonl"]
    assert found.nbytes == sum(map(len, data))
    assert found.rate == pytest.approx(4 / 20)  # after the first shard
    assert found.seconds_left == pytest.approx(10)


def test_status_tells_how_many_items_lack_a_word(model, tmp_path, monkeypatch):
    rows = [{"prompt": "a cat and a dog"}, {"prompt": "a cat"}, {"prompt": "a dog and a red cat"}]
    monkeypatch.setattr("sdattn.maps.arrival.WEAK", 1e9)  # but a single word is never weak
    draw(model, tmp_path / "run", rows)
    found = [row["missing"] for row in rows_of(tmp_path / "run/metadata.jsonl")]
    assert [sorted(words) for words in found] == [["cat", "dog"], [], ["cat", "dog"]]
    assert status(tmp_path / "run").missing == 2


def test_status_counts_what_texts_cannot_disturb(model, tmp_path, watched, tiny_pipe):
    """It does not parse the rows, whose texts may look like their keys."""
    watched.forbidden = tiny_pipe.tokenizer("dog").input_ids[1]
    hostile = 'a cat "failed": "no", "bytes": 7, \\"failed\\": 1 \r\u2028'
    rows = [{"prompt": hostile}, {"prompt": f"a dog {hostile}"}, {"prompt": "a cat"}]
    for format in FORMATS:
        root = tmp_path / format
        draw(model, root, rows, format=format, shard_items=2, batch_size=1)
        found = status(root)
        assert (found.whole, found.failed, found.done) == (2, 1, 2)
        files = [path for path in (root / "shards").rglob("*.*") if path.suffix != ".jsonl"]
        assert found.nbytes == sum(path.stat().st_size for path in files if path.is_file())
        first, second = records(root)
        first.write_bytes(first.read_bytes()[:-9])
        second.write_bytes(b"{}\n")
        assert (status(root).done, status(root).whole) == (0, 0)


# Requests


def array(job, jobs, step=1):
    """What SLURM tells a job of an array."""
    told = f"TASK_ID={job} TASK_COUNT={len(jobs)} TASK_MIN={jobs[0]} TASK_MAX={jobs[-1]}"
    return f"{told} TASK_STEP={step}"


def as_variables(text):
    pairs = (variable.split("=") for variable in text.split())
    return {name.replace("TASK", "SLURM_ARRAY_TASK"): value for name, value in pairs}


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ("", None),
        ("RANK=0 WORLD_SIZE=1", None),
        ("RANK=3 WORLD_SIZE=4", (4, 4)),
        ("RANK=3", None),
        (array(5, [5]), None),
        (array(1, range(1, 9)), (1, 8)),
        (array(7, [1, 3, 5, 7], step=2), (4, 4)),
        (array(8, [3, 8], step=5), (2, 2)),
        (array(1, [0, 1]) + " RANK=1 WORLD_SIZE=4", (6, 8)),  # each rank of each job is a part
    ],
)
def test_the_part_of_a_launcher(variables, part):
    assert part_of_environment(as_variables(variables)) == part


@pytest.mark.parametrize(
    "jobs", [[1, 3, 4], [3, 7], [2, 3, 5, 8], [0, 2], [1, 2, 3, 9], [1, 3, 5, 8], [1, 2, 4, 7]]
)
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_no_array_leaves_a_part_to_nobody_in_silence(jobs, step):
    """Each job is refused, or those that are not draw different parts."""
    parts = []
    for job in jobs:
        try:
            parts.append(part_of_environment(as_variables(array(job, jobs, step))))
        except ValueError:
            parts.append(None)
    is_regular = jobs == [*range(jobs[0], jobs[-1] + 1, step)]
    assert (None in parts) != is_regular
    assert {of for part in parts if part for of in part[1:]} <= {len(jobs)}


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ("TASK_ID=3", "SLURM_ARRAY_TASK_COUNT='' is not a number"),
        (array(2, [1, 2]).replace("MIN=1", "MIN="), "TASK_MIN='' is not a number"),
        (array("two", [1, 2]), "TASK_ID='two' is not a number"),
        (array(3, [1, 3, 4]), "Write --array=1-3: .*pass `part`"),
        (array(9, range(1, 9)), "job 9 cannot know which part"),
        (array(0, range(1, 9)), "job 0 cannot know which part"),
        (array(1, [1, 2], step=0), "cannot know which part"),
        ("RANK=4 WORLD_SIZE=4", "RANK=4 is none of WORLD_SIZE=4"),
        ("RANK=-1 WORLD_SIZE=4", "RANK='-1' is not a number"),
        ("RANK=0 WORLD_SIZE=0", "RANK=0 is none of WORLD_SIZE=0"),
        ("RANK= WORLD_SIZE=4", "RANK='' is not a number"),
    ],
)
def test_variables_that_tell_no_part_are_refused_before_anything_is_loaded(
    monkeypatch, variables, reason
):
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        part_of_environment(as_variables(variables))
    for name, text in as_variables(variables).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=reason):
        Request("in.txt", "run").check()
    Request("in.txt", "run", part=(1, 2)).check()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *((changes, "either `source`") for changes in ({"photos": "p"}, {"source": None})),
        *(({"save": value}, "save") for value in ((), "image")),
        ({"save": ("imgae",)}, "Did you mean 'image'"),
        ({"mask_words": ("cat",)}, "add masks to `save`"),
        ({"mask_threshold": 1.5, "save": ("masks",)}, "threshold"),
        ({"device": "cuda:0", "workers": 2}, "device"),
        *(({name: 0}, name) for name in ("batch_size", "shard_items", "limit", "max_errors")),
        *(({name: "zip"}, name) for name in ("engine", "format", "input_format", "workers")),
        ({"part": (3, 2)}, "part"),
        ({"out": ""}, "out"),
    ],
)
def test_invalid_requests_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        Request(**{"source": "in.txt", "out": "run", **options}).check()


def test_workers_on_a_cpu_are_as_many_as_asked_for():
    request = {"source": "in.txt", "out": "run", "device": "cpu"}
    assert worker_devices(Request(**request)) == ["cpu"]
    assert worker_devices(Request(**request, workers=3)) == ["cpu"] * 3


def test_an_outcome_says_its_exit_code():
    usual = {"items": 2, "before": 0, "whole": 2, "failed": 0, "bad_lines": 0, "stopped": None}
    assert Outcome(**usual, seconds=1).exit_code == 0
    for changes, code in (
        ({"failed": 1, "whole": 1}, 1),
        ({"bad_lines": 1}, 1),
        ({"stopped": "SIGTERM"}, 143),
        ({"stopped": "max_errors"}, 1),
    ):
        assert Outcome(**usual | changes, seconds=1).exit_code == code
