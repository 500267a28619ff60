"""Objects in a storage, and addresses that are refused."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import fsspec
import pytest
from helpers.storages import faulty, memory_run  # noqa: F401

from sdattn.files import addresses
from sdattn.files.addresses import Address, path_of

fsspec_registry = sys.modules["fsspec.registry"]  # fsspec.registry is a mapping in it


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(addresses, "_WAITS", (0, 0))


@pytest.mark.parametrize("where", ["run", "/tmp/a:b", "C:/run", "a/s3:/x", "s3:", "x:y"])
def test_a_path_is_a_path(where):
    assert path_of(where) == Path(where)
    assert path_of(Path(where)) == Path(where)


def test_an_address_is_one_also_as_a_path():
    for where in ("memory://bucket/run", "memory:///bucket/run/", Path("memory://bucket/run")):
        place = path_of(where)
        assert str(place) == "memory://bucket/run" and place.name == "run"
        assert place == path_of(place) and len({place, path_of(place)}) == 1
    assert [str(up) for up in place.parents] == ["memory://bucket"]
    assert place != Address(place.files, place.path, "s3")
    assert path_of("file:///tmp/run") == Path("/tmp/run")


def below(root):
    return {name: size for name, (size, _) in root.listing(deep=True).items()}


def test_objects_are_read_and_written_as_files_are(root):
    assert not root.exists() and [*root.iterdir()] == [] and below(root) == {}
    (root / "a" / "b.txt").write_bytes(b"one")
    (root / "c").write_bytes(b"twothree")
    assert root.is_dir() and not root.is_file() and root.exists()
    assert [found.name for found in root.iterdir()] == ["a", "c"]
    assert below(root) == {"a/b.txt": 3, "c": 8}
    assert [*root.listing(deep=False)] == ["c"]
    assert (root / "a" / "b.txt").read_text() == "one"
    with (root / "c").open() as file:
        file.seek(3)
        assert file.read() == b"three"
    (root / "d").write_bytes(b"x")
    (root / "d").unlink()
    (root / "d").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match="memory://bucket/run/d"):
        (root / "d").unlink()
    with pytest.raises(FileNotFoundError, match="memory://bucket/run/d"):
        (root / "d").read_bytes()


@pytest.mark.parametrize(
    ("error", "made"),
    [
        (None, True),
        (NotImplementedError("no mode"), True),
        (OSError(22, "unknown header"), True),
        (FileExistsError("taken"), False),
        (OSError(22, "At least one of the preconditions you specified did not hold"), False),
    ],
)
def test_an_object_is_created_once_whatever_its_storage_says(root, quick, error, made):
    """Another command creates it after this one has looked, or the storage cannot create."""
    asked = []

    def pipe_file(own, path, data, mode="overwrite"):
        asked.append(mode)
        if mode == "create" and not made:
            own(path, b"theirs")
        if mode == "create" and error is not None:
            raise error
        own(path, data)

    found = faulty(root, pipe_file=pipe_file) / "batch.json"
    assert found.create(b"ours") is made and asked[0] == "create"
    assert found.read_bytes() == (b"ours" if made else b"theirs")
    assert not found.create(b"again")


def test_what_is_listed_is_what_is_below(root):
    """Not the folder itself, of which some storages keep an object, nor what is beside it."""
    beside = Address(root.files, f"{root.path}2", "memory")
    for place in (root / "a", root / "ab", root / "below" / "c", beside / "d"):
        place.write_bytes(b"x")

    class Listing(type(root.files)):
        def ls(self, path, detail=True, **options):
            itself = {"name": f"{path}/", "size": 0, "type": "file"} if detail else f"{path}/"
            below = super().ls(path, detail=detail, **options)
            return [itself, *below] if path == root.path else below

        def find(self, path, **options):
            marker = {f"{path}/": {"name": f"{path}/", "size": 0, "type": "file"}}
            return marker | super().find(path, **options)

    for files in (root.files, Listing(skip_instance_cache=True)):
        seen = Address(files, root.path, "memory")
        assert [found.name for found in seen.iterdir()] == ["a", "ab", "below"]
        assert below(seen) == {"a": 1, "ab": 1, "below/c": 1}
        assert below(seen / "a") == {}
    assert not (root / "a").is_dir() and (root / "below").is_dir()
    assert sorted([root / "b", root / "a"]) == [root / "a", root / "b"]
    assert path_of("memory://bucket/run//") == root and path_of("LOCAL:///tmp/x") == Path("/tmp/x")


@pytest.mark.parametrize(
    ("known", "seconds"),
    [
        ({"mtime": 12.5}, 12.5),
        ({"LastModified": datetime(1970, 1, 1, 0, 1, tzinfo=timezone.utc)}, 60.0),
        ({"updated": "1970-01-01T00:02:00Z"}, 120.0),
        ({"size": 3}, 0.0),
    ],
)
def test_each_storage_says_in_its_way_when_an_object_was_written(known, seconds):
    assert addresses._time_of(known) == seconds


def failing(error, times):
    """A storage of which so many reads fail."""

    class Failing(type(fsspec.filesystem("memory"))):
        def cat_file(self, *args, **options):
            nonlocal times
            times -= 1
            if times >= 0:
                raise error
            return super().cat_file(*args, **options)

    return Failing(skip_instance_cache=True)


class NoCredentialsError(Exception):
    """Named as botocore's."""


