"""The machine that a benchmark runs on, and how long and how much memory a call takes there."""

import platform
import resource
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch


def processor_name() -> str:
    """Of the CPU, with the number of torch's threads."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def machine_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else processor_name()


def finish() -> None:
    """Wait for what a GPU was told to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    finish()
    start = perf_counter()
    call()
    finish()
    return perf_counter() - start


def peak_bytes(device: str) -> int:
    """The most memory that this process has had, on the device."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
