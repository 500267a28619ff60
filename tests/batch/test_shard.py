"""`draw_shard` is a pure function: the same shard has the same bytes, wherever and whenever."""

import json
from dataclasses import replace

import pytest
from helpers.batch_draws import ALL, SMALL, watch_models  # noqa: F401
from helpers.batch_runs import FORMATS, manifest
from helpers.trees import tree

from sdattn import load_pipeline
from sdattn.batch import Request
from sdattn.batch import shard as module
from sdattn.batch.drawing import BatchDrawer
from sdattn.batch.formats import format_of
from sdattn.batch.plan import make_plan
from sdattn.batch.records import read_record, record_name
from sdattn.batch.run import manifest_of
from sdattn.batch.shard import describe, draw_shard, forget_pipeline, load
from sdattn.files.place import Place
from sdattn.loading.options import LoadingOptions


@pytest.fixture(autouse=True)
def fresh_pipeline():
    forget_pipeline()
    yield
    forget_pipeline()


@pytest.fixture
def drawn(model, tmp_path, tiny_pipe):
    """Draw shard 0 of some lines into a folder of tmp_path."""

    def draw(out, rows=ALL[:4], *, tell=None, **request):
        source = tmp_path / "in.jsonl"
        rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        usual = {"batch_size": 2, "shard_items": 16, "options": SMALL, "device": "cpu"}
        usual["save"] = ("image", "maps")
        request = Request(source, tmp_path / out, model=str(model), **{**usual, **request})
        with make_plan(request, tiny_pipe) as plan:
            manifest = manifest_of(request, describe(request), plan)
            return draw_shard(request, manifest, plan.shard(0), tell)

    return draw


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_shard_has_the_same_bytes_in_another_folder(drawn, tmp_path, format):
    one, other = drawn("one", format=format), drawn("other", format=format)
    assert one == other and one.whole
    assert tree(tmp_path / "one") == tree(tmp_path / "other") != {}


def test_a_shard_whose_record_is_there_is_not_drawn(drawn, watched):
    first = drawn("run")
    calls, told = len(watched.rows), []
    assert drawn("run", tell=lambda *n: told.append(n)) == first and len(watched.rows) == calls
    assert told == [(4, 0)]


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_shard_without_its_thumbnails_is_drawn_again(drawn, tmp_path, harm):
    drawn("run")
    before = tree(tmp_path / "run")
    [sheet] = (tmp_path / "run" / "shards").glob("*.webp")
    harm(sheet)
    drawn("run")
    assert tree(tmp_path / "run") == before


def test_a_model_that_is_loaded_in_another_way_is_another(model, tmp_path):
    request = Request(tmp_path / "in.jsonl", tmp_path / "out", model=str(model), device="cpu")
    first = load(request)
    assert load(replace(request, out=tmp_path / "other")) is first
    name = "EulerDiscreteScheduler"
    other = load(replace(request, loading=LoadingOptions(scheduler=name)))
    found = [type(one.pipe.scheduler).__name__ for one in (first, other)]
    assert found[1] == name != found[0]


@pytest.mark.parametrize("name", ["weights", "dtype", "video_format"])
def test_a_worker_with_another_model_is_refused(drawn, tmp_path, monkeypatch, name):
    """Another machine's copy of the model: its items would be another run's."""
    own, calls = module.describe, []

    def describe(request):
        calls.append(request)
        return own(request)._replace(**{name: "another"})

    monkeypatch.setattr(module, "describe", describe)
    with pytest.raises(ValueError, match=f"has {name} another, the run .*all machines"):
        drawn("run")
    assert calls and not (tmp_path / "run" / record_name(0)).exists()


@pytest.mark.parametrize("format", FORMATS)
def test_an_attempt_that_was_killed_leaves_nothing_in_the_way(drawn, tmp_path, watched, format):
    """Items in folders are kept; the bytes are those of an undisturbed run in every case."""
    drawn("undisturbed", format=format)
    calls = len(watched.rows)
    drawn("run", format=format)
    (tmp_path / "run" / record_name(0)).unlink()
    for path in (tmp_path / "run/shards").glob("*.webp"):
        path.unlink()
    kept = [*(tmp_path / "run/shards").glob("000000/00000[12]-*/run.json")]
    for path in (tmp_path / "run/shards").glob("000000/000003-*/run.json"):
        path.unlink()  # of an item that was being written to a storage
    before = [path.stat().st_mtime_ns for path in kept]
    drawn("run", format=format)
    assert tree(tmp_path / "run") == tree(tmp_path / "undisturbed")
    assert [path.stat().st_mtime_ns for path in kept] == before
    # batches of two items; one that lacks an item is drawn whole, with the same noise
    assert (len(kept), len(watched.rows) - calls) == ((2, 3) if format == "folder" else (0, 4))


