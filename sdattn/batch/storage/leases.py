"""Ownership of a run in a storage without locks: an object that is written again and again.

.batch/lease.json    job, user, host, process, since and the number of the beat
"""

import json
import threading
import time
from contextlib import suppress
from uuid import uuid4

from ...files.addresses import Address
from ...files.terminal import say
from .locks import Ownership, owner

_BEAT = 20.0  # seconds between two signs of life
_SLOW = {"hf": 300.0}  # every beat is a commit there
_MISSED = 3  # beats after which a job counts as dead
_NOT_MINE = "another job has taken {}, since this one gave no sign of life for too long"


class StorageLease(Ownership):
    """One job at a time: its first process takes the lease, the others join it. A killed process is
    recognized by its unchanging beat, so no clocks are compared."""

    note: Address

    def __init__(self, path: Address, what: Address):
        super().__init__(path, what)
        self.beat = _SLOW.get(path.scheme, _BEAT)
        self._lost: str | None = None
        self._joined: str | None = None
        self._mine: dict[str, object] = {}
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> str | None:
        """Reason why the lease was lost, or None; a process that joined checks each time."""
        if self._lost is None and self._joined and not self.join(self._joined):
            self._lost = _NOT_MINE.format(self.what)
        return self._lost

    def take(self, job: str) -> None:
        """Take the lease for a job, and keep it until :meth:`release`; raise OSError if another job
        has it and lives, which takes a while to see."""
        self._wait_for(self.holder)
        self._joined, self._mine = None, owner(job)
        # Write, wait, and see who wrote last: a storage has no other way to let one of two win.
        with suppress(FileExistsError):  # another was quicker, or this very one
            self.note.create(self._written(0))
        time.sleep(self.beat / 20)  # another may have written at the same time: the last one has it
        if not self._is_mine():
            self._refuse()
        self._end.clear()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="lease")
        self._thread.start()

    def join(self, job: str) -> bool:
        found = self.holder.get("job") == job
        self._joined = job if found else self._joined
        return found

    def free(self, *, unknown: bool = True) -> bool:
        """Check that nobody has the lease; a killed job still has it for some beats."""
        alive = self.holder.get("alive")
        return not isinstance(alive, float) or time.time() - alive > _MISSED * self.beat

    def release(self) -> None:
        if self._thread is None:
            return
        self._end.set()
        self._thread.join()
        self._thread = None
        with suppress(OSError):  # the lease stays, and the next job finds that nobody has it
            if self._is_mine():
                self.note.unlink(missing_ok=True)

    def _wait_for(self, before: dict[str, object]) -> None:
        """Raise if the holder lives; otherwise remove its lease."""
        if not before:
            self.note.unlink(missing_ok=True)  # a file that is not a lease
            return
        patience = _MISSED * self.beat
        say(
            f"{self.what} was not given back by {self.describe_holder()}; waiting up to "
            f"{patience:.0f} s to see whether that job lives"
        )
        end = time.monotonic() + patience
        while time.monotonic() < end:
            time.sleep(self.beat / 4)
            now = self.holder
            if not now:
                return
            if now.get("sign") != before.get("sign"):
                self._refuse()
        self.note.unlink(missing_ok=True)

    def _is_mine(self) -> bool:
        return self.holder.get("job") == self._mine["job"]

    def _written(self, beat: int) -> bytes:
        sign = {"beat": beat, "sign": uuid4().hex, "alive": time.time()}
        return json.dumps({**self._mine, **sign}).encode()

    def _keep(self) -> None:
        """Show that this job lives, until it ends or has lost the lease."""
        beat, seen = 0, time.monotonic()
        while not self._end.wait(self.beat):
            beat += 1
            try:
                if not self._is_mine():
                    self._lost = _NOT_MINE.format(self.what)
                    return
                self.note.write_bytes(self._written(beat))
                seen = time.monotonic()
            except OSError as error:
                if time.monotonic() - seen > _MISSED * self.beat:  # others count it as dead
                    self._lost = f"no sign of life could be written: {error}"
                    return
