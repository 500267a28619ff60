"""Kill workers and machines under `sdattn batch --engine ray`, and see that nothing is lost.

    scripts/kill_on_ray.py --rounds 12 --seed 7

Two nodes of Ray are begun on this machine, with room for a worker each. In each round a run of the
demo model on two workers is disturbed once, at a random moment: either a worker is killed (SIGKILL)
or the second node is, with all of its processes; the next round has another one. Then every item
has to be there once, whole, with its row, with the bytes that one process here writes, and nothing
unfinished beside it. Exits with 1 where that is not so.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from sdattn.batch import Request, run_batch, verify
from sdattn.batch.storage.folder import BatchFolder

COLOURS = ("red", "green", "blue", "yellow")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--items", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # as Ray's workers have it
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(measure(Path(folder), options))


def measure(folder: Path, options: argparse.Namespace) -> int:
    """The exit code."""
    import ray
    import torch
    from ray.cluster_utils import Cluster

    torch.set_num_threads(1)
    (folder / "in.txt").write_text(
        "".join(
            f"a {COLOURS[i % 4]} car, a {COLOURS[i // 4 % 4]} star\n" for i in range(options.items)
        )
    )
    expected, seconds = draw(folder, "here", options)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    state = {"second": nodes.add_node(num_cpus=1), "nodes": nodes}
    ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
    chance, counts = random.Random(options.seed), Counter()
    for number in range(options.rounds):
        root, node = folder / f"run-{number}", number % 2 == 1
        moment = chance.uniform(0, seconds / 2)  # of what two workers take
        state["said"] = "not killed"
        arguments = (root, moment, node, state)
        disturbing = threading.Thread(target=disturb, args=arguments)
        disturbing.start()
        found, _ = draw(folder, root.name, options, engine="ray", workers=(1, 2))
        disturbing.join()
        if node and "killed, n" in state["said"]:  # in the main thread, since Ray hears signals
            state["second"] = nodes.add_node(num_cpus=1)
        whole = found == expected and is_tidy(root, options.items)
        said = "WRONG" if not whole else state["said"]
        counts[said] += 1
        what = "node" if node else "worker"
        print(
            f"round {number + 1}: {what}, {moment:.1f} s after the first item: {said}", flush=True
        )
    ray.shutdown()
    nodes.shutdown()
    print(", ".join(f"{times} {said}" for said, times in sorted(counts.items())))
    return int("WRONG" in counts)


def draw(folder: Path, out: str, options: argparse.Namespace, **more: object) -> tuple[dict, float]:
    """The files of each item of a run, and how long drawing took."""
    request = Request(
        folder / "in.txt",
        folder / out,
        options={"num_inference_steps": options.steps},
        save=("image", "maps"),
        batch_size=2,
        device="cpu",
        progress=False,
        **more,
    )
    outcome = run_batch(request)
    layout = BatchFolder(folder / out).layout
    files = {item: layout.read(item, place) for item, place in sorted(layout.find())}
    return files, outcome.seconds


def disturb(root: Path, moment: float, node: bool, state: dict) -> None:
    """Kill a worker, or the second node, so many seconds after the first item is there."""
    while not journals(root):
        time.sleep(0.01)
    time.sleep(moment)
    if not journals(root):
        state["said"] = "too late"
    elif node:
        state["nodes"].remove_node(state["second"], allow_graceful=False)
        state["said"] = "killed, nothing lost"
    else:
        os.kill(int(journals(root)[0].stem.rpartition("-")[2]), signal.SIGKILL)
        state["said"] = "killed, nothing lost"


def journals(root: Path) -> list[Path]:
    """What workers have noted of a run that is under way; each has its process's number."""
    found = sorted((root / ".batch/done").glob("*.jsonl"))
    return [path for path in found if path.stem.rpartition("-")[2].isdecimal()]


def is_tidy(root: Path, items: int) -> bool:
    rows = (root / "metadata.jsonl").read_text().splitlines()
    at_work = [*(root / ".batch/tmp").iterdir(), *(root / ".batch/done").iterdir()]
    return verify(root) == (items, []) and len(rows) == items and not at_work


if __name__ == "__main__":
    main()
