"""The records of shards: sealed, the only truth, and rows in the order of the list."""

import json
import random

import pytest
from helpers.batch_runs import manifest, new_run, pack, row_for, three

from sdattn.batch.records import (
    ShardFile,
    ShardRecord,
    line_of,
    read_heads,
    read_manifest,
    read_record,
    read_records,
    record_name,
    rows_in_order,
    sound_record,
)
from sdattn.files.place import Place
from sdattn.files.writing import sha256

ROWS = [row_for(pack("a"), "shards/000000/a-abcdef")]
FAILED = {"id": "b", "line": 2, "prompt": "a dog", "seed": 2}
FAILED |= {"failed": "RuntimeError: boom", "traceback": "…"}


SHEET = {"name": "shards/000000-123456.webp", "bytes": 9, "sha256": "cd" * 32}
HEAD_ENTRIES = ("shard", "fingerprint", "data", "sheet", "whole", "failed", "nbytes")
ROW_ENTRIES = ("id", "line", "prompt", "seed", "width", "height", "words", "statistics")
ROW_ENTRIES += ("place", "run_sha256", "files")
DEEP = b"[" * 100_000 + b"]" * 100_000


def record(number=0, rows=(*ROWS, FAILED)):
    data = ShardFile("shards/000000-abcdef.tar", 100, "ab" * 32)
    return ShardRecord(
        number, "of the shard", data, ShardFile("shards/000000-123456.webp", 9, "cd" * 32), rows
    )


def test_a_record_is_read_as_it_was_written(tmp_path):
    place = Place(tmp_path)
    assert read_record(place, 0) is None
    place.publish(record_name(0), record().packed())
    found = read_record(place, 0)
    assert (found.number, found.fingerprint) == (0, "of the shard")
    assert (found.data, found.sheet) == (record().data, record().sheet)
    assert (found.whole, found.failed) == (ROWS, [FAILED])
    [head] = read_heads(place, manifest(shards=1))
    assert (head.whole, head.failed, head.nbytes) == (len(ROWS), 1, 109)
    assert found.packed() == record().packed()


def test_no_flipped_bit_and_no_cut_goes_unnoticed(tmp_path):
    place, data, chance = Place(tmp_path), record().packed(), random.Random(3)
    harms = [data[:end] for end in range(len(data))]
    for _ in range(300):
        harmed = bytearray(data)
        harmed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        harms.append(bytes(harmed))
    for harmed in harms:
        (tmp_path / "shards").mkdir(exist_ok=True)
        (tmp_path / record_name(0)).write_bytes(harmed)
        with pytest.raises(ValueError, match="is not what was written"):
            read_record(place, 0)
        assert sound_record(place, 0, manifest().input.shards[0]) is None


def test_rows_come_in_the_order_of_the_list_whatever_their_shapes():
    """Shards are numbered by their first items, and overlap if there are several shapes."""
    chance = random.Random(5)
    shapes = [chance.randrange(3) for _ in range(200)]
    open_shards, shards = {}, []
    for line, shape in enumerate(shapes, 1):
        if len(open_shards.get(shape, ())) in (0, 7):
            open_shards[shape] = []
            shards.append(open_shards[shape])
        open_shards[shape].append({"id": str(line), "line": line})
    found = rows_in_order(iter(ShardRecord(n, "f", None, None, s) for n, s in enumerate(shards)))
    assert [row["line"] for row in found] == [*range(1, 201)]


def test_records_that_are_missing_or_damaged_are_passed_over(tmp_path):
    place = Place(tmp_path)
    for number in range(40):
        place.publish(record_name(number), record(number).packed())
    (tmp_path / record_name(7)).unlink()
    (tmp_path / record_name(9)).write_bytes(b"{}\n{}\n")
    made = manifest(shards=40)
    made.input.shards[11] = "another"
    assert [found.number for found in read_records(place, made)] == [
        n for n in range(40) if n not in (7, 9, 11)
    ]


def test_batch_json_is_read_as_it_was_written_or_refused(tmp_path):
    root = new_run(tmp_path / "run", three(), columns=["Category"])
    place = Place(root)
    assert read_manifest(place).input.columns == ["Category"]
    document = json.loads((root / "batch.json").read_bytes())
    document["input"]["items"] = 4
    (root / "batch.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="its own checksum differs"):
        read_manifest(place)
    (root / "batch.json").unlink()
    with pytest.raises(FileNotFoundError, match="is not a batch run's folder"):
        read_manifest(place)
    with pytest.raises(FileNotFoundError, match="There is no folder .*nothere"):
        read_manifest(Place(tmp_path / "nothere"))


@pytest.mark.parametrize(
    ("line", "harm", "told"),
    [
        *((0, name, f"{name!r} is missing") for name in HEAD_ENTRIES),
        *((0, {name: 7}, "other numbers than the rest") for name in ("whole", "failed", "nbytes")),
        *((1, name, f"{name!r} is missing") for name in ROW_ENTRIES),
        *((2, name, f"{name!r} is missing") for name in ("prompt", "traceback")),
        (0, {"data": {"name": "x"}}, "'data.bytes' is missing"),
        (0, {"sheet": {**SHEET, "etag": "x"}}, "etag"),
        (0, {"shard": 1}, "the record of shard 1"),
        *((1, {"line": wrong}, "'line' is") for wrong in ("1", None, 1.5)),
        (1, {"files": [{"name": "x"}]}, r"'files\[0\].bytes' is missing"),
        (1, {"statistics": [{"word": "x"}]}, r"'statistics\[0\].peak' is missing"),
        (2, {"failed": None}, "'failed' is null"),
        *((line, wrong, "not of this version") for line in (0, 1) for wrong in (b"[]", DEEP)),
    ],
)
def test_a_sealed_record_with_wrong_entries_is_refused_by_name(tmp_path, line, harm, told):
    lines = record().packed().splitlines(keepends=True)[:-1]
    found = json.loads(lines[line])
    if isinstance(harm, str):
        del found[harm]
    elif isinstance(harm, dict):
        found |= harm
    lines[line] = harm + b"\n" if isinstance(harm, bytes) else line_of(found)
    data = b"".join(lines)
    place = Place(tmp_path)
    place.publish(record_name(0), data + line_of({"seal": sha256(data)}))
    with pytest.raises(ValueError, match=f"000000.jsonl is .*{told}"):
        read_record(place, 0)
    assert sound_record(place, 0, manifest().input.shards[0]) is None
