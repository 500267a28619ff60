"""A batch run's folder read back: its items, how far it is, whether it is as it was written."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.torch import load

from ..files import SavedRun, inside, saved_run
from ..packing import MAPS, sha256
from ..runinfo import read_info
from ..unpacking import READ, map_shapes
from .folder import BatchFolder
from .layouts import Layout


class SavedBatch(Mapping[str, SavedRun]):
    """The items of a batch run, id to run, in the order of the input; each is read when asked for.

    batch = open_batch("RUN")
    batch["000012"].heatmaps["cat"].values
    """

    def __init__(self, root: str | Path):
        self._folder = BatchFolder(root)
        self._layout = self._folder.layout
        rows = self._folder.rows()
        self._places = {item: rows[item].place for item in sorted(rows, key=lambda i: rows[i][:2])}

    def __getitem__(self, item: str) -> SavedRun:
        if item not in self._places:
            raise KeyError(f"{self._folder.root} holds no item {item!r}.")
        place = self._places[item]
        where = inside(self._folder.root, place)
        files = self._layout.read(item, place, READ)
        return saved_run(files, where, f"{where} ({item})")

    def __contains__(self, item: object) -> bool:
        return item in self._places  # a Mapping's own would read the item

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def open_batch(root: str | Path) -> SavedBatch:
    """The items of a batch run, whichever format it has.

    Raises:
        FileNotFoundError: no such folder, or it is no batch run's.
        ValueError: ``batch.json`` is corrupt or of another version.
    """
    return SavedBatch(root)


@dataclass(frozen=True)
class Status:
    """How far a run is.

    Attributes:
        items: of its input.
        whole: items that are there; after ``force`` with another input more than ``items``.
        failed: that could not be drawn the last time.
        bad_lines: of its input.
        running: who is at work at it, or None.
    """

    items: int
    whole: int
    failed: int
    bad_lines: int
    running: str | None


def status(root: str | Path) -> Status:
    """How far a run is; raises as :func:`open_batch` does."""
    folder = BatchFolder(root)
    made = folder.manifest["input"]
    running = None
    if not folder.lock.free():
        running = folder.lock.describe_holder()
    whole = {item for item, _ in folder.layout.find()}
    failed = len(set(folder.failures()) - whole)
    return Status(made["items"], len(whole), failed, made["bad_lines"], running)


def verify(root: str | Path) -> tuple[int, list[str]]:
    """Read every item again and compare it with what was written.

    Returns:
        How many items there are, and what is wrong, a line each: a file that is missing or whose
        checksum differs, an image that does not open, maps that are not finite or not of the grid
        they should have, a row without an item or an item without a row, unfinished files.

    Raises:
        As :func:`open_batch` does.
    """
    folder = BatchFolder(root)
    layout, rows = folder.layout, folder.rows()
    there = list(layout.find())
    twice = len(there) - len({item for item, _ in there})
    problems = [f"{twice} item(s) are there twice"] if twice else []
    places = dict(there)
    for item, one in rows.items():
        if places.get(item) != one.place:
            problems.append(f"{item}: metadata.jsonl names {one.place}, where it is not")
    if folder.lock.free():
        new = [item for item in places if item not in rows]
        problems += [f"{item}: metadata.jsonl has no row; the next run adds it" for item in new]
        left = sorted(folder.temporary.glob("*"))
        problems += [f"{path.name}: unfinished, in {folder.temporary}" for path in left]
    with ThreadPoolExecutor() as pool:
        for item, place, found in pool.map(lambda one: (*one, _check(layout, *one)), there):
            problems += [f"{item}: {one} (in {place})" for one in found]
    return len(places), problems


def _check(layout: Layout, item: str, place: str) -> list[str]:
    """What is wrong with an item."""
    try:
        files = layout.read(item, place)
        info = read_info(files, place)
    except (OSError, ValueError, SafetensorError) as error:
        return [str(error)]
    problems = []
    if info.get("id") != item:
        problems.append(f"run.json is that of item {info.get('id')!r}")
    for name, digest in info["files"].items():
        if name not in files:
            problems.append(f"{name} is missing")
        elif sha256(files[name]) != digest:
            problems.append(f"{name} is not what was written: its checksum differs")
        elif name.endswith(".png"):
            problems += _check_image(name, files[name])
        elif name == MAPS:
            problems += _check_maps(files[name], info)
    return problems


def _check_image(name: str, data: bytes) -> list[str]:
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            image.load()
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        return [f"{name} does not open: {error}"]
    return []


def _check_maps(data: bytes, info: Mapping[str, Any]) -> list[str]:
    maps = load(data)
    problems = []
    if {name: tuple(one.shape) for name, one in maps.items()} != map_shapes(info):
        problems.append("maps.safetensors has other layers or sizes than run.json says")
    bad = [name for name, one in maps.items() if not torch.isfinite(one).all()]
    if bad:
        problems.append(f"maps.safetensors holds values that are not finite, in {bad[0]}")
    return problems
