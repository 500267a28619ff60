"""Small plausible faults in the package, each of which the tests that CI runs should find.

    python -m scripts.mutants                 all of them, one after the other
    python -m scripts.mutants --only 12 13    two of them
    python -m scripts.mutants --marks "not slow"    what the quick tests alone find

A fault is a text of the package and another in its place. The lists are in the modules here:
``watching`` (follow, look and keep), ``reading`` (control, maps and inversion), ``others``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NO_END = "no end"
CI = "not slow or chosen"  # pytest's marks of the tests that CI runs
MOST_SECONDS = 900  # of a fault's tests; one that makes them wait forever is found too


@dataclass(frozen=True)
class Fault:
    """A fault that somebody might make.

    Attributes:
        path: file in ``sdattn/``.
        text: what stands there once.
        instead: what the fault puts there.
        why: what is wrong then.
        tests: tests that should find it, quickest first, as paths in ``tests/``, or a module with
            doctests, ``sdattn/…``; empty for the tests of the file's room.
    """

    path: str
    text: str
    instead: str
    why: str
    tests: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"sdattn/{self.path}"

    @property
    def room(self) -> str:
        return self.path.partition("/")[0]

    @property
    def named(self) -> tuple[str, ...]:
        """The tests to run, as paths in the checkout."""
        chosen = self.tests or (self.room,)
        return tuple(one if one.startswith("sdattn/") else f"tests/{one}" for one in chosen)


class Outcome(NamedTuple):
    """How a fault fared: the first test that failed, None if all passed, and the seconds taken."""

    found_by: str | None
    seconds: float


def problems(root: Path, fault: Fault) -> list[str]:
    """Say what is wrong with an entry: its text is not in its file once, or a test is missing."""
    path = root / fault.file
    found = path.read_text("utf-8").count(fault.text) if path.is_file() else 0
    told = [] if found == 1 else [f"{fault.file} has {fault.text!r} {found} times, not once"]
    missing = [name for name in fault.named if not (root / name).exists()]
    return [*told, *(f"{fault.file}: there is no {name}" for name in missing)]


def try_fault(root: Path, fault: Fault, marks: str = CI) -> Outcome:
    """Run a fault's tests with it, and put the file back; raise ValueError if none of them runs."""
    path = root / fault.file
    text = path.read_text("utf-8")
    path.write_text(text.replace(fault.text, fault.instead), "utf-8")
    began = time.monotonic()
    try:
        return Outcome(first_failure(root, fault.named, marks), time.monotonic() - began)
    finally:
        path.write_text(text, "utf-8")


def first_failure(root: Path, tests: Sequence[str], marks: str = CI) -> str | None:
    """Return the first test that fails, None if all pass; raise ValueError if none runs."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marks, "--tb=no"]
    command += ["-p", "no:cacheprovider", *tests]
    # Files that are written twice in a second would leave compiled code of the other behind.
    variables = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    variables.setdefault("OMP_NUM_THREADS", "1")
    try:
        done = subprocess.run(
            command, cwd=root, env=variables, capture_output=True, text=True, timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return NO_END
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (1, 2) or not lines:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise ValueError(f"pytest could not run {' '.join(tests)}: {' '.join(last)}")
    return lines[0].partition(" ")[2].partition(" - ")[0]


def all_faults() -> list[Fault]:
    from . import others, reading, watching

    return [*watching.FAULTS, *reading.FAULTS, *others.FAULTS]
