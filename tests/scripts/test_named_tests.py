"""Scripts that name tests: each name exists, and a script ends at once over one that does not."""

import os
import re
import subprocess
from pathlib import Path

import pytest

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
