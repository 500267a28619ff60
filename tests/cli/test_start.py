"""How the command line starts: without what only a running command needs."""

import os
import subprocess
import sys

import pytest

HEAVY = "torch", "diffusers", "transformers", "accelerate", "numpy", "PIL", "matplotlib", "gradio"
COMMANDS = "generate", "explain", "edit", "batch", "merge", "show", "diff", "info", "app"
# The name of a program decides on the name of the variable that asks for completion.
PROGRAM = f"""
import sys
from sdattn.cli import main
sys.argv[0] = "sdattn"
try:
    main()
finally:
    print("loaded:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


def start(*arguments, **variables):
    """(exit code, stdout, the heavy packages that were loaded) of the command line."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr.splitlines()[-1].removeprefix("loaded:")


@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), *((name, "--help") for name in COMMANDS)]
)
def test_help_and_the_version_load_nothing_heavy(arguments):
    code, out, loaded = start(*arguments)
    assert (code, loaded) == (0, "")
    assert out


def test_the_version_loads_nothing_that_only_tables_need():
    program = PROGRAM.replace(str(HEAVY), str(("rich", *HEAVY)))
    command = [sys.executable, "-c", program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.split() == ["loaded:"]


def test_wrong_usage_is_refused_before_anything_heavy_is_loaded():
    assert start("generate", "a cat", "--steps", "none") == (2, "", "")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("sdattn ge", "generate"),
        ("sdattn generate --pre", "--preset"),
        ("sdattn generate cat --preset da", "daam"),
        ("sdattn generate cat --dtype b", "bfloat16"),
        ("sdattn generate cat --keep steps,", "steps,heads"),
        ("sdattn generate cat --device cu", "cuda"),
        ("sdattn show run --figure la", "layers"),
        ("sdattn batch in --save grid,m", "grid,maps grid,masks"),
    ],
)
def test_completion_loads_nothing_heavy(typed, completed):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code, out, loaded = start(**words, _SDATTN_COMPLETE="complete_bash")
    assert (code, out.split(), loaded) == (0, completed.split(), "")
