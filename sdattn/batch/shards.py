"""The items of a batch run in shards, many in a safetensors file: ``shards/NAME.safetensors``."""

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from ..files.places import inside
from ..files.writing import sha256, write_whole
from ..runs.info import FORMAT, MAPS
from ..runs.packing import pack_maps
from .layouts import Files, Layout, Whole

_NEAR = 64  # shards whose lists of files are remembered: processes write in turn
_NBYTES = {"U8": 1, "F16": 2}  # of a number, of the types that shards hold


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
            f"{item}/{name}": tensor
            for item, files in items.items()
            for name, tensor in _as_tensors(files).items()
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
                tensor = file.get_slice(key)
                nbytes = math.prod(tensor.get_shape()) * _NBYTES.get(tensor.get_dtype(), 0)
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


def _as_tensors(files: Files) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, data in files.items():
        if name == MAPS:
            tensors |= {f"maps/{layer}": maps for layer, maps in load(data).items()}
        else:
            tensors[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensors


def _as_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The very bytes that were packed: safetensors writes the same tensors the same way."""
    maps = {n.removeprefix("maps/"): t for n, t in tensors.items() if n.startswith("maps/")}
    files = {n: t.numpy().tobytes() for n, t in tensors.items() if not n.startswith("maps/")}
    return files | ({MAPS: pack_maps(maps)} if maps else {})
