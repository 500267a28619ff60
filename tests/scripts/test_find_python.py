"""scripts/find-python: which Python makes the environment, with real programs of those names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "find-python"
pytestmark = pytest.mark.skipif(os.name == "nt", reason="a script for a shell")


@pytest.fixture
def folder(tmp_path):
    """The only one on the path, but for the shell's own programs."""
    for name in ("bash", "env"):
        tmp_path.joinpath(name).symlink_to(shutil.which(name))
    return tmp_path


def find(folder, **variables):
    done = subprocess.run(
        [SCRIPT], capture_output=True, text=True, env={"PATH": str(folder), **variables}
    )
    return done.returncode, done.stdout.strip(), done.stderr


def put(folder, name, version=None):
    """This Python, or a program that says of itself which one it is."""
    said = f"echo {version}" if version else f'exec "{sys.executable}" "$@"'
    path = folder / name
    path.write_text(f"#!/bin/sh\n{said}\n")
    path.chmod(0o755)


def test_python3_comes_first(folder):
    put(folder, "python3")
    put(folder, "python3.12")
    assert find(folder) == (0, "python3", "")


@pytest.mark.parametrize("version", ["2.7", "3.9"])
def test_one_that_is_too_old_is_passed_over(folder, version):
    put(folder, "python3", version)
    put(folder, "python3.12", "3.12")
    put(folder, "python3.10", "3.10")
    assert find(folder) == (0, "python3.12", "")


def test_the_one_that_is_named_is_taken_and_no_other(folder, tmp_path_factory):
    put(folder, "python3")
    elsewhere = tmp_path_factory.mktemp("a folder")
    put(elsewhere, "python")
    assert find(folder, PYTHON=f"{elsewhere}/python") == (0, f"{elsewhere}/python", "")
    put(elsewhere, "python", "3.8")
    code, out, err = find(folder, PYTHON=f"{elsewhere}/python")
    assert (code, out) == (1, "") and f"{elsewhere}/python is Python 3.8" in err


def test_without_one_it_says_what_is_needed_and_what_was_found(folder):
    code, out, err = find(folder)
    assert (code, out) == (1, "")
    assert "needs Python 3.10 or newer" in err and "found: none" in err
    put(folder, "python3", "3.9")
    assert "found: python3 is Python 3.9" in find(folder)[2]
    assert "PYTHON=" in err  # what to do
