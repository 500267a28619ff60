"""The machine that a benchmark runs on, and how long and how much memory a call takes there."""

import platform
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
    """Seconds that a call takes, on a GPU by its own events."""
    finish()
    if torch.cuda.is_available():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        finish()
        return start.elapsed_time(end) / 1000
    before = perf_counter()
    call()
    return perf_counter() - before


def forget_peak(device: str) -> None:
    """Let :func:`peak_bytes` begin from here; of the CPU's memory on Linux only."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """The most memory that this process has had, on the device, since ``forget_peak``."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    [peak] = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) * 1024
