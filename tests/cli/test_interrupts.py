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
SAYS_IT_LATE = f"class Late:\n    def write(self, _):\n        {INTERRUPT}"
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
    "it, and again at exit": f"atexit.register(lambda: exec({INTERRUPT!r}))\nexec({INTERRUPT!r})",
    "it, and again when that is said": f"{SAYS_IT_LATE}\nsys.stderr = Late()\nexec({INTERRUPT!r})",
}
FINISHED = {  # what no longer stops anything
    "the command handled it": f"try: {INTERRUPT}\nexcept KeyboardInterrupt: pass",
    "Python clears its modules": "class Left:\n"
    "    def __del__(self, kill=os.kill, pid=os.getpid(), interrupt=signal.SIGINT):\n"
    "        kill(pid, interrupt)\n"
    "left = Left()",
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


def ends(command, handler=signal.SIG_DFL, **options):
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        # whoever runs the tests in the background may have had it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
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


def run_in_place(does, folder, **options):
    (folder / "program.py").write_text(PROGRAM.format(does=does))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return ends([sys.executable, "-m", "program"], env=environment, cwd=folder, **options)


@pytest.mark.parametrize("moment", COMMANDS)
def test_an_interrupt_in_the_command_and_after_it(tmp_path, moment):
    assert_one_sentence(run_in_place(COMMANDS[moment], tmp_path))


@pytest.mark.parametrize("moment", FINISHED)
def test_a_command_that_has_finished_stays_so(tmp_path, moment):
    done = run_in_place(FINISHED[moment], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_in_the_background_where_the_shell_has_it_ignored_nothing_is_interrupted(tmp_path):
    done = run_in_place("os.kill(os.getpid(), 2)", tmp_path, handler=signal.SIG_IGN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_other_errors_are_said_as_python_says_them(tmp_path):
    done = run_in_place("class Left:\n    def __del__(self): 1 / 0\nLeft()\n1 / 0", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError") == 2 and "Exception ignored in" in done.stderr