def test_failures_are_rows_with_a_reason_and_a_traceback(drawn, tmp_path, watched, tiny_pipe):
    watched.forbidden = tiny_pipe.tokenizer("dog").input_ids[1]
    told = []
    record = drawn("run", ("a cat", "a red dog", "red", "a cat"), tell=lambda *n: told.append(n))
    assert [row["id"] for row in record.whole] == ["000001", "000003", "000004"]
    [failed] = record.failed
    assert (failed["id"], failed["line"], failed["prompt"]) == ("000002", 2, "a red dog")
    assert failed["failed"] == "RuntimeError: boom: the encoder cannot read this"
    assert "check_text" in failed["traceback"] and "\n" in failed["traceback"]
    assert told == [(1, 0), (0, 1), (1, 0), (1, 0)]
    assert read_record(Place(tmp_path / "run"), 0) == record


def test_memory_that_is_short_halves_the_batch_the_same_way_each_time(drawn, tmp_path, watched):
    watched.most = 2
    for out in ("one", "other"):
        start = len(watched.rows)
        assert len(drawn(out, ALL[:7], batch_size=6).whole) == 7
        # 6 fail, 3 fail, 2 and 1, 2 and 1; then the last item
        assert watched.rows[start:] == [6, 3, 2, 1, 2, 1, 1]
        forget_pipeline()
    assert tree(tmp_path / "one") == tree(tmp_path / "other")


def test_an_item_that_cannot_be_packed_fails_alone(drawn, monkeypatch):
    pack = module.pack_with_page

    def broken(run, *args):
        if run.settings.id == "000002":
            raise ValueError("not\nfinite")
        return pack(run, *args)

    monkeypatch.setattr(module, "pack_with_page", broken)
    record = drawn("run")
    assert [row["id"] for row in record.failed] == ["000002"]
    assert record.failed[0]["failed"] == "ValueError: not finite"


@pytest.mark.parametrize("when", ["packed", "drawn"])
def test_a_disk_that_fails_is_no_items_failure(drawn, tmp_path, monkeypatch, when):
    def full(*_):
        raise OSError(28, "No space left on device")

    if when == "packed":  # videos are written to a temporary file
        monkeypatch.setattr(module, "pack_with_page", full)
    else:
        monkeypatch.setattr(BatchDrawer, "_draw_together", full)
    with pytest.raises(OSError, match="No space left"):
        drawn("run")
    assert not (tmp_path / "run" / record_name(0)).exists()


def test_a_disk_that_fails_raises_and_records_nothing(drawn, tmp_path, monkeypatch):
    publish = Place.publish

    def full(self, name, parts):
        if name.endswith(".webp"):
            raise OSError(28, "No space left on device")
        publish(self, name, parts)

    monkeypatch.setattr(Place, "publish", full)
    with pytest.raises(OSError, match="No space left"):
        drawn("run")
    assert not (tmp_path / "run" / record_name(0)).exists()
    monkeypatch.undo()
    drawn("other"), drawn("run")
    assert tree(tmp_path / "run") == tree(tmp_path / "other")


@pytest.mark.parametrize("format", FORMATS)
def test_on_another_kind_of_card_the_last_record_wins_and_both_are_true(
    drawn, tmp_path, monkeypatch, format
):
    """Two attempts whose bytes differ a little, at the same time: no file of one is the other's."""

    def other_card(*args, **options):
        pipe = load_pipeline(*args, **options)
        pipe.unet.conv_in.bias.data += 0.01
        return pipe

    monkeypatch.setattr(module, "digest_model", lambda pipe: "the same on both")
    first = drawn("run", format=format)
    (tmp_path / "run" / record_name(0)).unlink()
    forget_pipeline()
    monkeypatch.setattr(module, "whole_items", lambda *_: {})  # else the other's would be kept
    monkeypatch.setattr(module, "load_pipeline", other_card)
    second = drawn("run", format=format)
    assert [row["run_sha256"] for row in first.rows] != [row["run_sha256"] for row in second.rows]
    for record in (first, second):  # each record's files are all there
        assert format_of(Place(tmp_path / "run"), manifest(format=format)).is_there(record)
