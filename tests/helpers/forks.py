"""The command line in processes that begin at once: forks of one that has imported everything.

    process = Fork("batch", "in.jsonl", "--out", "run", cwd=folder)  # as subprocess.Popen
    in_own_namespace(["mount -t tmpfs none disk", ("new", "batch", "in.jsonl")], cwd=folder)

A new Python imports torch and diffusers for seconds before it does what a test is about. From there
on a fork is a process like any other: its files, locks, signals and memory are its own. So is a
launcher, `Fork(..., of="accelerate-launch")`; the ranks that it begins are new Pythons. How the
command starts is for tests that start Python.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

IMPORTED = [
    "helpers.fewer_collections",  # of garbage, while the others are imported
    "sdattn.cli",
    "sdattn.batch.run",
    "accelerate",
    "diffusers.guiders",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "transformers.models.clip.modeling_clip",
]


class Fork:
    """A command with these arguments; what it prints goes to files in its folder.

    Args:
        cwd: where it works.
        variables: of its environment, beside those of this process.
        of: which command: ``"sdattn"`` or ``"accelerate-launch"``.
    """

    def __init__(self, *arguments, cwd, variables=None, of="sdattn"):
        self.args = [of, *map(str, arguments)]
        self.logs = [Path(cwd, f"{name}-{time.monotonic_ns()}.log") for name in ("out", "err")]
        for log in self.logs:
            log.touch()  # it may be killed before it opens them
        # daemon: should a test leave it behind, it ends with the tests
        self._process = fork(_work, self.args, cwd, self.logs, variables or {}, daemon=True)
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """(stdout, stderr), once it has ended."""
        self.wait(timeout)
        return tuple(log.read_text() for log in self.logs)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self._process.terminate()

    def kill(self):
        self._process.kill()


def fork(target, *arguments, daemon=False):
    """A process that runs a function; it is begun from one without threads, unlike this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=target, args=arguments, daemon=daemon)
    process.start()
    return process


def _work(command, cwd, logs, variables):
    os.chdir(cwd)
    os.environ.update(variables)
    for number, log in enumerate(logs, start=1):  # stdout, stderr
        with open(log, "wb") as file:
            os.dup2(file.fileno(), number)
    from accelerate.commands import launch

    from sdattn import cli

    sys.argv = command
    {"sdattn": cli.main, "accelerate-launch": launch.main}[command[0]]()
