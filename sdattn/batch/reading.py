from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NotFoundError
from ..files.paths import inside
from ..maps.statistics import to_dataframe
from ..runs.folder import SavedRun, saved_run
from ..runs.parts import READ
from .storage.checking import check_item
from .storage.folder import BatchFolder
from .storage.layouts import Layout
from .storage.manifest import Manifest
from .storage.rows import WORD_LABELS, NotedRow, row_at, word_rows
from .storage.whole import survey

if TYPE_CHECKING:
    import pandas as pd


class SavedBatch(Mapping[str, SavedRun]):
    """The items of a batch run, id to run, in the order of the input.

        batch = open_batch("RUN")
        batch["000012"].heatmaps["cat"].map
        batch.to_dataframe()  # one row per word of each item

    Each item is read when it is accessed.
    """

    def __init__(self, root: str | Path):
        self._folder = BatchFolder(root)
        self._layout, self._manifest = self._folder.layout, self._folder.manifest
        rows = self._folder.journals.rows()
        self._locations = {
            item: rows[item].location for item in sorted(rows, key=lambda i: rows[i][:2])
        }

    def __repr__(self) -> str:
        settings, asked = self._manifest.settings, self._manifest.input.items
        how = f"{settings.model}, format {settings.format}"
        return f"SavedBatch({str(self._folder.root)!r}: {len(self)} of {asked} items, {how})"

    def __getitem__(self, item: str) -> SavedRun:
        if item not in self._locations:
            raise NotFoundError(f"{self._folder.root} holds no item {item!r}.")
        location = self._locations[item]
        where = inside(self._folder.root, location)
        files = self._layout.read(item, location, READ)
        return saved_run(files, where, f"{where} ({item})")

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
        :meth:`sdattn.Heatmaps.to_dataframe`. They come from ``metadata.jsonl``: no item is opened,
        and items saved without maps are included.
        """
        rows = sorted(self._folder.journals.rows().values(), key=lambda row: row[:2])
        columns = self._manifest.input.columns or ()
        return to_dataframe(word_rows(rows, columns), (*WORD_LABELS, *columns))


def open_batch(root: str | Path) -> SavedBatch:
    """Return the items of a batch run in any format.

    Raises:
        FileNotFoundError: no such folder, or it is not a batch run's.
        ValueError: ``batch.json`` is corrupt or of another version.
    """
    return SavedBatch(root)


@dataclass(frozen=True)
class Status:
    """Progress of a run.

    Attributes:
        items: number of items in its input.
        whole: items whose files all exist with their sizes; after ``force`` with another input more
            than ``items``.
        failed: items that could not be drawn the last time.
        bad_lines: number of bad lines in its input.
        running: description of the process at work, or None.
    """

    items: int
    whole: int
    failed: int
    bad_lines: int
    running: str | None


def status(root: str | Path) -> Status:
    """Return a run's progress; raise as :func:`open_batch` does."""
    folder = BatchFolder(root)
    made = folder.manifest.input
    running = None if folder.lock.free() else folder.lock.describe_holder()
    # with all files at their sizes, or without a row
    whole = {item for item, (_, lacking) in survey(folder).items() if not lacking}
    failed = len(folder.journals.failures().keys() - whole)
    return Status(made.items, len(whole), failed, made.bad_lines, running)


def verify(root: str | Path) -> tuple[int, list[str]]:
    """Read every item again and compare it with what was written.

    Returns:
        The number of items, and the problems, a line each: a file that is missing or has another
        checksum, also the folder's own; an image that does not open; maps that are not finite or
        not on the right grid; a row that disagrees with ``run.json``; a row without an item or an
        item without a row; lost items; unfinished files.

    Raises as :func:`open_batch`, but an altered ``batch.json`` is reported as a problem.
    """
    folder, problems, manifest = BatchFolder(root), list[str](), None
    try:
        manifest = folder.manifest
    except ValueError as error:
        problems.append(" ".join(str(error).split()))
    layout = folder.layout if manifest else folder.layout_found()
    # First the items against the rows, then every byte of every item.
    there, rows = list(layout.find()), folder.journals.rows()
    locations, broken = dict(there), dict(layout.broken())
    if twice := len(there) - len(locations):
        problems.append(f"{twice} item(s) are there twice")
    named = {row.location for row in rows.values()}
    problems += (reason for location, reason in broken.items() if location not in named)
    for item, row in rows.items():
        if locations.get(item) != row.location:
            why = f": {broken[row.location]}" if row.location in broken else ""
            problems.append(f"{item}: metadata.jsonl names {row.location}, where it is not{why}")
    if folder.lock.free():
        problems += _at_rest(folder, layout, manifest, locations, rows)
    problems += _harmed(layout, there, rows, manifest.settings.save if manifest else ())
    return len(locations), problems


def _harmed(
    layout: Layout,
    there: Sequence[tuple[str, str]],
    rows: Mapping[str, NotedRow],
    save: Collection[str],
) -> Iterator[str]:
    """Read everything; yield problems of items, or of a shard whose items are intact."""
    with ThreadPoolExecutor() as pool:
        told = pool.map(lambda at: check_item(layout, at[0], at[1], row_at(rows, *at), save), there)
        wrong = {where: problems for where, problems in zip(there, told, strict=True) if problems}
    for (item, location), problems in wrong.items():
        yield from (f"{item}: {problem} (in {location})" for problem in problems)
    sound = {location for _, location in there} - {location for _, location in wrong}
    for location in sorted(layout.altered(sound)):
        yield f"{location}: what lies between its files is not what was written"


def _at_rest(
    folder: BatchFolder,
    layout: Layout,
    manifest: Manifest | None,
    locations: Mapping[str, str],
    rows: Mapping[str, NotedRow],
) -> Iterator[str]:
    """Yield problems of a folder while nobody writes there."""
    for item in locations:
        if item not in rows:
            yield f"{item}: metadata.jsonl has no row; the next run adds it"
    for path in sorted(folder.temporary.glob("*")):
        yield f"{path.name}: unfinished, in {folder.temporary}"
    for location in layout.unfinished():
        yield f"{location}: unfinished, it has no run.json"
    if manifest is None or manifest.ended is None:  # damaged, or the run was killed
        return
    for name in folder.changed(manifest.ended):
        if (folder.root / name).is_file():
            yield f"{name} is not what the last run wrote: its checksum differs from batch.json's"
        else:
            yield f"{name} is missing"
    lost = manifest.ended.whole - len({*rows, *locations})
    if lost > 0:
        yield from _lost(folder, manifest, lost, {*rows, *locations})


def _lost(folder: BatchFolder, manifest: Manifest, number: int, known: set[str]) -> Iterator[str]:
    """Yield the items that are gone with their rows, by name if the names are certain."""
    known = known.union(folder.journals.failures())
    gone = [item for item in manifest.input.share_of(folder.ids()) if item not in known]
    if len(gone) == number:
        yield from (f"{item}: it was there when the last run ended, and is gone" for item in gone)
    else:
        yield f"{number:,} item(s) that were there when the last run ended are gone"
