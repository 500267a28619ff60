"""Threads of a run on a CPU: one for a small model, else as many as torch has.

The threads of a small operation wait for each other, longest on a machine with other work. So a
pipeline of fewer than :data:`SMALL` weights on a CPU runs in one thread. The user's choice stays:
``OMP_NUM_THREADS``, or ``torch.set_num_threads`` with another number than the machine's cores.

Seeds and noise do not depend on the threads, but sums are rounded in another order, so images and
maps are equal bit for bit only in as many threads. The choice follows from the model and these
settings, never from the time a step takes: the same call makes the same bits each time. The
pipeline's own call makes them too if it runs in one thread as well.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..errors import SdattnWarning, warn
from .denoiser import held_model
from .denoiser_call import is_compiled

SMALL = 50_000_000  # weights of a pipeline that runs in one thread on a CPU
SLOW = 1.0  # seconds a step


def limit_threads(pipe: object) -> None:
    """Let torch have one thread from now on, if the model is small and the user chose no number."""
    is_chosen = "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() not in _cores()
    if not is_chosen and _is_small_on_cpu(pipe):
        torch.set_num_threads(1)


@contextmanager
def few_threads(pipe: object) -> Iterator[None]:
    """Limit the threads inside the block, see :func:`limit_threads`, and put their number back."""
    before = torch.get_num_threads()
    limit_threads(pipe)
    is_limited = torch.get_num_threads() != before
    try:
        yield
    finally:
        if is_limited:
            torch.set_num_threads(before)


@contextmanager
def warn_of_slow_steps(
    pipe: object, clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Warn inside the block, at the first slow step after the first of all, if a small model runs
    in several threads; ``clock`` returns seconds. A compiled model is not watched: a hook would
    compile it again."""
    model = held_model(pipe)
    cannot_wait = torch.get_num_threads() == 1 or not _is_small_on_cpu(pipe)
    if cannot_wait or model is None or is_compiled(model):
        yield
        return
    ends: list[float] = []

    def note_end(*_: object) -> None:
        ends.append(clock())
        if len(ends) > 1 and ends[-1] - ends[-2] > SLOW:
            hook.remove()
            warn(
                "Steps of this small model take more than a second each. Its threads may be "
                "waiting for each other: set OMP_NUM_THREADS=1 before Python starts.",
                SdattnWarning,
            )

    hook = model.register_forward_hook(note_end)
    try:
        yield
    finally:
        hook.remove()


def _is_small_on_cpu(pipe: object) -> bool:
    device = getattr(pipe, "_execution_device", None)  # its weights may be elsewhere (offload)
    if getattr(device, "type", None) != "cpu":
        return False
    n_weights = 0
    for part in vars(pipe).values():
        if isinstance(part, torch.nn.Module):
            n_weights += sum(weight.numel() for weight in part.parameters())
    return n_weights < SMALL


def _cores() -> set[int | None]:
    """Return the numbers that torch may begin with: this machine's, or this process's, cores."""
    import psutil

    cores = {os.cpu_count(), psutil.cpu_count(logical=False)}
    return cores | ({len(os.sched_getaffinity(0))} if hasattr(os, "sched_getaffinity") else set())
