"""Runs in storages of fsspec: in memory, with faults, and a server of S3."""

import socket
from contextlib import contextmanager

import fsspec
import pytest

from sdattn.files import addresses
from sdattn.files.addresses import Address, path_of

MEMORY = type(fsspec.filesystem("memory"))
S3_KEYS = {"key": "testing", "secret": "testing"}


@pytest.fixture(name="quick")
def quick_waits(monkeypatch):
    """Waits of a storage that answers at once."""
    monkeypatch.setattr(addresses, "_WAITS", (0, 0))


def clear_memory():
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]  # an upload makes the folders above it


@contextmanager
def empty(address):
    clear_memory()
    yield path_of(address)
    clear_memory()


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


@pytest.fixture(name="server", scope="module")
def s3_server():
    """The address of a server of S3."""
    from moto.server import ThreadedMotoServer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    made.start()
    yield f"http://127.0.0.1:{port}"
    made.stop()


@pytest.fixture(name="bucket")
def s3_bucket(server, monkeypatch, quick):
    """The address of a bucket on it."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    setting = {"endpoint_url": server, "client_kwargs": {"region_name": "eu-west-1"}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {**setting, **S3_KEYS})
    files = fsspec.filesystem("s3", use_listings_cache=False)
    if not files.exists("bucket"):
        files.mkdir("bucket")
    yield "s3://bucket"
    monkeypatch.setitem(fsspec.config.conf, "s3", setting)
