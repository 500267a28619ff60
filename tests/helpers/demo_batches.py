"""Batches of the demo model as a person starts them."""

import json
import time
from functools import partial
from pathlib import Path

import pytest

from helpers.demo_words import OTHER, THING
from sdattn.batch import open_batch, verify

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


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_complete(root, number):
    """Every item exactly once, as it was written, with one row, and nothing unfinished."""
    assert verify(root) == (number, [])
    expected = [f"{line:06d}" for line in range(1, number + 1)]
    assert [*open_batch(root)] == [row["id"] for row in rows(root / "metadata.jsonl")] == expected
    assert rows(root / "errors.jsonl") == []
    assert list(root.glob(".sdattn-*")) == []


def wait_until(seen, process):
    """Fails if the process ends before."""
    end = time.monotonic() + 120
    while not seen():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
