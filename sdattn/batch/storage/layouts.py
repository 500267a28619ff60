"""How the items of a batch run lie on the disk: a folder each, or many in a shard.

All layouts keep an item's files, name to bytes, as :func:`sdattn.runs.folder.pack_with_page` makes
them, whole or not at all. A location is a path in the run's folder: ``items/0000/000012`` or
``shards/NAME.tar``.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from ...errors import InvalidValueError
from ...files.paths import inside
from ...files.writing import flush, flush_tree, write_files
from ...runs.packing import RUN_FILE

Files = Mapping[str, bytes]
Whole = Callable[[str, str, Files], None]
_EACH = 1000  # items a folder of folders


class Layout(Protocol):
    """What all layouts do; ``add`` and ``flush`` may be called by many threads."""

    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        """Take an item's files; ``whole(id, location, files)`` is called once they are on the disk
        for good, which may be later, at ``flush`` at the latest."""

    def flush(self) -> None:
        """Write what is held back."""
        return None

    def find(self) -> Iterator[tuple[str, str]]:
        """(id, location) of every item that is there."""

    def broken(self) -> Iterator[tuple[str, str]]:
        """(location, what is wrong) of what may hold items and cannot be read."""
        return iter(())

    def unfinished(self) -> list[str]:
        """Locations where an item was begun and not ended, as :meth:`find` saw them last."""
        return []

    def clear_unfinished(self) -> None:
        """Remove what is there, unless it is of no run."""
        return None

    def altered(self, locations: Iterable[str]) -> Iterator[str]:
        """Those of these locations, of which every item is as it was written, that are not."""
        return iter(())

    def sizes(self, item: str, location: str, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those of an item's files that are there, without reading them."""

    def lacking(self, item: str, location: str, written: Mapping[str, int]) -> list[str]:
        """Which of an item's files, name to bytes, are not there or of another size."""
        sizes = self.sizes(item, location, written)
        return [name for name in written if sizes.get(name) != written[name]]

    def read(
        self, item: str, location: str, names: Iterable[str] | None = None
    ) -> dict[str, bytes]:
        """An item's files, or those of these names that it has."""

    def take(self, other: Layout, where: tuple[str, str], line: int, whole: Whole) -> None:
        """Add an item, (id, location), of another run, which keeps it."""
        self.add(where[0], line, other.read(*where), whole)

    def discard(self, stale: Mapping[str, str]) -> None:
        """Remove items, id to location.

        Raises:
            ValueError: there are files among theirs that no run wrote; nothing is removed then.
        """


def location_in_folders(item: str, line: int) -> str:
    """Where an item of this line of the input lies, a folder each."""
    return f"items/{line // _EACH:04d}/{item}"


class Folders(Layout):
    """A folder an item, as ``sdattn generate`` writes it, a thousand in a folder."""

    def __init__(self, root: Path, temporary: Path):
        self.root, self.temporary = root, temporary

    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        location = self._make(item, line, lambda made: write_files(made, files))
        whole(item, location, files)

    def take(self, other: Layout, where: tuple[str, str], line: int, whole: Whole) -> None:
        if not (isinstance(other, Folders) and isinstance(other.root, Path)):
            return super().take(other, where, line, whole)
        item, location = where
        new = self._make(item, line, lambda made: _link_tree(other.root / location, made))
        whole(item, new, self.read(item, new, ["run.json"]))

    def _make(self, item: str, line: int, fill: Callable[[Path], Any]) -> str:
        """Fill a temporary folder and give it its place."""
        location = location_in_folders(item, line)
        target = self.root / location
        made = self.temporary / uuid4().hex
        try:
            fill(made)
            flush_tree(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            # To rename is to be whole or not there at all; what it is made of is on the disk
            # before.
            os.rename(made, target)
            flush(target.parent)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return location

    def find(self) -> Iterator[tuple[str, str]]:
        for group in sorted((self.root / "items").glob("[0-9]*")):
            with os.scandir(group) as entries:
                for entry in entries:
                    if entry.is_dir() or entry.is_symlink():
                        yield entry.name, f"items/{group.name}/{entry.name}"

    def sizes(self, item: str, location: str, names: Iterable[str]) -> dict[str, int]:
        found = {}
        with suppress(ValueError):  # a link, which leads to nothing of ours
            folder = inside(self.root, location)
            for name in names:
                with suppress(OSError, ValueError):
                    known = (inside(folder, name) if "/" in name else folder / name).lstat()
                    if stat.S_ISREG(known.st_mode):
                        found[name] = known.st_size
        return found

    def read(
        self, item: str, location: str, names: Iterable[str] | None = None
    ) -> dict[str, bytes]:
        folder = inside(self.root, location)
        names = self._listed(location) if names is None else names
        paths = {name: inside(folder, name) for name in names}
        return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}

    def discard(self, stale: Mapping[str, str]) -> None:
        for location in stale.values():
            if foreign := self._foreign(location):
                raise InvalidValueError(
                    f"{self.root / location} is to be drawn again, but holds "
                    f"{', '.join(foreign[:3])}, which no run wrote. Move what is yours elsewhere."
                )
        for location in stale.values():
            self._remove(location)

    def _foreign(self, location: str) -> list[str]:
        """The files in an item's folder that no run wrote."""
        return [name for name in self._listed(location) if not RUN_FILE.fullmatch(name)]

    def _remove(self, location: str) -> None:
        path, gone = self.root / location, self.temporary / uuid4().hex
        os.rename(path, gone)
        gone.unlink() if gone.is_symlink() else shutil.rmtree(gone)

    def _listed(self, location: str) -> list[str]:
        """The files in an item's folder, and the links by their own names."""
        folder = self.root / location
        found = []
        for at, folders, names in os.walk(folder if not folder.is_symlink() else ""):
            links = [name for name in folders if Path(at, name).is_symlink()]
            found += [Path(at, name).relative_to(folder).as_posix() for name in [*names, *links]]
        return sorted(found)


def _link_tree(source: Path, target: Path) -> None:
    """The same files at another path, without copies where the disk can."""

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)

    shutil.copytree(source, target, copy_function=link)
