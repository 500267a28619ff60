"""What `sdattn batch` costs: items a second of the demo model, 20 steps, one thread a process.

"plain" is a bare loop of the pipeline over the same batches from the same noise: no capture,
nothing written; "plain, 2 at once" are two such processes, the most that two workers can do on the
machine. The others are the command itself. Every run is a process of its own, in turn,
round by round, so that the ratios hold on a machine whose speed drifts; loading is not counted.
The runs on Ray (--runs) need `pip install 'sdattn[ray]'`. --beside CHECKOUT makes each run with the
sdattn of another checkout too, in the same rounds.

--plan N instead takes the time of one core and the peak memory, beyond the imports, of planning a
list of N lines, without and with "words". --run N takes the time of planning, telling, summarising
and verifying a run of N items, beside that of drawing 100. --memory compares the peak memory of 200
and of 2,000 items.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from .machine import forget_peak, machine_name, peak_bytes, processor_name

BATCH = 8
DATA = ["--save", "image,maps"]
TWO = ["--workers", "2"]
VARIANTS = {  # name: options
    "image and maps": DATA,
    "image and maps, webdataset": [*DATA, "--format", "webdataset"],
    "all that generate writes": [],
    "image and maps, 2 processes": [*DATA, *TWO],
    "all, 2 processes": TWO,
    "image and maps, Ray": [*DATA, "--engine", "ray", "--workers", "1"],
    "image and maps, 2 workers of Ray": [*DATA, "--engine", "ray", *TWO],
}
PLAIN, TWICE = "plain", "plain, 2 at once"
BESIDE = {  # what a run is compared with
    TWICE: PLAIN,
    "image and maps, 2 processes": "image and maps",
    "all, 2 processes": "all that generate writes",
    "image and maps, Ray": "image and maps",
    "image and maps, 2 workers of Ray": "image and maps, Ray",
}
PLANS = {  # name: do lines ask for words, are all prompts different
    "without words": (False, False),
    "with words": (True, False),
    "with words, all prompts different": (True, True),
}
OTHER = ", other checkout"
AGAIN = ["-m", "scripts.benchmarks.bench_batch"]


def write_prompts(path: Path, number: int, *, words: bool = False, distinct: bool = False) -> None:
    """Write a list of prompts, as JSON lines that ask for two words each if ``words``; some 900
    different ones, unless each is ``distinct``."""
    chance = random.Random(0)
    colours = "red", "green", "blue", "yellow", "purple", "pink"
    things = "car", "bird", "balloon", "star", "heart"
    with path.open("w") as file:
        for line in range(number):
            pair = [chance.choice(things) for _ in range(2)]
            first, second = (f"a {chance.choice(colours)} {thing}" for thing in pair)
            text = f"{first} left of {second}" + (f", number {line}" if distinct else "")
            written = json.dumps({"prompt": text, "words": pair}) if words else text
            file.write(f"{written}\n")


def run(command: list[str], checkout: Path | None = None) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if checkout:
        environment["PYTHONPATH"] = str(checkout)
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def batch(prompts: Path, device: str, options: list[str], checkout: Path | None = None) -> float:
    """Items a second of the command."""
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", f"{folder}/run", "--batch-size", str(BATCH), "--device", device]
        command = ["-m", "sdattn", "batch", str(prompts), *out, *options]
        text = " ".join(run(command, checkout).split())
    return float(re.search(r"([\d.e+]+) a second", text)[1])


def plainly(prompts: Path, device: str, processes: int) -> float:
    """Items a second of so many processes together that only draw."""
    command = [*AGAIN, "--plain", str(prompts), "--device", device]
    with ThreadPoolExecutor() as pool:
        return sum(pool.map(lambda _: float(run(command)), range(processes)))


def draw_plainly(prompts: Path, device: str) -> None:
    """Print the items a second of a loop that only draws."""
    import torch

    from sdattn import load_pipeline

    pipe = load_pipeline("demo", device=device)
    pipe.set_progress_bar_config(disable=True)
    lines = prompts.read_text().splitlines()
    start = time.perf_counter()
    for first in range(0, len(lines), BATCH):
        texts = lines[first : first + BATCH]
        seeds = range(first, first + len(texts))
        noise = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        pipe(texts, generator=noise, num_inference_steps=20, guidance_scale=3.0)
    print(len(lines) / (time.perf_counter() - start))


def measure_pace(
    items: int, rounds: int, device: str, runs: list[str], beside: Path | None
) -> dict[str, list[float]]:
    """Items a second in each round, by name of the run."""
    others = [f"{name}{OTHER}" for name in runs] if beside else []
    found: dict[str, list[float]] = {name: [] for name in (PLAIN, TWICE, *runs, *others)}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.txt")
        write_prompts(prompts, items)
        for turn in range(rounds):
            names = list(found)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if name in (PLAIN, TWICE):
                    pace = plainly(prompts, device, 1 if name == PLAIN else 2)
                elif name.endswith(OTHER):
                    options = VARIANTS[name.removesuffix(OTHER)]
                    pace = batch(prompts, device, options, beside)
                else:
                    pace = batch(prompts, device, VARIANTS[name])
                found[name].append(pace)
                print(f"round {turn + 1}, {name}: {pace:.3g} items/s", file=sys.stderr)
    return found


def print_pace(found: dict[str, list[float]], device: str) -> None:
    machine = processor_name().split(",")[0] if device == "cpu" else machine_name(device)
    print(f"\n{machine}, {os.cpu_count()} cores, one thread a process\n")
    print("| run | items/s | of plain | of one process | of the other checkout |")
    print("|---|---|---|---|---|")
    for name, paces in found.items():
        kind, other, _ = name.partition(OTHER)
        one = f"{BESIDE.get(kind)}{other}"
        cells = [f"{statistics.median(paces):.2f}"]
        for slower in (PLAIN, one, f"{name}{OTHER}"):
            cells.append(ratio(paces, found[slower]) if slower in found else "")
        print(f"| {name} | {' | '.join(cells)} |")


def ratio(paces: list[float], others: list[float]) -> str:
    """The median of the rounds' ratios, and their range."""
    found = [a / b for a, b in zip(paces, others, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def measure_memory() -> dict[str, dict[int, float]]:
    """Peak memory in MB of one process, by number of items."""
    found: dict[str, dict[int, float]] = {"folder": {}, "webdataset": {}}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.txt")
        for format_ in found:
            for items in (200, 2000):
                write_prompts(prompts, items)
                out = ["--out", f"{folder}/{format_}-{items}", "--format", format_]
                more = ["--batch-size", str(BATCH), "--steps", "1", *DATA]
                found[format_][items] = peak_of(
                    ["-m", "sdattn", "batch", str(prompts), *out, *more]
                )
                print(f"{format_}, {items} items: {found[format_][items]:.0f} MB", file=sys.stderr)
    return found


def peak_of(command: list[str]) -> float:
    """Peak resident memory of a command, in MB; asked in a process of its own."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
        "stdout=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    return float(run(["-c", code, sys.executable, *command])) / 1000


def print_memory(found: dict[str, dict[int, float]]) -> None:
    print("\n| format | 200 items | 2,000 items | ratio |\n|---|---|---|---|")
    for name, one in found.items():
        print(f"| {name} | {one[200]:.0f} MB | {one[2000]:.0f} MB | {one[2000] / one[200]:.3f} |")


def measure_plans(lines: int) -> dict[str, dict[str, float]]:
    """Seconds of one core, and MB beyond the imports, of planning lists in fresh processes."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (words, distinct) in PLANS.items():
            prompts = Path(folder, "prompts.jsonl" if words else "prompts.txt")
            write_prompts(prompts, lines, words=words, distinct=distinct)
            found[name] = json.loads(run([*AGAIN, "--plan-of", str(prompts)]))
    return found


def plan(prompts: Path) -> None:
    """Print the seconds and MB of planning a list."""
    from sdattn.batch.plan import make_plan
    from sdattn.batch.request import Request
    from sdattn.loading.pipelines import load_pipeline

    pipe = load_pipeline("demo", device="cpu")
    few = prompts.with_name(f"few{prompts.suffix}")
    with prompts.open("rb") as lines:
        few.write_bytes(b"".join(islice(lines, 10)))
    make_plan(Request(few), pipe).close()  # imports what is needed
    forget_peak("cpu")
    before, start = peak_bytes("cpu"), time.process_time()
    with make_plan(Request(prompts), pipe):
        made = {"seconds": time.process_time() - start, "MB": (peak_bytes("cpu") - before) / 1e6}
    print(json.dumps(made))


def measure_run(items: int) -> dict[str, float]:
    """Seconds of what is done with a whole run, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(Path(folder, "prompts.txt"), items)
        options = ["--out", f"{folder}/run", "--limit", "100", "--format", "webdataset", *DATA]
        options += ["--batch-size", str(BATCH), "--device", "cpu"]
        text = run(["-m", "sdattn", "batch", f"{folder}/prompts.txt", *options])
        seconds = float(re.search(r"made in ([\d.]+) s", " ".join(text.split()))[1])
        told = json.loads(run([*AGAIN, "--run-of", folder, "--items", str(items)]))
    return {"drawing 100": seconds, **told}


def take_run(folder: Path, items: int) -> None:
    """Print the seconds of each part of a run of so many items, which are copies of those drawn."""
    from sdattn.batch import open_batch, status, verify
    from sdattn.batch.checking import summarize
    from sdattn.batch.plan import make_plan
    from sdattn.batch.request import Request
    from sdattn.loading.pipelines import load_pipeline

    pipe = load_pipeline("demo", device="cpu")
    copy_items(folder / "run", items)
    parts = {
        "planning": lambda: make_plan(Request(folder / "prompts.txt"), pipe).close(),
        "--status": lambda: status(folder / "run"),
        "open_batch()": lambda: open_batch(folder / "run"),
        "--summarize": lambda: summarize(folder / "run"),
        "--verify": lambda: verify(folder / "run"),
    }
    found = {}
    for name, call in parts.items():
        start = time.perf_counter()
        made = call()
        found[name] = time.perf_counter() - start
    assert made == (items, []), made
    print(json.dumps(found))


def copy_items(root: Path, items: int) -> None:
    """Make a run's items so many, with ids and records of their own."""
    from dataclasses import replace
    from itertools import cycle, islice

    from sdattn.batch.formats import format_of
    from sdattn.batch.records import ShardRecord, read_manifest, read_records, record_name, row_of
    from sdattn.files.place import Place
    from sdattn.files.records import sealed
    from sdattn.files.writing import sha256
    from sdattn.runs.info import read_info

    place = Place(root)
    manifest = read_manifest(place)
    format = format_of(place, manifest)
    drawn = []
    for record in read_records(place, manifest):
        drawn += [(format.read(row["place"], row["id"]), row["thumb"]) for row in record.rows]
    copies = cycle(drawn)
    for number, first in enumerate(range(1, items + 1, 100)):
        lines = range(first, min(items + 1, first + 100))
        held = []
        with format.writer(number) as writer:
            for line, (files, thumb) in zip(lines, islice(copies, len(lines)), strict=True):
                own = {"id": f"{line:06d}", "line": line}
                files = {**files, "run.json": sealed({**json.loads(files["run.json"]), **own})}
                writer.add(own["id"], files)
                held.append((files, thumb))
            data, locations = writer.finish()
        rows = []
        for files, thumb in held:
            info = read_info(files, "a copy")
            sizes = {name: len(content) for name, content in files.items()}
            row = row_of(info, locations[info.id], sha256(files["run.json"]), sizes)
            rows.append({**row, "thumb": thumb})
        written = ShardRecord(number, record.fingerprint, data, record.sheet, rows)
        place.publish(record_name(number), written.packed())
    told = replace(manifest.input, items=items, shards=[record.fingerprint] * (number + 1))
    place.publish("batch.json", replace(manifest, input=told).sealed())


def print_run(found: dict[str, float], items: int) -> None:
    print(f"\n{processor_name().split(',')[0]}\n\n| a run of {items:,} items | seconds |")
    print("|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.1f} |")
    print(f"| all but drawing | {sum(found.values()) - found['drawing 100']:.1f} |")


def print_plans(found: dict[str, dict[str, float]], lines: int) -> None:
    print(f"\n{processor_name().split(',')[0]}\n\n| {lines:,} lines | one core | memory |")
    print("|---|---|---|")
    for name, one in found.items():
        print(f"| {name} | {one['seconds']:.1f} s | {one['MB']:.0f} MB |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    local = [name for name in VARIANTS if "Ray" not in name]
    parser.add_argument("--items", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="32 items, 2 rounds")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--plan", type=int, metavar="N")
    parser.add_argument("--run", type=int, metavar="N")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--device", default="cpu", help="of the pace")
    parser.add_argument("--runs", nargs="+", choices=VARIANTS, default=local)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another sdattn's folder")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        draw_plainly(arguments.plain, arguments.device)
        return
    if arguments.plan_of:
        plan(arguments.plan_of)
        return
    if arguments.run_of:
        take_run(arguments.run_of, arguments.items)
        return
    if arguments.quick:
        arguments.items, arguments.rounds = 32, 2
    if arguments.memory:
        found = measure_memory()
        print_memory(found)
    elif arguments.run:
        found = measure_run(arguments.run)
        print_run(found, arguments.run)
    elif arguments.plan:
        found = measure_plans(arguments.plan)
        print_plans(found, arguments.plan)
    else:
        found = measure_pace(
            arguments.items, arguments.rounds, arguments.device, arguments.runs, arguments.beside
        )
        print_pace(found, arguments.device)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
