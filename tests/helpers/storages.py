"""Runs in storages of fsspec: in memory, with faults, and a server of S3."""

from contextlib import contextmanager

import fsspec
import pytest

from sdattn.files import addresses
from sdattn.files.addresses import Address, path_of

MEMORY = type(fsspec.filesystem("memory"))


@pytest.fixture(name="quick")
def quick_waits(monkeypatch):
    """Waits of a storage that answers at once."""
    monkeypatch.setattr(addresses, "_WAITS", (0, 0))


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
