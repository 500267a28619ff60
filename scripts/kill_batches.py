"""Kill `sdattn batch` at random moments, repeat the command, and see that nothing is lost.

    scripts/kill_batches.py --rounds 60 --seed 7

Each round draws a list with the demo model into a new folder, in one of the two formats, kills
something (SIGKILL) at a random moment, and repeats the command until it ends by itself:

    command   the whole command
    part      one of two commands that draw two parts into one folder at once
    worker    a process of --workers 2
    ray       a worker of Ray, of two

Then the folder has to hold the bytes of an undisturbed run, and nothing else. Exits with 1 where it
does not.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from sdattn.batch import Request, run_batch, verify
from sdattn.batch.shard import describe
from sdattn.loading.quiet import quiet_libraries

COLOURS = ("red", "green", "blue", "yellow")
FORMATS = ("folder", "webdataset")
KINDS = ("command", "part", "worker", "command", "part", "ray")
ITEMS = 24
FORK = multiprocessing.get_context("fork")  # it has imported torch, and loaded the model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which are taken in turn")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # as Ray's workers have it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(measure(Path(folder), options))


def measure(folder: Path, options: argparse.Namespace) -> int:
    """Return the exit code."""
    import torch

    torch.set_num_threads(1)
    quiet_libraries(prompts=True)
    lines = (f"a {COLOURS[i % 4]} car, a {COLOURS[i // 4 % 4]} star\n" for i in range(ITEMS))
    (folder / "in.txt").write_text("".join(lines))
    usual = Request(
        folder / "in.txt",
        options={"num_inference_steps": 2},
        save=("image", "maps"),
        batch_size=2,
        shard_items=4,
        device="cpu",
        progress=False,
    )
    expected, seconds = {}, {}
    for format in FORMATS:
        root, start = folder / f"undisturbed-{format}", time.monotonic()
        begin(replace(usual, out=root, format=format)).join()
        seconds[format] = time.monotonic() - start
        expected[format] = files_of(root)
        assert verify(root) == (ITEMS, [])
    kinds, chance, counts = options.kinds.split(","), random.Random(options.seed), Counter()
    for number in range(options.rounds):
        kind, format = kinds[number % len(kinds)], FORMATS[number // len(kinds) % len(FORMATS)]
        request = replace(usual, out=folder / f"run-{number}", format=format)
        moment = chance.uniform(0, seconds[format])
        killed = ROUNDS[kind](request, moment, chance)
        found = files_of(request.out)
        is_right = found == expected[format] and verify(request.out) == (ITEMS, [])
        said = ("killed, nothing lost" if killed else "ended before") if is_right else "WRONG"
        counts[said] += 1
        print(f"round {number + 1}: {kind}, {format}, after {moment:.1f} s: {said}", flush=True)
        if not is_right:
            names = {**found, **expected[format]}
            differing = [n for n in names if found.get(n) != expected[format].get(n)]
            print(f"    {differing[:5]} differ", flush=True)
    print(", ".join(f"{times} {said}" for said, times in sorted(counts.items())))
    return int("WRONG" in counts)


def begin(request: Request) -> multiprocessing.Process:
    describe(replace(request, device="cpu"))  # loaded once, before any fork
    process = FORK.Process(target=partial(command, request))
    process.start()
    return process


def command(request: Request) -> None:
    sys.exit(run_batch(request).exit_code)


def finish(request: Request) -> None:
    process = begin(request)
    process.join()
    assert process.exitcode == 0, process.exitcode


def kill_command(request: Request, moment: float, chance: random.Random) -> bool:
    process = begin(request)
    process.join(moment)
    killed = process.is_alive()
    process.kill()
    process.join()
    finish(request)
    return killed


def kill_part(request: Request, moment: float, chance: random.Random) -> bool:
    parts = [begin(replace(request, part=(which, 2))) for which in (1, 2)]
    victim, other = chance.sample(parts, 2)
    victim.join(moment / 2)
    killed = victim.is_alive()
    victim.kill()
    other.join()
    assert other.exitcode == 0
    finish(request)
    return killed


def kill_worker(request: Request, moment: float, chance: random.Random) -> bool:
    process = begin(replace(request, workers=2))
    killed = kill_below(process, moment, chance, "spawn_main")
    process.join()
    assert process.exitcode == 0, process.exitcode
    return killed


def kill_on_ray(request: Request, moment: float, chance: random.Random) -> bool:
    process = begin(replace(request, engine="ray", workers=2))
    killed = kill_below(process, moment, chance, "ray::_on_ray")
    process.join()
    assert process.exitcode == 0, process.exitcode
    return killed


ROUNDS = {"command": kill_command, "part": kill_part, "worker": kill_worker, "ray": kill_on_ray}


def kill_below(
    process: multiprocessing.Process, moment: float, chance: random.Random, name: str
) -> bool:
    """Kill a process below one, ``moment`` seconds after the first that is so called."""
    while process.is_alive() and not named_below(process, name):
        time.sleep(0.05)
    process.join(moment)
    for victim in chance.sample(found := named_below(process, name), min(1, len(found))):
        victim.kill()
        return True
    return False


def named_below(process: multiprocessing.Process, name: str) -> list[psutil.Process]:
    found = []
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            with child.oneshot():
                if any(name in word for word in child.cmdline()):
                    found.append(child)
    except psutil.Error:  # it ended meanwhile
        pass
    return found


def files_of(root: Path) -> dict[str, bytes]:
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


if __name__ == "__main__":
    main()
