"""Batches of the demo model as a person starts them."""

import json
import time
from functools import partial
from pathlib import Path

import pytest

from helpers.demo_words import OTHER, THING
from sdattn.batch.reading import verify
from sdattn.batch.storage.folder import BatchFolder

SETTINGS = ["--steps", "2", "--save", "image,maps", "--batch-size", "2", "--device", "cpu"]
LINUX = Path("/proc/self/task").exists()


def colours(number):
    names = ("red", "green", "blue", "yellow")
    return [
        {"prompt": f"a {names[i % 4]} {THING} and a {names[i // 4 % 4]} {OTHER}"}
        for i in range(number)
    ]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


@pytest.fixture(name="batch")
def call_batch(invoke):
    """The same without a process: (exit code, stdout, stderr)."""
    return partial(invoke, "batch")


def stamps(root):
    """Which file holds each item that is there, and when it was written: (inode, mtime)."""
    found = {}
    for path in [*root.glob("items/*/*/run.json"), *root.glob("shards/*.tar")]:
        known = path.stat()
        found[path.relative_to(root)] = known.st_ino, known.st_mtime_ns
    return found


def whole(root):
    """How many items are there."""
    if not (root / "batch.json").exists():
        return 0
    return len(list(BatchFolder(root).layout.find()))


def contents(root):
    layout = BatchFolder(root).layout
    return {item: layout.read(item, location) for item, location in sorted(layout.find())}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_complete(root, number):
    """Every item exactly once, as it was written, with one row, and nothing unfinished."""
    assert verify(root) == (number, [])
    expected = [f"{line:06d}" for line in range(1, number + 1)]
    assert sorted(item for item, _ in BatchFolder(root).layout.find()) == expected
    assert [row["id"] for row in rows(root / "metadata.jsonl")] == expected
    assert rows(root / "errors.jsonl") == []
    assert list((root / ".batch/tmp").iterdir()) == []
    assert list((root / ".batch/done").iterdir()) == []


def wait_until(seen, process):
    """Fails if the process ends before."""
    end = time.monotonic() + 120
    while not seen():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
