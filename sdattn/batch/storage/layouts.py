"""Layouts of items in a batch run's folder: one folder each, or many in a shard.

All keep an item's files, name to bytes, completely or not at all. A location is a path in the run's
folder: ``items/0000/000012`` or ``shards/NAME.tar``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ...errors import InvalidValueError
from ...runs.parts import RUN_FILE
from .storage import Files, Storage

Whole = Callable[[str, str, Files], None]
_EACH = 1000  # items per folder of folders


class Layout(ABC):
    """A layout of items; many threads may call ``add``, which writes a file once it has
    ``nbytes``."""

    def __init__(self, storage: Storage, nbytes: int = 0):
        self.storage, self.nbytes = storage, nbytes

    @abstractmethod
    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        """Take an item's files; call ``whole(id, location, files)`` once written, at the latest in
        ``flush``."""

    def flush(self) -> None:
        self.storage.flush()

    @abstractmethod
    def find(self) -> Iterator[tuple[str, str]]:
        """Yield (id, location) of every existing item."""

    def broken(self) -> Iterator[tuple[str, str]]:
        """Yield (location, problem) of files that may hold items but cannot be read."""
        return iter(())

    def unfinished(self) -> list[str]:
        """Return locations of items begun but not finished, as :meth:`find` last saw them."""
        return []

    def clear_unfinished(self) -> None:
        """Remove unfinished items, unless they contain files of no run."""
        return None

    def altered(self, locations: Iterable[str]) -> Iterator[str]:
        """Yield the locations whose bytes were altered although all their items are intact."""
        return iter(())

    @abstractmethod
    def sizes(self, item: str, location: str, names: Iterable[str]) -> dict[str, int]:
        """Return the bytes of an item's existing files, without reading them."""

    def lacking(self, item: str, location: str, written: Mapping[str, int]) -> list[str]:
        """Return the item's files, given by name and size, that are missing or of another size."""
        sizes = self.sizes(item, location, written)
        return [name for name in written if sizes.get(name) != written[name]]

    @abstractmethod
    def read(
        self, item: str, location: str, names: Iterable[str] | None = None
    ) -> dict[str, bytes]:
        """Return an item's files, or only the existing ones of these names."""

    def take(self, other: Layout, where: tuple[str, str], line: int, whole: Whole) -> None:
        """Add an item, (id, location), of another run, which keeps it."""
        self.add(where[0], line, other.read(*where), whole)

    @abstractmethod
    def discard(self, stale: Mapping[str, str]) -> None:
        """Remove items, id to location; raise ValueError, and remove none, if no run wrote some
        files."""


class Folders(Layout):
    """One folder per item, as ``sdattn generate`` writes it, a thousand in a folder."""

    _begun: Sequence[str] = ()

    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        location = _location(item, line)
        self.storage.write_folder(location, files)
        whole(item, location, files)

    def take(self, other: Layout, where: tuple[str, str], line: int, whole: Whole) -> None:
        item, source = where
        location = _location(item, line)
        if isinstance(other, Folders) and self.storage.link_folder(location, other.storage, source):
            whole(item, location, self.read(item, location, ["run.json"]))
        else:
            super().take(other, where, line, whole)

    def find(self) -> Iterator[tuple[str, str]]:
        self._begun = begun = []
        for location, is_whole in self.storage.folders():
            if is_whole:
                yield location.rpartition("/")[2], location
            else:
                begun.append(location)

    def unfinished(self) -> list[str]:
        return [*self._begun]

    def clear_unfinished(self) -> None:
        for location in self._begun:
            if not self._foreign(location):
                self.storage.delete_folder(location)

    def sizes(self, item: str, location: str, names: Iterable[str]) -> dict[str, int]:
        return self.storage.sizes(location, names)

    def read(
        self, item: str, location: str, names: Iterable[str] | None = None
    ) -> dict[str, bytes]:
        return self.storage.read(location, names)

    def discard(self, stale: Mapping[str, str]) -> None:
        for location in stale.values():
            if foreign := self._foreign(location):
                raise InvalidValueError(
                    f"{self.storage.root / location} is to be drawn again, but holds "
                    f"{', '.join(foreign[:3])}, which no run wrote. Move what is yours elsewhere."
                )
        for location in stale.values():
            self.storage.delete_folder(location)

    def _foreign(self, location: str) -> list[str]:
        return [name for name in self.storage.names(location) if not RUN_FILE.fullmatch(name)]


def _location(item: str, line: int) -> str:
    return f"items/{line // _EACH:04d}/{item}"
