"""Ctrl-C at moments when no exception of Python's brings it to the command."""

import os
import signal
import subprocess
import sys

import pytest

INTERRUPT = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
FINALIZER = f"class Left:\n    def __del__(self): {INTERRUPT}"
THREAD = """
def late():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
threading.Thread(target=late).start()
"""
MOMENTS = {  # a module in the place of another, and what it does when it is imported
    "importing the command line": ("typer", INTERRUPT),
    "an import that may fail": ("torch", f"try:\n    {INTERRUPT}\nexcept BaseException:\n    pass"),
}
COMMANDS = {  # what runs in the place of the command
    "code from a text, as dataclasses make it": f"exec({INTERRUPT!r})",
    "an error that comes of it": f"try: exec({INTERRUPT!r})\nexcept BaseException: sys.exit(1)",
    "a finalizer": f"{FINALIZER}\nLeft()\ntime.sleep(60)",
    "exit": f"atexit.register(lambda: exec({INTERRUPT!r}))",
    "exit, which waits for a thread": THREAD,
}
PROGRAM = """
import atexit, os, runpy, signal, sys, threading, time
from sdattn import cli
def main():
    exec({does!r}, globals())
    sys.exit(0)
cli.main = main
runpy.run_module("sdattn", run_name="__main__")
"""


def ends(command, **options):
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        # whoever runs the tests in the background may have had it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def assert_one_sentence(done):
    said = "sdattn: The command was interrupted.\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_while_modules_are_imported(tmp_path, moment):
    module, does = MOMENTS[moment]
    (tmp_path / f"{module}.py").write_text(does)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = ("batch", "in.txt", "--out", "run", "-m", "demo", "-q")
    assert_one_sentence(ends([sys.executable, "-m", "sdattn", *command], env=environment))


@pytest.mark.parametrize("moment", COMMANDS)
def test_an_interrupt_in_the_command_and_after_it(tmp_path, moment):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(does=COMMANDS[moment]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert_one_sentence(ends([sys.executable, "-m", "program"], env=environment, cwd=tmp_path))
