"""The processes of a run, as accelerate started them, and the signals that stop them."""

import atexit
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from ...errors import InvalidValueError, RunError, SdattnWarning, warn
from ...files.terminal import say
from ...loading.devices import checked_device
from ..input.request import STOPS

T = TypeVar("T")
# Variables by which torchrun, accelerate and MPI tell a process its rank
_RANKED = {"WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}
_ONE_PROCESS = (
    "accelerate launch --cpu starts one process, whatever --num_processes says. For N of them: "
    "accelerate launch --multi_gpu --num_processes N, and `device='cpu'`"
)
_PATIENCE = timedelta(days=30)  # ranks may end hours apart
_GONE = (
    "Another process of this run has ended. Finished items stay; the same command does the rest."
)
_ECHO = 3.0  # seconds in which a launcher may repeat a signal that its processes already got


class ProcessGroup:
    """The processes of one run; ``first`` is the first of all, ``first_here`` on its machine."""

    def __init__(self, device: str | None = None):
        from accelerate import PartialState
        from accelerate.utils import parse_flag_from_env

        # Without a GPU accelerate would take ranks that do not ask for the CPU for lone processes.
        wanted = checked_device(device)
        on_cpu = wanted.type == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU")
        if on_cpu and "MASTER_ADDR" in os.environ and not _RANKED.intersection(os.environ):
            warn(_ONE_PROCESS, SdattnWarning)
        is_new = not (PartialState._shared_state or torch.distributed.is_initialized())
        self._state = PartialState(cpu=on_cpu, timeout=_PATIENCE)
        self.rank, self.size = self._state.process_index, self._state.num_processes
        self.first, self.first_here = self.rank == 0, self._state.local_process_index == 0
        if device is not None and self.size > 1 and wanted.index is not None:
            raise InvalidValueError(
                f"`device={str(device)!r}` names one for {self.size} processes. Leave it out."
            )
        # By way of the CPU on every device: a GPU is not to wait, nor to hold messages,
        # and gloo notices at once that a process on another machine is gone.
        self._group: Any = None
        if self.size > 1:
            self._group = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)
            if is_new:  # a process can initialize it only once, so a later run goes on with it
                atexit.register(_end)
        self._is_alone = is_new and self.size == 1
        alone = torch.device("cpu") if on_cpu else wanted
        self.device = alone if self.size == 1 else self._state.device

    def broadcast(self, make: Callable[[], T]) -> T:
        """Return to all what the first process makes. Its error is raised in all."""
        if self.size == 1:
            return make()
        results = [_attempt(make) if self.first else (None, None)]
        try:
            torch.distributed.broadcast_object_list(results, src=0, group=self._group)
        except RuntimeError as gone:
            raise RunError(_GONE) from gone
        [(error, made)] = results
        self._raise([error])
        return made  # type: ignore[return-value]

    def run_on_all(self, make: Callable[[], T]) -> T:
        """Call ``make`` in every process; an error in one is raised in all."""
        if self.size == 1:
            return make()
        error, made = _attempt(make)
        self._raise(self.all_gather(error))
        return made  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        found = self.gather_living(value)
        if len(found) < self.size:
            raise RunError(_GONE)
        return list(found.values())

    def gather_living(self, value: T) -> dict[int, T]:
        """Wait until all living processes are here, and return their values by rank; signals are
        heard. Raise RuntimeError if the first process has ended: the others need it."""
        if self.size == 1:
            return {0: value}
        answer = SimpleQueue[tuple[Exception | None, dict[int, T] | None]]()
        exchange = partial(_attempt, partial(self._exchange, value))
        threading.Thread(target=lambda: answer.put(exchange()), daemon=True).start()
        error, found = answer.get()  # torch's own waiting would not hear signals
        if error is not None:
            raise RunError(_GONE) from error
        return found  # type: ignore[return-value]

    def _exchange(self, value: T) -> dict[int, T]:
        if not self.first:
            # The first process collects the others' values, and answers each that is still there.
            self._send(value, 0)
            return self._receive(0)
        found = {0: value}
        # gloo raises a RuntimeError at once if the other process has ended
        for rank in range(1, self.size):
            with suppress(RuntimeError):
                found[rank] = self._receive(rank)
        for rank in found.keys() - {0}:
            with suppress(RuntimeError):
                self._send(found, rank)
        return found

    def _send(self, value: object, rank: int) -> None:
        torch.distributed.send_object_list([value], rank, group=self._group)

    def _receive(self, rank: int) -> Any:
        received = [None]
        torch.distributed.recv_object_list(received, rank, group=self._group)
        return received[0]

    def shared_queue(self, items: Sequence[T], name: str) -> Iterator[T]:
        """Yield the items that this process draws, from a list that is the same in all: each goes
        to the process that asks next. ``name`` is the same in all processes and new."""
        if self.size == 1:
            yield from items
            return
        # An atomic counter: add() returns each number to one process only.
        store = torch.distributed.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # gone with the first process; the next meeting reports that
            while (turn := store.add(f"sdattn/{name}", 1) - 1) < len(items):
                yield items[turn]

    def close(self) -> None:
        """Restore accelerate and torch.distributed as they were before."""
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
        if self._is_alone:
            self._state._reset_state()

    def _raise(self, errors: list[Exception | None]) -> None:
        """Raise the first error in the first process; the others exit silently."""
        found = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if not found:
            return
        if not self.first:
            time.sleep(1)  # a launcher ends the others when one ends: let the first report first
            raise SystemExit(1)
        rank, error = found[0]
        if rank:
            raise RunError(f"process {rank} of {self.size}: {error}") from error
        raise error


def _end() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _attempt(make: Callable[[], T]) -> tuple[Exception | None, T | None]:
    try:
        return None, make()
    except Exception as error:
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error, None
        return RunError(f"{type(error).__name__}: {error}"), None


@contextmanager
def heard(stop: Callable[[str], None]) -> Iterator[None]:
    """Make the first SIGINT or SIGTERM in the block call ``stop`` with its name; another one, some
    seconds later, does what it always does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in STOPS]
    before = {number: signal.getsignal(number) for number in numbers}
    first: list[float] = []

    def handle(number: int, _: object) -> None:
        if not first:
            first.append(time.monotonic())
            name = signal.Signals(number).name
            say(f"{name}: finishing the items in hand")
            stop(name)
        elif time.monotonic() - first[0] > _ECHO:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
