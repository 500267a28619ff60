"""CPU seconds of `sdattn generate` with the demo: to its first line, to the first step, and after
its last line, on Linux.

Each run is a process of its own, read character by character; its CPU time is the kernel's, of the
moment at which a line ends or the progress bar appears. The least of the rounds is printed, with
the most. Which optional packages are there decides, since diffusers and transformers import them.

    python -m scripts.benchmarks.bench_start
    python -m scripts.benchmarks.bench_start --imports 0.1     what was imported, from 0.1 s on
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from .machine import processor_name

ROUNDS = 3
OPTIONAL = "scipy", "peft", "gguf", "sentencepiece", "torchvision"
COMMAND = [sys.executable, "-m", "sdattn", "generate", "a red circle left of a blue square"]
MOMENTS = "first line", "first step", "last line", "end"
_IMPORT = re.compile(r"import time:\s+\d+ \|\s+(\d+) \|(\s+)(\S+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--imports", type=float, metavar="SECONDS")
    options = parser.parse_args()
    if options.imports is not None:
        print_imports(options.imports)
        return
    there = ", ".join(name for name in OPTIONAL if find_spec(name)) or "none"
    print(f"{processor_name()}; optional packages: {there}")
    runs = [moments() for _ in range(ROUNDS)]
    for name in MOMENTS:
        cpu, wall = zip(*(run[name] for run in runs), strict=True)
        print(f"{name:<12} {min(cpu):6.2f} s of CPU ({max(cpu):.2f})  {min(wall):6.2f} s", end="")
        print(f" ({max(wall):.2f}) after Enter")


def moments() -> dict[str, tuple[float, float]]:
    """Return the CPU seconds and the seconds since the start at which each moment came."""
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = perf_counter()
        process = subprocess.Popen(
            [*COMMAND, "--out", str(Path(folder) / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        read = b""
        while character := process.stdout.read(1):
            read += character
            now = cpu_seconds(process.pid), perf_counter() - start
            if character == b"\n":
                found.setdefault("first line", now)
                found["last line"] = now
            elif read.endswith(b"/20 ["):
                found.setdefault("first step", now)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(read.decode())
        found["end"] = used.ru_utime + used.ru_stime, perf_counter() - start
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has taken, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def print_imports(least: float) -> None:
    """Print each import that took ``least`` seconds, with those inside it, deeper ones indented."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*COMMAND, "--out", str(Path(folder) / "run")]
        command[1:1] = ["-X", "importtime"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for line in reversed(said.splitlines()):  # Python names a module after those that it imports
        if (found := _IMPORT.match(line)) and int(found[1]) >= least * 1e6:
            print(f"{int(found[1]) / 1e6:6.2f} s {found[2]}{found[3]}")


if __name__ == "__main__":
    main()
