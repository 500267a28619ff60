"""Scripts that name tests: each name exists, and a script ends at once over one that does not."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers.chosen import chosen_pattern, chosen_tests

ROOT = Path(__file__).parents[2]
NAMES = re.compile(r"\btests/[\w./]*(?:\{[\w,]+\})?[\w./]*")
SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "scripts").iterdir())]
NAMING = [path for path in SCRIPTS if path.is_file() and NAMES.search(path.read_text("utf-8"))]
SHELL = [path for path in NAMING if path.read_text("utf-8").startswith("#!/usr/bin/env bash")]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="scripts for a shell")


def expanded(name):
    """What bash makes of braces."""
    head, brace, rest = name.partition("{")
    if not brace:
        return [name]
    inside, _, tail = rest.partition("}")
    return [f"{head}{one}{tail}" for one in inside.split(",")]


def test_scripts_that_name_tests_are_found():
    assert {"test-newest", "test-oldest", "portable"} <= {path.name for path in SHELL}


@pytest.mark.parametrize("path", NAMING, ids=lambda path: path.name)
def test_each_named_test_exists(path):
    names = [one for name in NAMES.findall(path.read_text("utf-8")) for one in expanded(name)]
    assert [name for name in names if not (ROOT / name.rstrip(".")).exists()] == []


@pytest.mark.parametrize("name", sorted({name.partition("[")[0] for name in chosen_tests()}))
def test_each_chosen_test_exists(name):
    path, _, function = name.partition("::")
    assert f"def {function}(" in (ROOT / path).read_text("utf-8")


def test_a_chosen_name_stands_for_its_cases(tmp_path, monkeypatch):
    chosen = tmp_path / "chosen.txt"
    monkeypatch.setattr("helpers.chosen.LIST", chosen)
    chosen.write_text("# what\n\na.py::test_a  # whole\na.py::test_b[x-*]  # some\n", "utf-8")
    assert chosen_tests() == {"a.py::test_a": "whole", "a.py::test_b[x-*]": "some"}
    names = ("a.py::test_a", "a.py::test_a[1]", "a.py::test_b[x-1]", "a.py::test_b[y-1]")
    names += ("a.py::test_ab", "a.py::test_b")
    matched = [name for name in names if chosen_pattern().fullmatch(name)]
    assert matched == list(names[:3])
    for line in ("a.py::test_a", "a.py::test_a  # again\na.py::test_a  # twice"):
        chosen.write_text(line, "utf-8")
        with pytest.raises(ValueError, match="twice or lacks"):
            chosen_tests()


@pytest.mark.parametrize("name", ["test-newest", "test-oldest", "portable"])
def test_a_missing_name_ends_the_script_at_once(tmp_path, name):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / name
    script.write_text((ROOT / "scripts" / name).read_text("utf-8"), "utf-8")
    script.chmod(0o755)
    done = subprocess.run([script], capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert "tests/" in done.stderr
    assert not list(tmp_path.glob(".venv*"))