class ReadTimeoutError(Exception):
    """Likewise."""


def test_what_fails_is_tried_again(root, quick):
    (root / "c").write_bytes(b"x")
    slow = Address(failing(TimeoutError("slow"), 2), root.path, "memory") / "c"
    assert slow.read_bytes() == b"x"
    for error, times in ((TimeoutError("slow"), 3), (NoCredentialsError("none\nfound"), 1)):
        broken = Address(failing(error, times), root.path, "memory") / "c"
        with pytest.raises(OSError, match="^memory://bucket/run/c cannot be reached: [^\n]*$"):
            broken.read_bytes()
        assert broken.read_bytes() == b"x"
    unable = Address(failing(NotImplementedError("no"), 1), root.path, "memory") / "c"
    with pytest.raises(NotImplementedError):  # at once, as it will not be otherwise
        unable.read_bytes()
    with pytest.raises(PermissionError, match="^memory://bucket/run/c .*no"):
        (Address(failing(PermissionError("no"), 9), root.path, "memory") / "c").read_bytes()


def test_a_storage_that_is_silent_for_long_is_asked_once(root, quick, monkeypatch):
    (root / "c").write_bytes(b"x")
    seconds = iter(range(0, 1000, 11))
    monkeypatch.setattr(addresses.time, "monotonic", lambda: next(seconds))
    for error in (TimeoutError("slow"), ReadTimeoutError("slow")):
        silent = Address(failing(error, 1), root.path, "memory") / "c"
        with pytest.raises(OSError, match="cannot be reached: slow"):
            silent.read_bytes()
    broken = Address(failing(ConnectionResetError("late"), 2), root.path, "memory") / "c"
    assert broken.read_bytes() == b"x"  # it did answer


def test_a_server_of_s3_that_never_answers_is_asked_twice(monkeypatch):
    pytest.importorskip("s3fs")
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:

        def accept():
            with suppress(OSError):
                while True:
                    asked.append(server.accept())

        pool.submit(accept)
        port = server.getsockname()[1]
        own = {"read_timeout": 0.2, "s3": {"addressing_style": "path"}}
        setting = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
        monkeypatch.setitem(fsspec.config.conf, "s3", {**setting, "config_kwargs": own})
        monkeypatch.setattr(addresses, "_SILENCE", 0.3)
        silent = path_of("s3://bucket/run")
        assert silent.files.config_kwargs == {"retries": {"total_max_attempts": 1}, **own}
        with pytest.raises(OSError, match="s3://bucket/run cannot be reached: Read timeout"):
            silent.read_bytes()
        server.shutdown(socket.SHUT_RDWR)
    for connection, _ in asked:
        connection.close()
    assert len(asked) == 2


@pytest.mark.parametrize("where", ["nowhere://x/run", "simplecache::memory://x/run"])
def test_a_scheme_that_is_unknown_is_refused(where):
    with pytest.raises(ValueError, match="fsspec"):
        path_of(where)


def test_a_package_that_is_missing_is_named(monkeypatch):
    # Another test may have used S3 in this process: fsspec remembers the class then.
    monkeypatch.delitem(fsspec_registry._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match="gs://b/run.*gcsfs"):
        path_of("gs://b/run")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"s3fs.* \(pip install 'sdattn\[s3\]'\)"):
        path_of("s3://b/run")


def test_where_nothing_can_be_written_it_is_told_in_a_line(root, quick):
    root.check_writable()
    assert below(root) == {}

    class NoBucket(type(root.files)):
        def pipe_file(self, *args, **options):
            raise FileNotFoundError("The specified bucket does not exist")

    gone = Address(NoBucket(skip_instance_cache=True), root.path, "memory")
    with pytest.raises(OSError, match="memory://bucket/run.*specified bucket"):
        gone.check_writable()
