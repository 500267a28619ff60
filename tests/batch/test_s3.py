"""Runs in S3, of a server that the test starts: parts at once, and a server that fails."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import fsspec
import pytest
from helpers.batch_draws import ALL, SMALL
from helpers.batch_runs import FORMATS
from helpers.storages import S3_KEYS, quick_waits, s3_bucket, s3_server  # noqa: F401
from helpers.tiers import tiered
from helpers.trees import tree

from sdattn.batch import Outcome, Request, open_batch, run_batch, status, verify
from sdattn.files.place import Place

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within botocore and moto
]
CHANCE = random.Random(7)
PARTS = 4


@pytest.fixture
def request_of(model, tmp_path):
    """The same run, drawn into any place."""
    source = tmp_path / "in.txt"
    source.write_text("\n".join(ALL))
    usual = {"options": SMALL, "device": "cpu", "save": ("image", "maps"), "batch_size": 2}
    return lambda out, format, **more: Request(
        source, out, str(model), format=format, **usual, **more
    )


def objects_of(address):
    place = Place(address)
    return {n: place.read(n) for n in place.files(deep=True) if not n.startswith(".sdattn-")}


@pytest.mark.parametrize("format", tiered(FORMATS, quick=0))
def test_four_parts_at_once_make_the_run_of_the_disk(bucket, request_of, tmp_path, format):
    there = f"{bucket}/{format}"
    run_batch(request_of(tmp_path / "run", format))
    parts = [replace(request_of(there, format), part=(n, PARTS)) for n in range(1, PARTS + 1)]
    with ThreadPoolExecutor(PARTS) as pool:
        outcomes = [*pool.map(run_batch, parts)]
    assert sum(outcome.whole for outcome in outcomes) == len(ALL)
    assert not any(outcome.exit_code for outcome in outcomes)
    assert objects_of(there) == tree(tmp_path / "run")
    assert verify(there) == (len(ALL), [])
    assert status(there).whole == len(open_batch(there)) == len(ALL)
    assert run_batch(request_of(there, format)).before == len(ALL)


class Failing:
    """A storage that fails some calls, before or after they had their effect."""

    def __init__(self, files, share):
        self.files, self.share = files, share

    def __getattr__(self, name):
        def call(*args, **options):
            place = CHANCE.random() / self.share  # fails before from 0, behind from 0.5
            if place < 0.5:
                raise TimeoutError("the server is busy")
            found = getattr(self.files, name)(*args, **options)
            if place < 1:
                raise ConnectionResetError("the answer was lost")
            return found

        return call


@pytest.mark.parametrize(
    ("share", "format"), tiered([*((0.1, format) for format in FORMATS), (0.4, "folder")], quick=0)
)
def test_a_server_that_fails_loses_nothing(
    bucket, request_of, tmp_path, monkeypatch, share, format
):
    """One call in ten; then as many that commands end with an error, and go on."""
    there, ends = f"{bucket}/failing-{share}-{format}", []
    (tmp_path / "in.txt").write_text("\n".join(ALL[:4]))
    run_batch(request_of(tmp_path / "run", format))
    url_to_fs = fsspec.url_to_fs

    def failing(url, **options):
        files, path = url_to_fs(url, **options)
        return Failing(files, share), path

    with monkeypatch.context() as patch:
        patch.setattr(fsspec, "url_to_fs", failing)
        while not any(isinstance(end, Outcome) for end in ends):
            try:
                ends.append(run_batch(request_of(there, format)))
            except OSError as error:
                ends.append(str(error))
    *told, outcome = ends
    assert all("s3://bucket/failing" in text for text in told)
    assert (outcome.whole, outcome.exit_code) == (4, 0)
    assert len(told) < 20 if share < 0.2 else told
    assert verify(there) == (4, [])
    assert objects_of(there) == tree(tmp_path / "run")
