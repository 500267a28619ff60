"""The rows of a run in a storage, where nothing can be appended to an object.

.batch/done/NAME-NUMBER.jsonl    rows of one process, written again with each row that is added,
                                 until it is large and the next begins
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from ...files.addresses import Address, at_once
from ...files.copies import Copies
from .journals import FolderJournals

_LARGE = 2**18  # bytes of a part; the next begins
_EVERY = 1.0  # seconds in which rows are written together
_SLOW = {"hf": 60.0}  # where each writing is a commit


@dataclass
class _Part:
    """The object in hand of a kind: what it holds, and how much of that has been written."""

    location: Address
    rows: bytearray = field(default_factory=bytearray)
    written: int = 0


class StorageJournals(FolderJournals):
    """The rows of a run in a storage, see
    :class:`sdattn.batch.storage.journals.FolderJournals`. They are read from copies.

    Failures are written at once; rows of items after a second, with those that came meanwhile, or
    at ``flush``. An item whose row a kill has lost is drawn again, or found by its ``run.json``.
    """

    def __init__(
        self, root: Address, hidden: Address, write: Callable[[str, Iterable[bytes]], None]
    ):
        super().__init__(root, hidden, write)
        self._copies = Copies()
        self._parts: dict[str, _Part] = {}
        self._own: dict[str, list[Address]] = defaultdict(list)  # also what no listing shows yet
        self._name = uuid4().hex[:8]  # another of this process's name may have been here before
        self._every, self._flushed = _SLOW.get(root.scheme, _EVERY), 0.0
        self._waits = self._begun = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Rows that are noted in the block are written at its end, all or none of a kind."""
        with self._writing:
            self._waits += 1
        try:
            yield
        finally:
            with self._writing:
                self._waits -= 1
        self.flush()

    def flush(self) -> None:
        """Write what has been noted.

        Raises:
            OSError: it cannot be written; the next call tries it again.
        """
        with self._writing:
            self._flush()

    def close(self) -> None:
        with suppress(OSError):  # raised before, where the rows were noted
            self.flush()
        self._parts.clear()

    def _append(self, kind: str, writer: str, data: bytes) -> None:
        with self._writing:
            part = self._parts.get(kind)
            if part is None or part.written >= _LARGE:
                part = self._parts[kind] = self._begin(kind, writer)
            part.rows += data
            # Each write sends the whole part again, so rows are collected for a while; a failure
            # goes out at once, since it may be the last thing that this process says.
            late = time.monotonic() - self._flushed >= self._every
            if kind == "failed" or (late and not self._waits):
                self._flush()

    def _begin(self, kind: str, writer: str) -> _Part:
        self._begun += 1
        location = self.hidden / kind / f"{writer}-{self._name}-{self._begun:06d}.jsonl"
        self._own[kind].append(location)
        return _Part(location)

    def _flush(self) -> None:
        for part in self._parts.values():
            if len(part.rows) > part.written:
                part.location.write_bytes(bytes(part.rows))
                part.written = len(part.rows)
        self._flushed = time.monotonic()

    def _noted(self, kind: str) -> list[Any]:
        self.flush()
        return sorted({*super()._noted(kind), *self._own[kind]})

    def _read(self, locations: Iterable[Any]) -> list[Path]:
        return self._copies.of_all(locations)

    def _forget(self, kind: str, noted: Iterable[Any]) -> None:
        with self._writing:
            self._parts.pop(kind, None)
            self._own[kind].clear()
            at_once(partial(Address.unlink, missing_ok=True), noted)
