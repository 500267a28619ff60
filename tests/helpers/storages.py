"""Runs in storages of fsspec: in memory, with faults, and a server of S3."""

from contextlib import contextmanager

import fsspec
import pytest

from helpers.batch_runs import manifest
from sdattn.batch.storage import bucket, leases
from sdattn.batch.storage.folder import BatchFolder
from sdattn.files import addresses
from sdattn.files.addresses import Address, path_of

MEMORY = type(fsspec.filesystem("memory"))


@pytest.fixture(name="quick")
def quick_waits(monkeypatch):
    """Waits and beats of a storage that answers at once."""
    monkeypatch.setattr(addresses, "_WAITS", (0, 0))
    monkeypatch.setattr(leases, "_BEAT", 0.05)
    monkeypatch.setattr(bucket, "_EVERY", 0.0)


@contextmanager
def empty(address):
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield path_of(address)
    files.store.clear()


@pytest.fixture(name="memory")
def memory_bucket(quick):
    """The address of an empty bucket in memory."""
    with empty("memory://bucket") as place:
        yield place


@pytest.fixture(name="root")
def memory_run():
    """The address of a run in memory where nothing is yet."""
    with empty("memory://bucket/run") as place:
        yield place


def once(fails):
    """For :func:`faulty`: the storage's own method until the event is set, then it is gone."""

    def call(own, *args, **options):
        if fails.is_set():
            raise TimeoutError("gone")
        return own(*args, **options)

    return call


def begun(root, items, **changes):
    """A folder at work with these items added, name to files, and not gathered."""
    folder = BatchFolder(root)
    folder.open("job")
    folder.claim(manifest(**changes), items)
    for line, (item, files) in enumerate(items.items(), 1):
        folder.layout.add(item, line, files, lambda *whole: folder.note_whole("job-0", *whole))
    return folder


def objects_of(root):
    """Path to bytes of all that a run holds, what is at work aside."""
    found = {name: (root / name).read_bytes() for name in root.sizes()}
    return {name: data for name, data in found.items() if not name.startswith(".batch/")}


def faulty(root, **calls):
    """The address in a storage whose methods fail as the functions say: they get the storage's own
    method, and its arguments."""

    def method(name, fault):
        def call(self, *args, **options):
            own = getattr(MEMORY, name)
            return fault(lambda *a, **o: own(self, *a, **o), *args, **options)

        return call

    made = {name: method(name, fault) for name, fault in calls.items()}
    files = type("Faulty", (MEMORY,), made)(skip_instance_cache=True)
    return Address(files, root.path, root.scheme)
