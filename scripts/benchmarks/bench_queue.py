"""What is gained by computing five layers of one shape together, on this machine's CPU or GPU.

    python -m scripts.benchmarks.bench_queue

Shapes are those of the demo model, SD 1.5 and SDXL, of one guided image, of which one row of two is
kept. The ratio is of CPU time (on a GPU of time): five layers together, to one after the other.
`SMALL_ON_CPU` of :mod:`sdattn.keep.queue` is where it passes 1.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from sdattn.attention.calls import ProjectedCall
from sdattn.follow.passes import Pass
from sdattn.keep import queue
from sdattn.keep.keep import Keep
from sdattn.keep.sums import Sum
from sdattn.models.layers import AttentionLayer

from .machine import machine_name

LAYERS, KEYS = 5, 77
KEPT = slice(1, 2)  # of two rows
SHAPES = {  # queries, heads, width of a head
    "demo, 4x4": (16, 4, 24),
    "demo, 8x8": (64, 4, 20),
    "demo, 16x16": (256, 4, 16),
    "SD 1.5, 8x8": (64, 8, 160),
    "SD 1.5, 16x16": (256, 8, 160),
    "SD 1.5, 32x32": (1024, 8, 80),
    "SD 1.5, 64x64": (4096, 8, 40),
    "SDXL, 32x32": (1024, 20, 64),
    "SDXL, 64x64": (4096, 10, 64),
}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {machine_name(device)}, one thread, float32\n")
    print("| layers | numbers of one | apart | together | ratio |\n|---|---|---|---|---|")
    for name, (cells, heads, width) in SHAPES.items():
        apart, together = measure(cells, heads, width, device)
        ratio = statistics.median(b / a for a, b in zip(apart, together, strict=True))
        times = f"{1e3 * min(apart):.3f} ms | {1e3 * min(together):.3f} ms | {ratio:.2f}"
        print(f"| {name} | {2 * (cells + KEYS) * heads * width:,} | {times} |")


@torch.no_grad()
def measure(cells: int, heads: int, width: int, device: str) -> tuple[list[float], list[float]]:
    """Seconds of each round, apart and together."""
    made = [
        [torch.randn(2, length, heads * width, device=device) for length in (cells, KEYS)]
        for _ in range(LAYERS)
    ]
    calls = [ProjectedCall(query, key, heads) for query, key in made]
    other = torch.zeros(1 << 21, device=device)  # what runs between two passes fills the caches
    order = "unconditional", "conditional"
    begun = Pass(0.0, None, 2, order, (1,), ("conditional",))
    layer = AttentionLayer("layer", "mid", "cross", 0, heads, None)
    ways = {}
    for name in ("apart", "together"):
        waiting = queue.Queue()
        ways[name] = [Sum(replace(layer, name=str(n)), Keep(), waiting) for n in range(LAYERS)]

    def run(name: str) -> None:
        """Run a pass, of which what is put together is added at its end."""
        for layer_sum, call in zip(ways[name], calls, strict=True):
            layer_sum.running = replace(begun)
            layer_sum.take(call)
        if name == "together":
            layer_sum.queue.end_pass()

    def apart() -> None:
        run("apart")

    def together() -> None:
        run("together")

    def seconds(work: Callable[[], None]) -> float:
        other.add_(1)
        if device == "cuda":
            torch.cuda.synchronize()
        clock = time.thread_time if device == "cpu" else time.perf_counter
        start = clock()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    queue.SMALL_ON_CPU = sys.maxsize  # all of them wait
    rounds = [(seconds(apart), seconds(together)) for _ in range(40)][5:]
    first, second = zip(*rounds, strict=True)
    return list(first), list(second)


if __name__ == "__main__":
    main()
