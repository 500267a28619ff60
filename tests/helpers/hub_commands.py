"""The command line against a hub, in a process a command that has the libraries loaded already.

    with HubCommands(hub, folder) as commands:
        done = commands.run("info", "acme/sd", "-q", HF_TOKEN="secret")
        assert (done.code, done.out, done.err) == (0, "...", "")

The libraries read what the environment says of the hub when they are imported. So a process is
started with it, imports them, and makes a copy of itself for each command.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.hub_server import HubServer

_LIMIT = 120  # seconds that a command may take
_KEPT = ("PATH", "SYSTEMROOT", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Done:
    """A command's exit code, and the text on stdout and stderr."""

    code: int
    out: str
    err: str


class HubCommands:
    """Commands with an empty home and cache at first, for a hub; ``cache`` is where models go."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.hub = hub
        self.home = folder / "home"
        self.cache = self.home / "hub"
        self.copies = folder / "copies"
        self.here = folder / "here"  # where commands run
        self.here.mkdir(parents=True)

    def __enter__(self) -> "HubCommands":
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.home),
            "HF_HOME": str(self.home),
            "HF_ENDPOINT": self.hub.url,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from helpers.hub_commands import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=self.here,
            text=True,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()

    def empty_the_cache(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)

    def parts(self) -> list[Path]:
        """Return what came of files whose download has not ended."""
        return list(self.cache.rglob("*.incomplete"))

    def lose(self, pattern: str) -> None:
        """Remove files of a snapshot from the cache, with what they point to."""
        for pointer in self.cache.glob(f"models--*/snapshots/*/{pattern}"):
            pointer.resolve().unlink()
            pointer.unlink()

    def fill_the_cache(self, *arguments: str, **variables: str) -> None:
        """Have what a command fetches in the cache; from an earlier copy if there is one."""
        self.empty_the_cache()
        copy = self.copies / hashlib.sha256(repr(arguments).encode()).hexdigest()[:8]
        if not copy.is_dir():
            done = self.run(*arguments, **variables)
            assert done.code == 0, f"filling the cache: {done}"
            shutil.copytree(self.home, copy, symlinks=True)
            return
        shutil.copytree(copy, self.home, symlinks=True)

    def run(self, *arguments: str, disk: str = "", **variables: str) -> Done:
        """Run a command to its end; ``variables`` are those of its environment, and the disk may
        be ``"full"``, or ``"filling"`` while it still says that there is space."""
        return self.wait(self.start(*arguments, disk=disk, **variables))

    def start(self, *arguments: str, disk: str = "", **variables: str) -> int:
        """Start a command, and return the id of its process."""
        # which test runs what is noted by scripts.mutants
        variables = {"PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"], **variables}
        asked = {"arguments": arguments, "variables": variables, "disk": disk}
        pid: int = self._ask("start", **asked)
        return pid

    def wait(self, pid: int) -> Done:
        """Wait for a command that was started; one that was killed has the signal's number as its
        exit code, negative."""
        return Done(**self._ask("wait", pid=pid))

    def _ask(self, what: str, **options: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([what, options]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


# -- in the process that has the libraries ---------------------------------------------------------


def serve() -> None:
    """Answer each line on stdin: ``start`` a command in a process of its own, or ``wait``."""
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    from diffusers import DDIMScheduler, StableDiffusionPipeline  # noqa: F401
    from pydantic import type_adapter  # noqa: F401

    import sdattn
    from sdattn import cli  # noqa: F401

    for public in sdattn.__all__:
        getattr(sdattn, public)
    _draw_once()

    for line in sys.stdin:
        what, options = json.loads(line)
        answer = {"start": _start, "wait": _wait}[what](**options)
        print(json.dumps(answer), flush=True)


def _draw_once() -> None:
    """Draw an image, so that what is imported for one is there before processes are copied."""
    from sdattn import cli

    command = "generate cat --model demo --device cpu --steps 1 -q --out first"
    with redirect_stdout(sys.stderr):
        cli.commands(command.split(), standalone_mode=False)


def _start(**asked: Any) -> int:
    pid = os.fork()
    if pid == 0:
        for number, name in ((0, os.devnull), (1, f"{os.getpid()}.out"), (2, f"{os.getpid()}.err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        _run(**asked)
    return pid


def _wait(pid: int) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err = (Path(f"{pid}.{name}").read_text(encoding="utf-8") for name in ("out", "err"))
    return {"code": code, "out": out, "err": err}


def _run(arguments: list[str], variables: dict[str, str], disk: str) -> None:
    """Run a command in this process, and end it."""
    signal.alarm(_LIMIT)
    # whoever runs the tests in the background may have had it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(variables)
    _import_again(variables)
    _shorten_waits()
    if disk:
        _fill_the_disk(is_known=disk == "full")
    from sdattn.__main__ import main

    sys.argv = ["sdattn", *arguments]
    code: Any = 1
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import_again(variables: dict[str, str]) -> None:
    """Give constants the values that they would have if the libraries were imported now."""
    import huggingface_hub

    endpoint = huggingface_hub.constants.ENDPOINT
    asking = ("huggingface_hub", "diffusers", "transformers", "sdattn")
    for module in [module for name, module in sys.modules.items() if name.startswith(asking)]:
        for name, value in list(vars(module).items()):
            if name in variables and isinstance(value, int):
                setattr(module, name, type(value)(int(variables[name])))
            elif type(value) is str and value.startswith(endpoint) and "HF_ENDPOINT" in variables:
                setattr(module, name, value.replace(endpoint, variables["HF_ENDPOINT"]))
    huggingface_hub.hf_api.api.endpoint = huggingface_hub.constants.ENDPOINT


def _shorten_waits() -> None:
    """Make a second of waiting between two attempts a hundredth."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds / 100)


def _fill_the_disk(*, is_known: bool) -> None:
    """Let no byte of a download be written, as on a disk without space; ``is_known`` also says so
    to those who ask."""
    open_path = Path.open
    usage = shutil.disk_usage

    def open_full(path: Path, *args: Any, **kwargs: Any) -> Any:
        full = Path("/dev/full") if path.suffix == ".incomplete" else path
        return open_path(full, *args, **kwargs)

    Path.open = open_full  # type: ignore[method-assign]
    if is_known:
        shutil.disk_usage = lambda path: usage(path)._replace(free=0)  # type: ignore[assignment]
