"""How the items of a batch run lie on a disk and in a bucket, in folders and in shards."""

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
from helpers.batch_runs import FORMATS, new_run, pack, three
from helpers.storages import memory_bucket, quick_waits  # noqa: F401

from sdattn.batch.storage.bucket import Bucket
from sdattn.batch.storage.disk import Disk
from sdattn.batch.storage.folder import BatchFolder
from sdattn.batch.storage.formats import layout_of
from sdattn.runs.parts import PARTS


@pytest.fixture(params=[Disk, Bucket])
def storage(request, tmp_path, memory):
    return Disk(tmp_path) if request.param is Disk else Bucket(memory)


@pytest.fixture(params=FORMATS)
def layout(request, storage):
    return layout_of(request.param, storage, 10**9)


def add(layout, items):
    """Add items; returns those that were told to be whole, id to place."""
    told = {}

    def whole(item, location, files):
        assert item not in told
        assert files["run.json"] == items[item]["run.json"]
        told[item] = location

    for line, (item, files) in enumerate(items.items(), 1):
        layout.add(item, line, files, whole)
    layout.flush()
    return told


ALIKE = ("a", "a1", "a.b", "A-", "maps", "a" * 100)  # names of which one begins another


def test_bytes_come_back_as_they_were(layout):
    items = {name: pack(name, line, parts=PARTS) for line, name in enumerate(ALIKE, 1)}
    told = add(layout, items)
    assert dict(layout.find()) == told and told.keys() == items.keys()
    for item, location in told.items():
        assert layout.read(item, location) == items[item]
        names = ["run.json", "maps.safetensors", "none.png", "heatmaps/03-cat.png"]
        some = layout.read(item, location, names)
        assert some == {name: items[item][name] for name in names if name != "none.png"}
    assert not [*layout.storage.listing(".batch/tmp")]


def test_what_is_discarded_is_gone_and_nothing_else(layout):
    items = {name: pack(name, line) for line, name in enumerate("abcd", 1)}
    told = add(layout, items)
    layout.discard({"b": told["b"], "d": told["d"]})
    left = dict(layout.find())
    assert left.keys() == {"a", "c"}
    assert all(layout.read(item, location) == items[item] for item, location in left.items())
    layout.discard(left)
    assert [*layout.find()] == []
    assert not [*layout.storage.listing(".batch/tmp")]


def test_threads_that_add_at_once_lose_nothing(layout):
    items = {f"i{n}": {"run.json": b"%d" % n, "note.txt": bytes(range(n + 1))} for n in range(60)}
    layout.nbytes = 100  # many shards
    told = []
    with ThreadPoolExecutor(8) as pool:
        for item, files in items.items():
            pool.submit(layout.add, item, 1, files, lambda *whole: told.append(whole))
    layout.flush()
    assert sorted(item for item, _, _ in told) == sorted(items)
    assert dict(layout.find()) == {item: location for item, location, _ in told}
    for item, location, _ in told:
        assert layout.read(item, location) == items[item]
    assert not [*layout.storage.listing(".batch/tmp")]


def test_a_folder_holds_a_thousand_items_at_most(storage):
    layout = layout_of("folder", storage)
    locations = []
    for line in (1, 999, 1000, 123_456):
        layout.add(f"i{line}", line, {"run.json": b""}, lambda *whole: locations.append(whole[1]))
    assert locations == [
        "items/0000/i1", "items/0000/i999", "items/0001/i1000", "items/0123/i123456",
    ]  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_a_write_that_fails_leaves_nothing(tmp_path, format):
    layout = layout_of(format, Disk(tmp_path))
    (tmp_path / "items").write_text("")  # in the way
    (tmp_path / "shards").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        add(layout, {"a": pack("a")})
    assert not [*layout.storage.listing(".batch/tmp")]


def test_shards_are_of_bounded_size_and_whole_only_when_written(storage):
    items = {f"i{n}": pack(f"i{n}", n) for n in range(1, 8)}
    most = max(sum(map(len, files.values())) for files in items.values())
    layout = layout_of("webdataset", storage, 2 * most + 1)
    told = []
    for line, (item, files) in enumerate(items.items(), 1):
        layout.add(item, line, files, lambda *whole: told.append(whole[:2]))
        assert len(told) == line // 3 * 3
    layout.flush()
    shards = storage.listing("shards")
    assert len(shards) == len({location for _, location in told}) == 3
    assert all(size <= 3 * most + 40_000 for size in shards.values())
    assert [item for item, _ in told] == [*items]
    layout.flush()
    assert len(told) == 7


def test_any_reader_of_tar_reads_a_shard(tmp_path):
    files = pack("a.b", parts=PARTS)
    root = new_run(tmp_path / "run", {"c": pack("c", 2), "a.b": files}, format="webdataset")
    [shard] = (root / "shards").iterdir()
    with tarfile.open(shard) as tar:
        members = tar.getmembers()
        found = {one.name: tar.extractfile(one).read() for one in members}
    short = {"image.png": "png", "run.json": "json"}
    assert {n: d for n, d in found.items() if n.startswith("a%2Eb.")} == {
        f"a%2Eb.{short.get(name, name.replace('/', '.'))}": data for name, data in files.items()
    }
    assert {"c.png", "c.json", "c.maps.safetensors", "a%2Eb.heatmaps.03-cat.png"} <= found.keys()
    keys = [name.partition(".")[0] for name in found]
    assert keys == sorted(keys)  # an item's files are neighbours
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {
        (0, 0, 0, "", "", 0o644)
    }


def test_the_same_items_make_the_same_shard_in_whatever_order(tmp_path):
    shards = []
    for order in ("abc", "cab"):
        items = {name: dict(reversed(pack(name, "abc".index(name) + 1).items())) for name in order}
        root = new_run(tmp_path / order, items, format="webdataset")
        [shard] = (root / "shards").iterdir()
        shards.append((shard.name, shard.read_bytes()))
    assert shards[0] == shards[1]
    assert shards[0][0] == f"{sha256(shards[0][1]).hexdigest()[:16]}.tar"


@pytest.mark.parametrize("cut", [0, 4, 700, -512, -1])
def test_a_broken_shard_holds_nothing(tmp_path, cut):
    root = new_run(tmp_path / "run", three(), format="webdataset", shard_bytes=1)
    shard = sorted((root / "shards").iterdir())[0]
    shard.write_bytes(shard.read_bytes()[:cut])
    (root / "shards" / "foreign.tar").write_bytes(tar_of("photo.jpg", "photo.txt"))
    assert len([*BatchFolder(root).layout.find()]) == 2
    assert len([*BatchFolder(root).layout.broken()]) == 2


LINK = tarfile.TarInfo("a.json")
LINK.type, LINK.linkname = tarfile.SYMTYPE, "/etc/passwd"


@pytest.mark.parametrize("strange", ["link", "a/b.png", "noending", "../a.png"])
def test_a_tar_that_no_run_made_holds_nothing(tmp_path, strange):
    layout = layout_of("webdataset", Disk(tmp_path), 1)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/0.tar").write_bytes(
        tar_of("a.json", LINK if strange == "link" else strange)
    )
    assert [*layout.find()] == [] and len([*layout.broken()]) == 1


def tar_of(*members):
    """A tar of empty files, or of these members."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for one in members:
            tar.addfile(tarfile.TarInfo(one) if isinstance(one, str) else one)
    return made.getvalue()
