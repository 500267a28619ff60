"""The items of a batch run in shards, many in a file: ``shards/CHECKSUM.tar`` and the like."""

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

from ...errors import InvalidValueError
from ...files.writing import sha256
from .journals import Journals
from .layouts import Layout, Whole
from .storage import Files, Storage

_NEAR = 64  # shards with cached lists of files: processes write in turn


class FileSpan(NamedTuple):
    """Position of a file in a shard, in units of its format, and its number of bytes."""

    at: int
    nbytes: int


Index = Mapping[str, Mapping[str, FileSpan]]  # item to file name to position


class Shards(Layout):
    """Many items in a file named by its checksum; in memory until it is written. In a remote
    storage, rows are trusted to name a shard's items."""

    ending: ClassVar[str]

    def __init__(self, storage: Storage, nbytes: int):
        super().__init__(storage, nbytes)
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # one shard at a time: a slow disk should hold up drawing
        self._held: dict[str, tuple[Files, Whole]] = {}
        self._held_bytes = 0
        self._index_of = lru_cache(_NEAR)(lambda path, *_: self._index(path))

    @abstractmethod
    def _pack(self, items: Mapping[str, Files]) -> bytes:
        """Return a shard of these items; the same bytes for the same items, in any order."""

    @abstractmethod
    def _index(self, path: Path) -> Index:
        """Return a shard's contents; raise ValueError if it is not whole or not a run's."""

    @abstractmethod
    def _read(self, path: Path, item: str, held: Mapping[str, FileSpan]) -> dict[str, bytes]: ...

    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        with self._lock:
            self._held[item] = files, whole
            self._held_bytes += sum(map(len, files.values()))
            full = self._held_bytes >= self.nbytes
        if full:
            self.flush()

    def flush(self) -> None:
        # Rows are written together: a kill between two would hide the second's item.
        with self.storage.together(), self._writing:
            with self._lock:
                # Taken out under the lock and packed outside it, while others add to the next
                # shard.
                held, self._held, self._held_bytes = self._held, {}, 0
            if held:
                location = self._write({item: files for item, (files, _) in held.items()})
                for item, (files, whole) in held.items():
                    whole(item, location, files)

    def _write(self, items: Mapping[str, Files]) -> str:
        data = self._pack(items)
        location = f"shards/{sha256(data)[:16]}{self.ending}"
        self.storage.write(location, [data])
        return location

    def find(self) -> Iterator[tuple[str, str]]:
        named: dict[str, list[str]] = {}
        if self.storage.is_remote:
            for item, row in Journals(self.storage).rows().items():
                named.setdefault(row.location, []).append(item)
        for location in self._locations():
            items: Iterable[str] = named.get(location, ())
            if not items:
                with suppress(ValueError, FileNotFoundError):  # its items are made anew
                    items = self._items(location)
            yield from ((item, location) for item in items)

    def broken(self) -> Iterator[tuple[str, str]]:
        # In a remote storage this would mean reading all; reading an item shows it.
        for location in () if self.storage.is_remote else self._locations():
            try:
                self._items(location)
            except ValueError as error:
                yield location, str(error)

    def altered(self, locations: Iterable[str]) -> Iterator[str]:
        for location in locations:
            with self.storage.reading(location) as path:
                if sha256(path.read_bytes())[:16] != PurePosixPath(location).stem:
                    yield location

    def sizes(self, item: str, location: str, names: Iterable[str]) -> dict[str, int]:
        try:
            found = self._items(location).get(item, {})
        except (OSError, ValueError):
            return {}
        return {name: found[name].nbytes for name in names if name in found}

    def lacking(self, item: str, location: str, written: Mapping[str, int]) -> list[str]:
        # a shard that exists is whole
        return [] if self.storage.is_remote else super().lacking(item, location, written)

    def read(
        self, item: str, location: str, names: Iterable[str] | None = None
    ) -> dict[str, bytes]:
        with self.storage.reading(location) as path:
            found = self._items(location).get(item, {})
            wanted = found if names is None else set(names)
            held = {name: where for name, where in found.items() if name in wanted}
            return self._read(path, item, held)

    def discard(self, stale: Mapping[str, str]) -> None:
        touched: dict[str, list[str]] = {location: [] for location in stale.values()}
        for item, location in self.find():
            if location in touched and item not in stale:
                touched[location].append(item)
        # Items cannot be taken out of a shard: the others are written into a new one first.
        for location, kept in touched.items():
            if kept:
                self._write({item: self.read(item, location) for item in kept})
            (self.storage.root / location).unlink(missing_ok=True)

    def _locations(self) -> list[str]:
        return sorted(name for name in self.storage.listing("shards") if name.endswith(self.ending))

    def _items(self, location: str) -> Index:
        """Return a shard's contents, cached while it is unchanged."""
        with self.storage.reading(location) as path:
            known = path.stat()
            try:
                return self._index_of(path, known.st_ino, known.st_mtime_ns, known.st_size)
            except ValueError as error:
                raise InvalidValueError(f"{location} cannot be read: {error}") from error
