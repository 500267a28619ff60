"""How the items of a batch run lie on the disk: a folder each, or many in a shard.

Both keep an item's files, name to bytes, as :func:`sdattn.packing.pack_run` makes them, whole or
not at all. A place is a path in the run's folder: ``items/0000/000012`` or
``shards/NAME.safetensors``.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from ..files import flush, flush_tree, write_files, write_whole
from ..packing import FORMAT, MAPS, pack_maps, sha256

Files = Mapping[str, bytes]
Whole = Callable[[str, str, Files], None]
_EACH = 1000  # items a folder of folders


class Layout(Protocol):
    """What both layouts do; ``add`` and ``flush`` may be called by many threads."""

    def add(self, item: str, line: int, files: Files, whole: Whole) -> None:
        """Take an item's files; ``whole(id, place, files)`` is called once they are on the disk
        for good, which may be later, at ``flush`` at the latest."""

    def flush(self) -> None:
        """Write what is held back."""

    def find(self) -> Iterator[tuple[str, str]]:
        """(id, place) of every item that is there."""

    def read(self, item: str, place: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """An item's files, or those of these names that it has."""

    def take(self, other: Layout, where: tuple[str, str], line: int, whole: Whole) -> None:
        """Add an item, (id, place), of another run, which keeps it."""
        self.add(where[0], line, other.read(*where), whole)

    def discard(self, stale: Mapping[str, str]) -> None:
        """Remove items, id to place."""


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
                    if entry.is_dir():
                        yield entry.name, f"items/{group.name}/{entry.name}"

    def read(self, item: str, place: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
        folder = self.root / place
        if names is None:
            found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        else:
            found = [folder / name for name in names if (folder / name).is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    def discard(self, stale: Mapping[str, str]) -> None:
        for place in stale.values():
            gone = self.temporary / uuid4().hex
            os.rename(self.root / place, gone)
            shutil.rmtree(gone)


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
        for path in sorted((self.root / "shards").glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    head = json.loads((file.metadata() or {}).get("sdattn", "{}"))
            except SafetensorError:  # what it held is missing, and is made anew
                continue
            for item in head.get("items", ()):
                yield item, f"shards/{path.name}"

    def read(self, item: str, place: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
        wanted = None if names is None else set(names)
        tensors = {}
        with safe_open(self.root / place, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                owner, _, name = key.partition("/")
                of = MAPS if name.startswith("maps/") else name
                if owner == item and (wanted is None or of in wanted):
                    tensors[name] = file.get_tensor(key)
        return _as_files(tensors)

    def discard(self, stale: Mapping[str, str]) -> None:
        touched: dict[str, list[str]] = {place: [] for place in stale.values()}
        for item, place in self.find():
            if place in touched and item not in stale:
                touched[place].append(item)
        for place, kept in touched.items():
            if kept:
                self._write({item: self.read(item, place) for item in kept})
            (self.root / place).unlink()


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
