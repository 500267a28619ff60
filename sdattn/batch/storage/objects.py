"""The items of a batch run in a storage, where nothing can be renamed and a folder is no thing.

An item's ``run.json`` is written after its other files and removed before them, so that an item
with it is whole. A shard is one object. Either is noted once it is there.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...files.addresses import Address
from ...files.copies import Copies
from ...files.paths import inside
from .layouts import Files, Folders, Layout, Whole, location_in_folders
from .parquets import Parquets
from .shards import Shards
from .storage_journals import StorageJournals
from .tars import Tars

_NEAR = 64  # groups of items whose listing is remembered
_KEPT = 4  # shards of which copies are kept
_LAST = "run.json"


class FolderObjects(Folders):
    """Items as ``sdattn generate`` writes them, an object a file."""

    root: Any  # an Address

    def __init__(self, root: Address, journals: StorageJournals):
        self.root, self.journals = root, journals
        self._groups: dict[str, dict[str, dict[str, int]]] = {}
        self._begun: list[str] = []

    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        location = location_in_folders(item, line)
        folder = inside(self.root, location)
        for name in sorted(files, key=lambda name: (name == _LAST, name)):
            inside(folder, name).write_bytes(files[name])
        whole(item, location, files)

    take = Layout.take  # there are no links

    def flush(self) -> None:
        self.journals.flush()

    def find(self) -> Iterator[tuple[str, str]]:
        self._groups.clear()
        self._begun.clear()
        for group in (self.root / "items").glob("[0-9]*"):
            for item, names in self._group(f"items/{group.name}").items():
                if _LAST in names:
                    yield item, f"items/{group.name}/{item}"
                else:
                    self._begun.append(f"items/{group.name}/{item}")

    def unfinished(self) -> list[str]:
        return [*self._begun]

    def clear_unfinished(self) -> None:
        for location in self.unfinished():
            if not self._foreign(location):
                self._remove(location)

    def sizes(self, item: str, location: str, names: Iterable[str]) -> dict[str, int]:
        found = {}
        with suppress(ValueError):  # a location elsewhere
            folder, (group, _, _) = inside(self.root, location), location.rpartition("/")
            listed = self._group(group).get(folder.name, {})
            for name in names:
                size = listed.get(name)
                if size is None:  # a listing can come late
                    size = inside(folder, name).size()
                if size is not None:
                    found[name] = size
        return found

    def read(
        self, item: str, location: str, names: Iterable[str] | None = None
    ) -> dict[str, bytes]:
        folder, found = inside(self.root, location), {}
        if names is None:
            names = self._group(location.rpartition("/")[0]).get(folder.name) or self._listed(
                location
            )
        for name in names:
            with suppress(FileNotFoundError):
                found[name] = inside(folder, name).read_bytes()
        return found

    def _group(self, group: str) -> dict[str, dict[str, int]]:
        """Bytes of every object of a thousand items, by item and name, as they were listed last."""
        if (known := self._groups.get(group)) is None:
            known = {}
            for path, size in inside(self.root, group).sizes().items():
                item, _, name = path.partition("/")
                known.setdefault(item, {})[name] = size
            with suppress(StopIteration, KeyError):  # threads may remove the same
                if len(self._groups) >= _NEAR:
                    self._groups.pop(next(iter(self._groups)))
            self._groups[group] = known
        return known

    def _listed(self, location: str) -> list[str]:
        return sorted(inside(self.root, location).sizes())

    def _remove(self, location: str) -> None:
        folder = inside(self.root, location)
        for name in sorted({*self._listed(location), _LAST}, key=lambda name: name != _LAST):
            (folder / name).unlink(missing_ok=True)
        self._groups.pop(location.rpartition("/")[0], None)


class _ShardObjects(Shards):
    """Shards that are read from copies. A shard that rows name is taken to hold their items, so
    that it is read only when an item is."""

    root: Any  # an Address

    def __init__(self, root: Address, journals: StorageJournals, nbytes: int):
        super().__init__(root, root, nbytes)
        self.journals = journals
        self._copies, self._reading = Copies(_KEPT), threading.RLock()

    def flush(self) -> None:
        with self.journals.together():  # else a kill between two rows would hide the second's item
            super().flush()

    def find(self) -> Iterator[tuple[str, str]]:
        named: dict[str, list[str]] = {}
        for item, row in self.journals.rows().items():
            named.setdefault(row.location, []).append(item)
        for location in self._locations():
            items: Iterable[str] = named.get(location, ())
            if not items:
                with suppress(ValueError, FileNotFoundError):  # what it held is made anew
                    items = self._items(location)
            yield from ((item, location) for item in items)

    def broken(self) -> Iterator[tuple[str, str]]:
        return iter(())  # to know it, all would have to be read; reading an item shows it

    def altered(self, locations: Iterable[str]) -> Iterator[str]:
        for location in locations:
            with self._reading:
                yield from super().altered([location])

    def sizes(self, item: str, location: str, names: Iterable[str]) -> dict[str, int]:
        with self._reading:
            return super().sizes(item, location, names)

    def lacking(self, item: str, location: str, written: Mapping[str, int]) -> list[str]:
        return []  # an object that was found is whole

    def read(
        self, item: str, location: str, names: Iterable[str] | None = None
    ) -> dict[str, bytes]:
        with self._reading:
            return super().read(item, location, names)

    def discard(self, stale: Mapping[str, str]) -> None:
        with self._reading:
            super().discard(stale)

    def _path(self, location: str) -> Path:
        return self._copies.of(inside(self.root, location), location)  # named by its checksum


class TarObjects(_ShardObjects, Tars):
    """See :class:`Tars`."""


class ParquetObjects(_ShardObjects, Parquets):
    """See :class:`Parquets`."""
