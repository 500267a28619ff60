"""Runs in S3, of a server that the test starts."""

import socket

import fsspec
import pytest
from helpers.batch_runs import FORMATS, kept_of, new_run, three
from helpers.storages import begun, objects_of, quick_waits  # noqa: F401
from helpers.tiers import tiered

from sdattn.batch import merge, open_batch, status, verify
from sdattn.batch.storage import leases
from sdattn.batch.storage.folder import BatchFolder
from sdattn.files.addresses import path_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within botocore and moto
]
KEYS = {"key": "testing", "secret": "testing"}


@pytest.fixture(scope="module")
def server():
    from moto.server import ThreadedMotoServer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    made.start()
    yield f"http://127.0.0.1:{port}"
    made.stop()


@pytest.fixture
def bucket(server, monkeypatch, quick):
    """The address of a bucket that is there."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    setting = {"endpoint_url": server, "client_kwargs": {"region_name": "eu-west-1"}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {**setting, **KEYS})
    files = fsspec.filesystem("s3", use_listings_cache=False)
    if not files.exists("bucket"):
        files.mkdir("bucket")
    yield path_of("s3://bucket")
    monkeypatch.setitem(fsspec.config.conf, "s3", setting)


@pytest.mark.parametrize("format", tiered(FORMATS, 0, 1))
def test_a_run_in_s3_is_that_of_the_disk(bucket, tmp_path, format):
    there, here = bucket / format, tmp_path / "run"
    assert not there.files.dircache.use_listings_cache  # others write there too
    for root in (there, here):
        new_run(root, three(), format=format)
    assert objects_of(there) == kept_of(here)
    assert verify(f"s3://bucket/{format}") == verify(here) == (3, [])
    assert status(there).whole == 3 and status(there).running is None
    assert open_batch(there)["b"].info == open_batch(here)["b"].info
    assert merge([there], tmp_path / "merged") == merge([here], bucket / f"{format}-2") == (3, 3)
    assert verify(tmp_path / "merged") == verify(bucket / f"{format}-2") == (3, [])


def test_a_lease_in_s3_is_one_jobs(bucket, monkeypatch):
    monkeypatch.setattr(leases, "_BEAT", 1.0)  # a machine under load may hold up a thread for some
    folder, other = begun(bucket / "leased", three()), BatchFolder(bucket / "leased")
    with pytest.raises(OSError, match="s3://bucket/leased is being written by another job"):
        other.open("two")
    folder.close()
    other.open("two")
    other.close()


def test_what_cannot_be_written_is_refused_in_a_line(bucket, monkeypatch):
    with pytest.raises(OSError, match=r"^Cannot write to s3://nobucket/run: .*\.$") as refused:
        BatchFolder("s3://nobucket/run").open("one")
    assert "\n" not in str(refused.value)
    setting = {name: value for name, value in fsspec.config.conf["s3"].items() if name not in KEYS}
    monkeypatch.setitem(fsspec.config.conf, "s3", setting)
    with pytest.raises(
        OSError, match=r"^s3://bucket/run cannot be reached: .*redentials"
    ) as refused:
        BatchFolder("s3://bucket/run").open("one")
    assert "\n" not in str(refused.value)
