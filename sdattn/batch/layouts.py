"""How the items of a batch run lie on the disk: a folder each, or many in a shard.

Both keep an item's files, name to bytes, as :func:`sdattn.runs.packing.pack_run` makes them, whole
or not at all. A place is a path in the run's folder: ``items/0000/000012`` or
``shards/NAME.safetensors``.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from ..files.writing import sha256
from ..runs.folder import flush, flush_tree, inside, write_files, write_whole
from ..runs.info import FORMAT, MAPS
from ..runs.packing import pack_maps

Files = Mapping[str, bytes]
Whole = Callable[[str, str, Files], None]
_NEAR = 64  # shards whose lists of files are remembered: processes write in turn
_NBYTES = {"U8": 1, "F16": 2}  # of a number, of the types that shards hold
_EACH = 1000  # items a folder of folders
_OURS = re.compile(  # what a run can have written into an item's folder
    r"(?:(?:negative|asked|causal)/)?"
    r"(?:image\.png|grid\.png|report\.html|run\.json|(?:maps|steps|heads)\.safetensors"
    r"|(?:heatmaps|masks)/[0-9]{2,}-[^/]+\.png)"
)


class Layout(Protocol):
    """What both layouts do; ``add`` and ``flush`` may be called by many threads."""

    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        """Take an item's files; ``whole(id, place, files)`` is called once they are on the disk
        for good, which may be later, at ``flush`` at the latest."""

    def flush(self) -> None:
        """Write what is held back."""

    def find(self) -> Iterator[tuple[str, str]]:
        """(id, place) of every item that is there."""

    def broken(self) -> Iterator[tuple[str, str]]:
        """(place, what is wrong) of what may hold items and cannot be read."""

    def format_of(self, place: str) -> str | None:
        """The format that a place says of itself, where it says one."""

    def sizes(self, item: str, place: str, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those of an item's files that are there, without reading them."""

    def read(self, item: str, place: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """An item's files, or those of these names that it has."""

    def take(self, other: Layout, where: tuple[str, str], line: int, whole: Whole) -> None:
        """Add an item, (id, place), of another run, which keeps it."""
        self.add(where[0], line, other.read(*where), whole)

    def discard(self, stale: Mapping[str, str]) -> None:
        """Remove items, id to place.

        Raises:
            ValueError: there are files among theirs that no run wrote; nothing is removed then.
        """


def layout_of(settings: Mapping[str, Any], root: Path, temporary: Path) -> Layout:
    """The layout that a run's settings name.

    Args:
        settings: ``"format"``, ``"folder"`` or ``"shard"``, and ``"shard_bytes"``.
        root: the run's folder.
        temporary: a folder on the same disk.
    """
    if settings["format"] == "shard":
        return Shards(root, temporary, settings["shard_bytes"])
    return Folders(root, temporary)


class Folders(Layout):
    """A folder an item, as ``sdattn generate`` writes it, a thousand in a folder."""

    def __init__(self, root: Path, temporary: Path):
        self.root, self.temporary = root, temporary

    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        place = self._make(item, line, lambda made: write_files(made, files))
        whole(item, place, files)

    def take(self, other: Layout, where: tuple[str, str], line: int, whole: Whole) -> None:
        assert isinstance(other, Folders)
        item, place = where
        new = self._make(item, line, lambda made: _link_tree(other.root / place, made))
        whole(item, new, self.read(item, new, ["run.json"]))

    def _make(self, item: str, line: int, fill: Callable[[Path], Any]) -> str:
        """Fill a temporary folder and give it its place."""
        place = f"items/{line // _EACH:04d}/{item}"
        target = self.root / place
        made = self.temporary / uuid4().hex
        try:
            fill(made)
            flush_tree(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(made, target)
            flush(target.parent)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return place

    def flush(self) -> None:
        pass  # nothing is held back

    def find(self) -> Iterator[tuple[str, str]]:
        for group in sorted((self.root / "items").glob("[0-9]*")):
            with os.scandir(group) as entries:
                for entry in entries:
                    if entry.is_dir() or entry.is_symlink():
                        yield entry.name, f"items/{group.name}/{entry.name}"

    def broken(self) -> Iterator[tuple[str, str]]:
        return iter(())  # an item's folder is its own business

    def format_of(self, place: str) -> str | None:
        return None

    def sizes(self, item: str, place: str, names: Iterable[str]) -> dict[str, int]:
        found = {}
        with suppress(ValueError):  # a link, which leads to nothing of ours
            folder = inside(self.root, place)
            for name in names:
                with suppress(OSError, ValueError):
                    known = (inside(folder, name) if "/" in name else folder / name).lstat()
                    if stat.S_ISREG(known.st_mode):
                        found[name] = known.st_size
        return found

    def read(self, item: str, place: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
        folder = inside(self.root, place)
        names = self._listed(place) if names is None else names
        paths = {name: inside(folder, name) for name in names}
        return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}

    def discard(self, stale: Mapping[str, str]) -> None:
        for place in stale.values():
            foreign = [name for name in self._listed(place) if not _OURS.fullmatch(name)]
            if foreign:
                raise ValueError(
                    f"{self.root / place} is to be drawn again, but holds {', '.join(foreign[:3])}"
                    ", which no run wrote. Move what is yours elsewhere."
                )
        for place in stale.values():
            path, gone = self.root / place, self.temporary / uuid4().hex
            os.rename(path, gone)
            gone.unlink() if gone.is_symlink() else shutil.rmtree(gone)

    def _listed(self, place: str) -> list[str]:
        """The files in an item's folder, and the links by their own names."""
        folder = self.root / place
        found = []
        for at, folders, names in os.walk(folder if not folder.is_symlink() else ""):
            links = [one for one in folders if Path(at, one).is_symlink()]
            found += [Path(at, one).relative_to(folder).as_posix() for one in [*names, *links]]
        return sorted(found)


class Shards(Layout):
    """Many items in a safetensors file: ``ID/maps/LAYER`` are the maps, float16 ``[rows, cols,
    tokens]``, and ``ID/PATH`` the bytes of every other file of the item.

    Args:
        root: the run's folder.
        temporary: a folder on the same disk.
        nbytes: a shard is written once it holds so much; until then its items are in memory.
    """

    def __init__(self, root: Path, temporary: Path, nbytes: int):
        self.root, self.temporary, self.nbytes = root, temporary, nbytes
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # one shard at a time: a slow disk is to hold up drawing
        self._held: dict[str, tuple[Files, Whole]] = {}
        self._held_bytes = 0
        self._sizes_of = lru_cache(_NEAR)(self._read_sizes)

    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        with self._lock:
            self._held[item] = files, whole
            self._held_bytes += sum(map(len, files.values()))
            full = self._held_bytes >= self.nbytes
        if full:
            self.flush()

    def flush(self) -> None:
        with self._writing:
            with self._lock:
                held, self._held, self._held_bytes = self._held, {}, 0
            if held:
                place = self._write({item: files for item, (files, _) in held.items()})
                for item, (files, whole) in held.items():
                    whole(item, place, files)

    def _write(self, items: Mapping[str, Files]) -> str:
        tensors = {
            f"{item}/{name}": one
            for item, files in items.items()
            for name, one in _as_tensors(files).items()
        }
        digest = sha256("\n".join(sorted(items)).encode())[:16]
        place = f"shards/{digest}.safetensors"
        head = {"format": FORMAT, "items": sorted(items)}
        data = save(tensors, metadata={"sdattn": json.dumps(head)})
        (self.root / "shards").mkdir(exist_ok=True)
        write_whole(self.root / place, [data], self.temporary / uuid4().hex)
        return place

    def find(self) -> Iterator[tuple[str, str]]:
        for place in self._places():
            try:
                items = self._head(place)["items"]
            except ValueError:  # what it held is missing, and is made anew
                continue
            for item in items:
                yield item, place

    def broken(self) -> Iterator[tuple[str, str]]:
        for place in self._places():
            try:
                items = set(self._head(place)["items"])
            except ValueError as error:
                yield place, str(error)
                continue
            if others := sorted(self._sizes(place).keys() - items):
                yield place, f"it holds files of {others[0]!r}, which is none of its items"

    def format_of(self, place: str) -> str | None:
        return self._head(place)["format"]

    def sizes(self, item: str, place: str, names: Iterable[str]) -> dict[str, int]:
        """Bytes of each file, of maps those of the numbers alone."""
        try:
            found = self._sizes(place).get(item, {})
        except (OSError, ValueError):
            return {}
        return {name: found[name] for name in names if name in found}

    def read(self, item: str, place: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
        wanted = None if names is None else set(names)
        tensors = {}
        with self._open(place) as file:
            for key in file.keys():  # noqa: SIM118
                owner, name = _owner(key)
                if owner == item and (wanted is None or name in wanted):
                    tensors[key.partition("/")[2]] = file.get_tensor(key)
        return _as_files(tensors)

    def _places(self) -> list[str]:
        found = sorted((self.root / "shards").glob("*.safetensors"))
        return [f"shards/{path.name}" for path in found]

    @contextmanager
    def _open(self, place: str) -> Iterator[Any]:
        """A shard; raises ValueError where it is none that can be read."""
        try:
            with safe_open(inside(self.root, place), framework="pt") as file:
                yield file
        except SafetensorError as error:
            raise ValueError(f"{place} cannot be read: {error}") from error

    def _head(self, place: str) -> dict[str, Any]:
        with self._open(place) as file:
            text = (file.metadata() or {}).get("sdattn", "{}")
        try:
            head = json.loads(text)
            whole = isinstance(head["format"], str) and all(type(i) is str for i in head["items"])
        except (ValueError, TypeError, KeyError):
            whole = False
        if not whole:
            raise ValueError(f"{place} cannot be read: it has no list of items")
        return head

    def _sizes(self, place: str) -> dict[str, dict[str, int]]:
        """Bytes of each item's files in a shard, remembered while it stays as it is."""
        known = inside(self.root, place).stat()
        return self._sizes_of(place, known.st_ino, known.st_mtime_ns, known.st_size)

    def _read_sizes(self, place: str, *_: int) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        with self._open(place) as file:
            for key in file.keys():  # noqa: SIM118
                owner, name = _owner(key)
                one = file.get_slice(key)
                nbytes = math.prod(one.get_shape()) * _NBYTES.get(one.get_dtype(), 0)
                files = found.setdefault(owner, {})
                files[name] = files.get(name, 0) + nbytes
        return found

    def discard(self, stale: Mapping[str, str]) -> None:
        touched: dict[str, list[str]] = {place: [] for place in stale.values()}
        for item, place in self.find():
            if place in touched and item not in stale:
                touched[place].append(item)
        for place, kept in touched.items():
            if kept:
                self._write({item: self.read(item, place) for item in kept})
            (self.root / place).unlink()


def _owner(key: str) -> tuple[str, str]:
    """A tensor's item and the file that it is (of)."""
    owner, _, name = key.partition("/")
    return owner, MAPS if name.startswith("maps/") else name


def _link_tree(source: Path, target: Path) -> None:
    """The same files at another path, without copies where the disk can."""

    def link(one: str, another: str) -> None:
        try:
            os.link(one, another)
        except OSError:
            shutil.copy2(one, another)

    shutil.copytree(source, target, copy_function=link)


def _as_tensors(files: Files) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, data in files.items():
        if name == MAPS:
            tensors |= {f"maps/{layer}": one for layer, one in load(data).items()}
        else:
            tensors[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensors


def _as_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The very bytes that were packed: safetensors writes the same tensors the same way."""
    files = {n: one.numpy().tobytes() for n, one in tensors.items() if not n.startswith("maps/")}
    maps = {n.removeprefix("maps/"): one for n, one in tensors.items() if n.startswith("maps/")}
    if maps:
        files[MAPS] = pack_maps(maps)
    return files
