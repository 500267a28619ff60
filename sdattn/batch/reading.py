"""A run read back: its items, and how far it is."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidValueError, NotFoundError
from ..files.paths import inside
from ..files.place import Place
from ..files.writing import sha256
from ..maps.statistics import to_dataframe
from ..prompts.words import folded
from ..runs.folder import SavedRun, saved_run
from ..runs.parts import READ
from .columns import WORD_LABELS
from .formats import RUN, format_of
from .records import (
    ItemRow,
    read_heads,
    read_manifest,
    read_records,
    records_there,
    rows_in_order,
)

if TYPE_CHECKING:
    import pandas as pd


_SHOWN = 8  # items in a notebook


class SavedBatch(Mapping[str, SavedRun]):
    """The items of a batch run, id to run, in the order of the input.

        batch = open_batch("RUN")
        batch["000012"].heatmaps["cat"].map
        batch[0]  # the first; batch[-1] the last
        batch.to_dataframe()  # one row per word of each item

    Each item is read when it is accessed.
    """

    def __init__(self, root: str | Path):
        self._place = Place(root)
        self._manifest = read_manifest(self._place)
        self._format = format_of(self._place, self._manifest)

    @cached_property
    def _locations(self) -> dict[str, tuple[str, str]]:
        return {row["id"]: (row["place"], row["run_sha256"]) for row in self._rows()}

    def _rows(self) -> Iterator[ItemRow]:
        """Yield the rows of the whole items."""
        records = read_records(self._place, self._manifest)
        return (row for row in rows_in_order(records) if "failed" not in row)

    def __repr__(self) -> str:
        settings = self._manifest.settings
        items = f"{len(self)} of {self._manifest.input.items} items"
        how = f"{settings.model}, format {settings.format}"
        return f"SavedBatch({str(self._place.root)!r}: {items}, {how})"

    def __getitem__(self, item: str | int) -> SavedRun:
        if isinstance(item, int):
            ids: list[str] = list(self._locations)
            if not -len(ids) <= item < len(ids):
                there = f"0 to {len(ids) - 1}" if ids else "none"
                raise NotFoundError(f"{self._place.root} has no item {item}; by position: {there}.")
            item = ids[item]
        if item not in self._locations:
            raise NotFoundError(f"{self._place.root} holds no item {item!r}.")
        location, checksum = self._locations[item]
        where = inside(self._place.root, location)
        files = self._format.read(location, item, READ)
        if sha256(files[RUN]) != checksum:
            raise InvalidValueError(
                f"{where} does not hold {item!r} as it was drawn: its {RUN} is another than the "
                f"record of its shard says. `verify()` lists what is damaged."
            )
        return saved_run(files, where, f"{where} ({item})")

    def _repr_html_(self) -> str:
        from ..maps.notebook import figures_of

        first = [(id_, self[id_]) for id_ in islice(self, _SHOWN)]
        parts = [(run.image, id_, run.heatmaps.prompt.text) for id_, run in first]
        return f"<p>{escape(repr(self))}</p>{figures_of(parts)}"

    def __contains__(self, item: object) -> bool:
        return item in self._locations  # a Mapping's own would read the item

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a pandas table of all items' words, in the order of the input and of the prompt.

        Its columns are ``id``, ``prompt`` and ``seed`` of the item; ``word`` and ``occurrence``, 0
        for the first in its prompt, so that ``batch[id].heatmaps.find(word)[occurrence]`` is its
        heatmap; the list's columns that the run kept, as text; and the numbers of
        :class:`sdattn.maps.statistics.WordStatistics`, float64, to six significant digits, as in
        :meth:`sdattn.Heatmaps.to_dataframe`. They come from the shards' records: no item is opened,
        and items saved without maps are included.
        """
        columns = self._manifest.input.columns or ()
        return to_dataframe(self._words(columns), (*WORD_LABELS, *columns))

    def _words(self, columns: list[str] | tuple[()]) -> Iterator[ItemRow]:
        for row in self._rows():
            seen = Counter[str]()
            item = {name: row.get(name) for name in ("id", "prompt", "seed", *columns)}
            for found in row["statistics"]:
                word = sys.intern(found["word"])  # millions of rows share few words
                yield {**item, **found, "word": word, "occurrence": seen[folded(word)]}
                seen[folded(word)] += 1


def open_batch(root: str | Path) -> SavedBatch:
    """Return the items of a batch run in any format.

    Raises:
        FileNotFoundError: no such folder, or it is not a batch run's.
        ValueError: ``batch.json`` is corrupt or of another version.
    """
    return SavedBatch(root)


@dataclass(frozen=True)
class Status:
    """Progress of a run, from its records alone.

    Attributes:
        items: number of items in its input.
        whole: items that are done.
        failed: items that could not be drawn.
        missing: whole items with words that probably did not arrive, see
            :meth:`sdattn.ImageRun.missing`.
        bad_lines: number of bad lines in its input.
        shards: number of shards, of which so many are ``done``.
        nbytes: bytes of what is done.
        began: when the run was begun, in seconds since 1970.
        rate: items a second in the last ten minutes in which a shard was done; None before the
            second shard.
        seconds_left: at that rate; None if it is not known.
    """

    items: int
    whole: int
    failed: int
    missing: int
    bad_lines: int
    shards: int
    done: int
    nbytes: int
    began: float
    rate: float | None
    seconds_left: float | None


_RECENT = 600.0  # seconds before the last record


def status(root: str | Path) -> Status:
    """Return a run's progress; raise as :func:`open_batch` does."""
    place = Place(root)
    manifest = read_manifest(place)
    made = manifest.input
    there = records_there(place, manifest)
    heads = [head for head in read_heads(place, manifest) if head is not None]
    whole = sum(head.whole for head in heads)
    failed = sum(head.failed for head in heads)
    # When each shard was done, and its items
    drawn = [
        (there[head.shard].time, head.whole + head.failed) for head in heads if head.shard in there
    ]
    rate = _rate(sorted(drawn))
    left = made.items - whole - failed
    return Status(
        items=made.items,
        whole=whole,
        failed=failed,
        missing=sum(head.missing for head in heads),
        bad_lines=made.bad_lines,
        shards=len(made.shards),
        done=len(heads),
        nbytes=sum(head.nbytes for head in heads),
        began=place.files()["batch.json"].time,
        rate=rate,
        seconds_left=left / rate if rate else None,
    )


def _rate(drawn: list[tuple[float, int]]) -> float | None:
    """Return the items a second between the first and the last of the recent records."""
    recent = [entry for entry in drawn if entry[0] >= drawn[-1][0] - _RECENT]
    spent = recent[-1][0] - recent[0][0] if recent else 0.0
    return sum(items for _, items in recent[1:]) / spent if spent > 0 else None
