"""A run's files, on a disk and in a storage: whole or not at all, and never outside."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.storages import empty, faulty, quick_waits  # noqa: F401

from sdattn.files import place as module
from sdattn.files.place import Place

FILES = {"run.json": b"{}", "image.png": b"image", "heatmaps/01-cat.png": b"cat"}


@pytest.fixture(params=["disk", "storage"])
def place(request, tmp_path, quick):
    if request.param == "disk":
        yield Place(tmp_path / "run")
        return
    with empty("memory://bucket/run") as root:
        yield Place(str(root))


def names(place):
    return [*place.files(deep=True)]


def test_what_is_published_is_read_back(place):
    place.begin()
    place.publish("shards/000001.jsonl", [b"one\n", b"two\n"])
    place.publish("batch.json", b"{}")
    place.publish("batch.json", b"[]")
    place.publish_folder("shards/000000/a-1b2c3d", FILES, last="run.json")
    assert place.read("shards/000001.jsonl") == b"one\ntwo\n"
    assert place.read("batch.json") == b"[]"
    item = {f"shards/000000/a-1b2c3d/{name}" for name in FILES}
    assert {*names(place)} == {"batch.json", "shards/000001.jsonl", *item}
    assert {
        n: file.size for n, file in place.files("shards/000000/a-1b2c3d", deep=True).items()
    } == {name: len(data) for name, data in FILES.items()}
    assert place.local("batch.json").read_bytes() == b"[]"
    place.remove("shards/000000")
    assert {*names(place)} == {"batch.json", "shards/000001.jsonl"}
    place.remove("shards/000000")  # which is gone


@pytest.mark.parametrize("links", [True, False])
def test_of_several_that_create_a_file_at_once_one_does(place, monkeypatch, links):
    """Also on a disk that has no hard links."""

    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    place.begin()
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda n: place.create("batch.json", b"%d" % n), range(8))]
    assert found.count(True) == 1
    assert place.read("batch.json") == b"%d" % found.index(True)
    assert not place.create("batch.json", b"another") and names(place) == ["batch.json"]


def test_times_are_seconds_since_1970(place):
    import time

    before = time.time()
    place.publish("a", b"a")
    assert before - 2 <= place.files()["a"].time <= time.time() + 2


@pytest.mark.parametrize("name", ["../a", "/a", "b/../../a", "C:/a", "a\0"])
def test_names_that_lead_out_are_refused(place, name):
    for call in (place.read, place.remove, place.local, lambda n: place.publish(n, b"")):
        with pytest.raises(ValueError, match="not inside"):
            call(name)


def test_links_in_a_run_are_not_followed(tmp_path):
    place = Place(tmp_path / "run")
    place.publish("batch.json", b"{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(b"a")
    (tmp_path / "run" / "shards").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        place.publish("shards/a", b"b")
    assert (tmp_path / "elsewhere" / "a").read_bytes() == b"a"
    assert [*place.files(deep=True)] == ["batch.json", "shards"]


def test_a_folder_that_is_there_is_kept(tmp_path):
    """Another process published it: its name says that it is the same."""
    place = Place(tmp_path / "run")
    place.publish_folder("shards/000000/a-1b2c3d", FILES, last="run.json")
    others = dict.fromkeys(FILES, b"other")
    place.publish_folder("shards/000000/a-1b2c3d", others, last="run.json")
    for name, data in FILES.items():
        assert place.read(f"shards/000000/a-1b2c3d/{name}") == data
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["shards"]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    place = Place(tmp_path / "run")
    place.publish("a", b"before")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "flush", full)
    monkeypatch.setattr(module, "flush_tree", full)
    for call in (
        lambda: place.publish("a", b"after"),
        lambda: place.publish_folder("b", FILES, last="run.json"),
    ):
        with pytest.raises(OSError, match="The disk of .*run is full") as raised:
            call()
        assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "run") == ["a"] and place.read("a") == b"before"


def test_a_folder_that_cannot_get_its_name_is_told_if_none_is_there(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="run") as raised:
        Place(tmp_path / "run").publish_folder("a", FILES, last="run.json")
    assert raised.value.errno == errno.EACCES
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.parametrize("last", FILES)
def test_in_a_storage_the_last_file_comes_last(quick, last):
    with empty("memory://bucket/run") as root:
        order = []

        def note(own, path, *args, **options):
            order.append(path)
            return own(path, *args, **options)

        place = Place(str(root))
        place.root = faulty(root, pipe_file=note)
        place.publish_folder("shards/000000/a-1b2c3d", FILES, last=last)
        assert len(order) == len(FILES) and order[-1].endswith(f"a-1b2c3d/{last}")


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match=r"has no batch.json, but notes.txt. Choose another"):
        Place(tmp_path).begin()
    with pytest.raises(OSError, match="is a file"):
        Place(tmp_path / "notes.txt").begin()
