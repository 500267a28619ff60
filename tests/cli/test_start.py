"""How the command line starts: without what only a running command needs."""

import os
import subprocess
import sys

import pytest
from helpers.command_lines import said
from helpers.tiers import tiered

HEAVY = "torch", "diffusers", "transformers", "accelerate", "numpy", "PIL", "matplotlib", "gradio"
COMMANDS = "generate", "explain", "edit", "batch", "show", "diff", "info", "app"
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


HELP = f"""
import sys
from sdattn.cli import main
for command in {COMMANDS}:
    sys.argv = ["sdattn", command, "--help"]
    try:
        main()
    except SystemExit as stop:
        loaded = [name for name in {HEAVY} if name in sys.modules]
        print(command, stop.code, *loaded, file=sys.stderr)
"""


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_the_version_and_the_list_of_commands_load_nothing_heavy(argument):
    code, out, loaded = start(argument)
    assert (code, loaded) == (0, "")
    assert out


def test_the_help_of_commands_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert done.stderr.splitlines() == [f"{command} 0" for command in COMMANDS]
    assert done.stdout.count("Usage: ") == len(COMMANDS)


def test_the_version_loads_nothing_that_only_tables_need():
    program = PROGRAM.replace(str(HEAVY), str(("rich", *HEAVY)))
    command = [sys.executable, "-c", program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.split() == ["loaded:"]


def test_a_batch_says_what_it_loads_before_it_does(tmp_path):
    """In the place of torch a module that ends the program."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    asked = ("batch", "in.txt", "--out", "run", "--model", "owner/name")
    line = "sdattn: loading torch and diffusers, then the model owner/name\n"
    for flags, first in (((), line), (("--quiet",), "")):
        command = [sys.executable, "-c", PROGRAM, *asked, *flags]
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.stderr == f"{first}loaded: PIL\ntorch is imported\n"


def test_wrong_usage_is_refused_before_anything_heavy_is_loaded():
    assert start("generate", "a cat", "--steps", "none") == (2, "", "")


@pytest.mark.parametrize(
    ("typed", "completed"),
    tiered([
        ("sdattn ge", "generate"),
        ("sdattn generate cat --preset da", "daam"),
        ("sdattn generate --pre", "--preset"),
        ("sdattn generate cat --dtype b", "bfloat16 bf16"),
        ("sdattn generate cat --keep steps,", "steps,heads steps,spots"),
        ("sdattn generate cat --device cu", "cuda"),
        ("sdattn show run --figure la", "layers"),
        ("sdattn batch in --save grid,m", "grid,maps grid,masks"),
    ], quick=2),
)  # fmt: skip
def test_completion_loads_nothing_heavy(typed, completed):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code, out, loaded = start(**words, _SDATTN_COMPLETE="complete_bash")
    assert (code, out.split(), loaded) == (0, completed.split(), "")


FIRST_LINE = f"""
import sys
from sdattn.cli import main

class Watched:
    def __init__(self, stream):
        self.stream, self.said = stream, []
    def write(self, text):
        if text.strip() and not self.said:
            loaded = [name for name in {HEAVY} if name in sys.modules]
            self.said = [text.split()[0], *loaded]
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()

sys.stderr = Watched(sys.stderr)
try:
    main()
except SystemExit:
    print("first:", *sys.stderr.said)
"""


@pytest.mark.parametrize(
    "arguments",
    tiered(
        [
            ["diff", "a cat", "--lora", "style.safetensors"],
            ["generate", "a red circle"],
            ["edit", "a red circle", "a red star"],
        ],
        quick=0,
    ),
)
def test_the_first_line_comes_before_anything_heavy_is_loaded(arguments, tmp_path):
    """The model asks for a device that no machine has, so that the command ends after it."""
    more = ["--device", "none", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", FIRST_LINE, *arguments, *more]
    (tmp_path / "style.safetensors").touch()
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["first:", "loading"]


def test_what_needs_no_model_is_refused_at_once_and_in_one_message(tmp_path):
    wrong = ["--seed", "-1", "--width", "100", "--frames", "3", "--set", "frame_rate=NaN"]
    wrong += ["--set", "generator=3", "--lora", "nothing.safetensors", "--out", str(tmp_path)]
    command = [sys.executable, "-c", PROGRAM, "generate", " ", *wrong]
    done = subprocess.run(command, capture_output=True, text=True)
    message, loaded = done.stderr.splitlines()
    assert (done.returncode, loaded) == (2, "loaded:")
    for named in ("' '", "--seed", "--width", "--frames", "frame_rate", "generator", "--lora"):
        assert named in message
    assert str(tmp_path) in message


def test_wrong_usage_among_other_mistakes_is_still_usage():
    code, _, loaded = start("generate", "a cat", "--seed", "-1", "--set", "x")
    assert (code, loaded) == (2, "")


def test_the_nearest_choice_is_named():
    command = [sys.executable, "-c", PROGRAM, "generate", "a cat", "--preset", "damm"]
    done = subprocess.run(command, capture_output=True, text=True)
    told = said(done.stderr)
    assert "'ovam'" in told and "mean 'daam'" in told and "Value error" not in told  # pydantic's
