"""A run's folder in a bucket, which has no renaming, no appending and no real folders.

An object is complete or absent. An item's ``run.json`` is written after its other files and removed
before them, so that an item with it is whole.

    .batch/done/NAME-NUMBER.jsonl    rows of one process, written again with each row that is
                                     added, until it is large and the next begins
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from uuid import uuid4

from ...errors import AccessError
from ...files.addresses import Address, Copies, at_once
from ...files.paths import inside
from .leases import StorageLease
from .locks import Ownership
from .storage import Storage

_NEAR = 64  # groups of items with cached listings
_KEPT = 4  # shards with local copies
_LAST = "run.json"
_LARGE = 2**18  # bytes of a part of rows after which the next begins
_EVERY = 1.0  # seconds in which rows are collected before writing
_SLOW = {"hf": 60.0}  # every write is a commit there


@dataclass
class _Part:
    """The current object of a kind, and how much of it has been written."""

    name: str
    rows: bytearray = field(default_factory=bytearray)
    written: int = 0


class Bucket(Storage):
    """A bucket. Failures are written at once; rows of items after a second, together with later
    ones, or at ``flush``. An item whose row was lost is drawn again, or found by its
    ``run.json``."""

    is_remote = True

    def __init__(self, root: Address):
        self.root = root
        self.lock: Ownership = StorageLease(root / ".batch/lease.json", root)
        self._group = lru_cache(_NEAR)(self._list_group)
        self._shards, self._reading = Copies(_KEPT), threading.RLock()
        self._copies, self._writing = Copies(), threading.RLock()
        self._parts: dict[str, _Part] = {}
        self._own: dict[str, list[str]] = defaultdict(list)  # including those not yet listed
        self._process = uuid4().hex[:8]  # an earlier process may have had the writer's name
        self._every, self._flushed = _SLOW.get(root.scheme, _EVERY), 0.0
        self._waits = self._begun = 0

    # Single files

    def listing(self, folder: str) -> dict[str, int]:
        found = inside(self.root, folder).sizes()
        return {f"{folder}/{name}": size for name, size in found.items()}

    def copies(self, names: Iterable[str]) -> list[Path]:
        return self._copies.of_all(inside(self.root, name) for name in names)

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        with self._reading:  # another thread's copy could replace this one
            yield self._shards.of(inside(self.root, name), name)

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        if self.lock.lost:
            raise AccessError(self.lock.lost)
        (self.root / name).write_parts(parts)

    # Folders of items

    def folders(self) -> Iterator[tuple[str, bool]]:
        self._group.cache_clear()
        for group in (self.root / "items").glob("[0-9]*"):
            for item, names in self._group(f"items/{group.name}").items():
                yield f"items/{group.name}/{item}", _LAST in names

    def names(self, folder: str) -> list[str]:
        return sorted(inside(self.root, folder).sizes())

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        found = {}
        with suppress(ValueError):  # a location outside the folder
            root = inside(self.root, folder)
            listed = self._listed(folder)
            for name in names:
                size = listed.get(name)
                if size is None:  # a listing can be late
                    size = inside(root, name).size()
                if size is not None:
                    found[name] = size
        return found

    def read(self, folder: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
        root, found = inside(self.root, folder), {}
        if names is None:
            names = self._listed(folder) or self.names(folder)
        for name in names:
            with suppress(FileNotFoundError):
                found[name] = inside(root, name).read_bytes()
        return found

    def write_folder(self, folder: str, files: Mapping[str, bytes]) -> None:
        root = inside(self.root, folder)
        for name in sorted(files, key=lambda name: (name == _LAST, name)):
            inside(root, name).write_bytes(files[name])

    def delete_folder(self, folder: str) -> None:
        root = inside(self.root, folder)
        for name in sorted({*self.names(folder), _LAST}, key=lambda name: name != _LAST):
            (root / name).unlink(missing_ok=True)
        self._group.cache_clear()

    def _listed(self, folder: str) -> dict[str, int]:
        group, _, item = folder.rpartition("/")
        return self._group(group).get(item, {})

    def _list_group(self, group: str) -> dict[str, dict[str, int]]:
        """Return the bytes of a thousand items' objects, by item and name."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        for path, size in inside(self.root, group).sizes().items():
            item, _, name = path.partition("/")
            found[item][name] = size
        return {**found}

    # Rows that processes append

    def append(self, kind: str, writer: str, data: bytes) -> None:
        with self._writing:
            part = self._parts.get(kind)
            if part is None or part.written >= _LARGE:
                self._begun += 1
                name = f".batch/{kind}/{writer}-{self._process}-{self._begun:06d}.jsonl"
                self._own[kind].append(name)
                part = self._parts[kind] = _Part(name)
            part.rows += data
            # Each write sends the whole part again, so rows are collected for a while; a failure
            # is written at once, since the process may end before it writes anything else.
            late = time.monotonic() - self._flushed >= self._every
            if kind == "failed" or (late and not self._waits):
                self.flush()

    def appended(self, kind: str) -> list[str]:
        self.flush()
        return sorted({*self.listing(f".batch/{kind}"), *self._own[kind]})

    def forget(self, kind: str, names: Iterable[str]) -> None:
        with self._writing:
            self._parts.pop(kind, None)
            self._own[kind].clear()
            at_once(partial(Address.unlink, missing_ok=True), [self.root / name for name in names])

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._writing:
            self._waits += 1
        try:
            yield
        finally:
            with self._writing:
                self._waits -= 1
        self.flush()

    def flush(self) -> None:
        with self._writing:
            for part in self._parts.values():
                if len(part.rows) > part.written:
                    (self.root / part.name).write_bytes(bytes(part.rows))
                    part.written = len(part.rows)
            self._flushed = time.monotonic()

    def close(self) -> None:
        with suppress(OSError):  # raised before, when the rows were noted
            self.flush()
        self._parts.clear()
