"""Shards of safetensors, as earlier versions wrote them: they are read, and merged into tars.

``ID/maps/LAYER`` are an item's maps, float16 ``[rows, cols, tokens]``, and ``ID/PATH`` the bytes of
every other file.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...errors import InvalidValueError
from ...runs.info import FORMAT, MAPS
from ...runs.packing import pack_maps
from .layouts import Files
from .shards import FileSpan, Index, Shards

_NBYTES = {"U8": 1, "F16": 2}  # of a number, of the types that shards hold


class OldShards(Shards):
    """They are only read."""

    ending = ".safetensors"

    def _pack(self, items: Mapping[str, Files]) -> bytes:
        raise NotImplementedError("Items are not written into shards of safetensors any more.")

    def _index(self, path: Path) -> Index:
        """Of maps the bytes are those of the numbers alone."""
        found: dict[str, dict[str, FileSpan]] = {}
        with _open(path) as (head, file):
            for key in file.keys():  # noqa: SIM118
                owner, name = _owner(key)
                tensor, files = file.get_slice(key), found.setdefault(owner, {})
                nbytes = math.prod(tensor.get_shape()) * _NBYTES.get(tensor.get_dtype(), 0)
                files[name] = FileSpan(0, nbytes + (files[name].nbytes if name in files else 0))
        return {item: found.get(item, {}) for item in head["items"]}

    def _read(self, path: Path, item: str, held: Mapping[str, FileSpan]) -> dict[str, bytes]:
        """The very bytes that were packed: safetensors writes the same maps the same way."""
        files, maps = {}, {}
        with _open(path) as (_, file):
            for key in file.keys():  # noqa: SIM118
                owner, name = _owner(key)
                if owner == item and name == MAPS and name in held:
                    maps[key.removeprefix(f"{item}/maps/")] = file.get_tensor(key)
                elif owner == item and name in held:
                    files[name] = file.get_tensor(key).numpy().tobytes()
        return files | ({MAPS: pack_maps(maps)} if maps else {})

    def altered(self, locations: Iterable[str]) -> Iterator[str]:
        """Those that say another format, or hold files of none of their items."""
        for location in locations:
            with _open(self._path(location)) as (head, file):
                owners = {_owner(key)[0] for key in file.keys()}  # noqa: SIM118
                if head["format"] != FORMAT or owners - set(head["items"]):
                    yield location


@contextmanager
def _open(path: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """A shard's head, its format and items, and the shard; raises ValueError where it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            yield _head(file.metadata()), file
    except SafetensorError as error:
        raise InvalidValueError(str(error)) from error


def _head(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    try:
        head = json.loads((metadata or {})["sdattn"])
        if type(head["format"]) is str and all(type(item) is str for item in head["items"]):
            return head
    except (ValueError, TypeError, KeyError):
        pass
    raise InvalidValueError("it has no list of items")


def _owner(key: str) -> tuple[str, str]:
    """A tensor's item and the file that it is (of)."""
    owner, _, name = key.partition("/")
    return owner, MAPS if name.startswith("maps/") else name
