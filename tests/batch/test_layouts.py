"""How the items of a batch run lie on the disk, in folders and in shards."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from batch_runs import FORMATS, new_run, pack, three
from safetensors import safe_open
from safetensors.torch import load, save

from sdattn.batch.folder import BatchFolder, layout_of
from sdattn.runs.drawings import PARTS


@pytest.fixture(params=FORMATS)
def layout(request, tmp_path):
    (tmp_path / "tmp").mkdir()
    settings = {"format": request.param, "shard_bytes": 10**9}
    return layout_of(settings, tmp_path, tmp_path / "tmp")


def add(layout, items):
    """Add items; returns those that were told to be whole, id to place."""
    told = {}

    def whole(item, place, files):
        assert item not in told
        assert files["run.json"] == items[item]["run.json"]
        told[item] = place

    for line, (item, files) in enumerate(items.items(), 1):
        layout.add(item, line, files, whole)
    layout.flush()
    return told


ALIKE = ("a", "a1", "a.b", "A-", "maps", "a" * 100)  # names of which one begins another


def test_bytes_come_back_as_they_were(layout):
    items = {name: pack(name, line, parts=PARTS) for line, name in enumerate(ALIKE, 1)}
    told = add(layout, items)
    assert dict(layout.find()) == told and told.keys() == items.keys()
    for item, place in told.items():
        assert layout.read(item, place) == items[item]
        names = ["run.json", "maps.safetensors", "none.png", "heatmaps/03-cat.png"]
        some = layout.read(item, place, names)
        assert some == {name: items[item][name] for name in names if name != "none.png"}
    assert not [*(layout.temporary).iterdir()]


def test_what_is_discarded_is_gone_and_nothing_else(layout):
    items = {name: pack(name, line) for line, name in enumerate("abcd", 1)}
    told = add(layout, items)
    layout.discard({"b": told["b"], "d": told["d"]})
    left = dict(layout.find())
    assert left.keys() == {"a", "c"}
    assert all(layout.read(item, place) == items[item] for item, place in left.items())
    layout.discard(left)
    assert [*layout.find()] == []
    assert not [*(layout.temporary).iterdir()]


def test_threads_that_add_at_once_lose_nothing(tmp_path, layout):
    items = {f"i{n}": {"run.json": b"%d" % n, "note.txt": bytes(range(n + 1))} for n in range(60)}
    layout.nbytes = 100  # many shards
    told = []
    with ThreadPoolExecutor(8) as pool:
        for item, files in items.items():
            pool.submit(layout.add, item, 1, files, lambda *whole: told.append(whole))
    layout.flush()
    assert sorted(item for item, _, _ in told) == sorted(items)
    assert dict(layout.find()) == {item: place for item, place, _ in told}
    for item, place, _ in told:
        assert layout.read(item, place) == items[item]
    assert not [*(layout.temporary).iterdir()]


def test_a_folder_holds_a_thousand_items_at_most(tmp_path):
    layout = layout_of({"format": "folder"}, tmp_path, tmp_path)
    places = []
    for line in (1, 999, 1000, 123_456):
        layout.add(f"i{line}", line, {"run.json": b""}, lambda *whole: places.append(whole[1]))
    assert places == [
        "items/0000/i1", "items/0000/i999", "items/0001/i1000", "items/0123/i123456",
    ]  # fmt: skip


def test_a_write_that_fails_leaves_nothing(tmp_path, layout):
    (tmp_path / "items").write_text("")  # in the way
    (tmp_path / "shards").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        add(layout, {"a": pack("a")})
    assert not [*(layout.temporary).iterdir()]


def test_shards_are_of_bounded_size_and_whole_only_when_written(tmp_path):
    items = {f"i{n}": pack(f"i{n}", n) for n in range(1, 8)}
    most = max(sum(map(len, files.values())) for files in items.values())
    layout = layout_of({"format": "shard", "shard_bytes": 2 * most + 1}, tmp_path, tmp_path)
    told = []
    for line, (item, files) in enumerate(items.items(), 1):
        layout.add(item, line, files, lambda *whole: told.append(whole[:2]))
        assert len(told) == line // 3 * 3
    layout.flush()
    shards = [*(tmp_path / "shards").iterdir()]
    assert len(shards) == len({place for _, place in told}) == 3
    assert all(shard.stat().st_size <= 3 * most + 10_000 for shard in shards)
    assert [item for item, _ in told] == [*items]
    layout.flush()
    assert len(told) == 7


def test_any_reader_of_safetensors_reads_a_shard(tmp_path):
    files = pack("a.b")
    root = new_run(tmp_path / "run", {"a.b": files, "c": pack("c", 2)}, format="shard")
    [shard] = (root / "shards").iterdir()
    with safe_open(shard, framework="pt") as file:
        names = {name for name in file.keys() if name.startswith("a.b/")}  # noqa: SIM118
        assert {"a.b/maps/down.a", "a.b/maps/up.b", "a.b/image.png", "a.b/run.json"} <= names
        expected = load(files["maps.safetensors"])
        for name, maps in expected.items():
            found = file.get_tensor(f"a.b/maps/{name}")
            assert found.dtype == torch.float16 and torch.equal(found, maps)
        image = file.get_tensor("a.b/image.png").numpy().tobytes()
        assert image == files["image.png"]


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_broken_shard_holds_nothing(tmp_path, cut):
    root = new_run(tmp_path / "run", three(), format="shard", shard_bytes=1)
    shard = sorted((root / "shards").iterdir())[0]
    shard.write_bytes(shard.read_bytes()[:cut])
    foreign = root / "shards" / "foreign.safetensors"
    foreign.write_bytes(save({"weight": torch.zeros(3)}))
    assert len([*BatchFolder(root).layout.find()]) == 2
