"""The formats: the same items in each, to the byte, and names that carry checksums."""

import hashlib
import json
import shutil
import tarfile

import pytest
from helpers.batch_runs import FORMATS, manifest, new_run, pack, publish_shard, three
from helpers.trees import tree

from sdattn.batch import open_batch
from sdattn.batch.formats import FORMATS as KNOWN
from sdattn.batch.formats import format_of, whole_items
from sdattn.batch.records import read_record
from sdattn.files.place import Place

each_format = pytest.mark.parametrize("name", FORMATS)
DOTTED = "a.b-c.1"


def test_every_format_is_tested():
    assert tuple(KNOWN) == FORMATS


def written(root, name, items):
    place, made = Place(root), manifest(format=name, save=["image", "overlays", "maps"])
    return format_of(place, made), publish_shard(place, made, 3, items)


@each_format
def test_an_items_files_come_back_to_the_byte(tmp_path, name):
    items = {"a": pack("a"), DOTTED: pack(DOTTED, 2)}
    format, record = written(tmp_path, name, items)
    for row in record.rows:
        location = row["place"]
        assert location.startswith("shards/000003")
        assert format.read(location, row["id"]) == items[row["id"]]
        some = format.read(location, row["id"], ["run.json", "heatmaps/02-red.png", "gone.png"])
        assert some == {n: items[row["id"]][n] for n in ("run.json", "heatmaps/02-red.png")}
        assert format.read(location, row["id"], ["maps.safetensors"]).keys() == {"maps.safetensors"}
    location = record.rows[0]["place"]
    with pytest.raises(FileNotFoundError):
        format.read("shards/gone-123456.tar" if format.ending else "shards/000003/gone-1", "gone")
    if format.ending:
        with pytest.raises(FileNotFoundError, match="holds no item 'c'"):
            format.read(location, "c")


@each_format
def test_the_same_items_make_the_same_files(tmp_path, name):
    for folder in ("one", "other"):
        written(tmp_path / folder, name, {"a": pack("a"), "b": pack("b", 2)})
    assert tree(tmp_path / "one") == tree(tmp_path / "other")
    written(tmp_path / "third", name, {"a": pack("a"), "b": pack("b", 4)})
    assert tree(tmp_path / "one").keys() != tree(tmp_path / "third").keys()


@each_format
def test_names_carry_the_checksum_of_what_they_name(tmp_path, name):
    format, record = written(tmp_path, name, {"a": pack("a")})
    if format.ending is None:
        [row] = record.rows
        expected = hashlib.sha256(pack("a")["run.json"]).hexdigest()
        assert record.data is None and row["place"] == f"shards/000003/a-{expected[:6]}"
        return
    data = (tmp_path / record.data.name).read_bytes()
    assert record.data.sha256 == hashlib.sha256(data).hexdigest()
    assert record.data.name == f"shards/000003-{record.data.sha256[:6]}{format.ending}"
    assert record.data.bytes == len(data)


def test_a_tar_is_what_webdataset_reads(tmp_path):
    _, record = written(tmp_path, "webdataset", {DOTTED: pack(DOTTED)})
    with tarfile.open(tmp_path / record.data.name) as tar:
        members = tar.getmembers()
    assert all(member.name.startswith("a%2Eb-c%2E1.") for member in members)
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}


@each_format
def test_what_is_damaged_is_an_error_not_an_item(tmp_path, name):
    format, record = written(tmp_path, name, {"a": pack("a"), "b": pack("b", 2)})
    [path] = [p for p in tmp_path.rglob("*") if p.suffix == ".tar"] or [
        tmp_path / record.rows[0]["place"] / "run.json"
    ]
    path.write_bytes(path.read_bytes()[:100])
    if name == "folder":
        assert whole_items(format, 3, record, {"a": "of-a", "b": "of-b"}).keys() == {"b"}
        assert not path.parent.exists()  # its name is needed
    else:
        with pytest.raises((ValueError, FileNotFoundError)):
            format.read(record.data.name, "a")


@each_format
def test_whole_items_are_those_with_the_right_fingerprint(tmp_path, name):
    format, record = written(tmp_path, name, {"a": pack("a"), "b": pack("b", 2)})
    assert whole_items(format, 3, record, {"a": "of-a", "b": "another"}) == {"a": pack("a")}
    assert whole_items(format, 3, record, {}) == {}
    without = whole_items(format, 3, None, {"a": "of-a", "b": "of-b"})
    assert without.keys() == ({"a", "b"} if name == "folder" else set())


@each_format
def test_data_that_is_gone_or_cut_is_seen(tmp_path, name):
    root = new_run(tmp_path / "run", three(), format=name)
    place = Place(root)
    format = format_of(place, manifest(format=name))
    record = read_record(place, 0)
    assert format.is_there(record)
    path = root / record.data.name if record.data else root / record.rows[0]["place"] / "image.png"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert not format.is_there(record)
    path.write_bytes(data)
    assert format.is_there(record)
    if record.data is None:
        shutil.rmtree(path.parent)
    else:
        path.unlink()
    assert not format.is_there(record)


def test_a_format_of_another_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match="of the format 'zip', and this version reads folder"):
        format_of(Place(tmp_path), manifest(format="zip"))


def test_an_unfinished_file_has_no_name(tmp_path):
    place, made = Place(tmp_path), manifest(format="webdataset")
    with pytest.raises(KeyboardInterrupt):
        with format_of(place, made).writer(0) as writer:
            writer.add("a", pack("a"))
            raise KeyboardInterrupt
    assert tree(tmp_path) == {}


@each_format
def test_a_shard_of_failures_has_no_data(tmp_path, name):
    with format_of(Place(tmp_path), manifest(format=name)).writer(0) as writer:
        assert writer.finish() == (None, {})
    assert tree(tmp_path) == {}


def test_a_row_names_its_masks_and_its_image(tmp_path):
    _, record = written(tmp_path, "folder", {"a": pack("a", parts=("image", "maps", "masks"))})
    [row] = record.rows
    assert row["file_name"] == f"{row['place']}/image.png"
    assert row["masks"] == [
        f"{row['place']}/masks/0{n}-{w}.png" for n, w in ((1, "a"), (2, "red"), (3, "cat"))
    ]
    assert json.loads(json.dumps(row)) == row


def test_a_tar_is_searched_once_for_all_its_items_and_again_if_it_is_another(tmp_path, monkeypatch):
    """Or a run's check takes a time that grows with the square of its shards' items."""
    opened = []
    begin = tarfile.open

    def counted(*args, **options):
        opened.append(args[0])
        return begin(*args, **options)

    root = new_run(tmp_path / "run", three(), format="webdataset")
    held = open_batch(root)
    monkeypatch.setattr(tarfile, "open", counted)
    for _ in range(3):
        assert all(held[item].settings.id == item for item in "abc")
    assert len(opened) == len({*opened}) == 2  # two shards
    tar = next((root / "shards").glob("000001-*.tar"))
    tar.write_bytes(next((root / "shards").glob("000000-*.tar")).read_bytes())
    with pytest.raises(FileNotFoundError, match="holds no item 'c'"):
        held["c"]
    assert len(opened) == 3
