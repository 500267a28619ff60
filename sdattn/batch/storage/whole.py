"""Finding the whole items of a batch run's folder: those with all files, at their sizes."""

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

from ...errors import InvalidValueError
from ...files.terminal import say
from ...runs.info import read_info
from .folder import BatchFolder
from .rows import NotedRow, rows_in, sizes_in

_NO_ITEM = "it has no run.json"
_MOST_NAMED = 20  # items named one by one


class Seen(NamedTuple):
    """An item's location, and the files it lacks by its row; None without one."""

    location: str
    lacking: Sequence[str] | None


def settle(folder: BatchFolder, redrawn: Container[str] = ()) -> dict[str, NotedRow]:
    """Bring ``metadata.jsonl`` of an open folder into agreement with the items; return the rows, by
    id.

    Rows lost in a crash are read from the items. Remains of items are removed if they are
    ``redrawn``; others stay, and are named on stderr.
    """
    layout, seen = folder.layout, survey(folder)
    layout.clear_unfinished()
    damage = _note_unnoted(folder, seen)
    # Removing items may move others to another shard, so everything is surveyed again.
    stale = {item: seen[item].location for item in damage if item in redrawn}
    if stale:
        _report([_of_item(item, damage[item], at, "drawn again") for item, at in stale.items()])
        layout.discard(stale)
        return settle(folder, redrawn)
    # A folder that is not an item is not ours to remove.
    for item, reason in damage.items():
        if reason == _NO_ITEM:
            where = folder.root / seen[item].location
            raise InvalidValueError(f"{where} is not an item: {reason}. Remove it.")
    broken = [f"{reason}; its items are drawn again" for _, reason in layout.broken()]
    _report(broken + [_of_item(i, damage[i], seen[i].location, "left as it is") for i in damage])
    # Rows are kept for whole items, and for damaged items that had one.
    kept = {item: at for item, (at, lacking) in seen.items() if item not in damage or lacking}
    folder.journals.gather(kept)
    return folder.journals.rows()


def whole_items(folder: BatchFolder) -> tuple[dict[str, NotedRow], list[str]]:
    """Return the whole items, by id, and the ids of items that have a row but are not whole."""
    rows, found = folder.journals.rows(), dict[str, NotedRow]()
    for item, (location, lacking) in survey(folder).items():
        row = rows.get(item)
        with suppress(OSError, ValueError):
            if lacking is None:
                read = _read_row(folder, item, location)
                if read["id"] == item:
                    found[item] = NotedRow(read["line"], location, read["fingerprint"])
            elif not lacking and row is not None and row.location == location:
                found[item] = row
    return found, [item for item in rows if item not in found]


def survey(folder: BatchFolder) -> dict[str, Seen]:
    """Look at every existing item, by id."""
    layout = folder.layout
    there = dict(layout.find())  # first: then a bucket is listed only once
    lacking: dict[tuple[str, str], list[str]] = {}
    for path in folder.journals.files()[0 if folder.trusts_rows else 1 :]:
        for row in rows_in(path):
            written = sizes_in(row)
            if written is not None and isinstance(row.get("place"), str):
                where = row["id"], row["place"]
                lacking[where] = layout.lacking(*where, written)
    return {item: Seen(at, lacking.get((item, at))) for item, at in there.items()}


def _note_unnoted(folder: BatchFolder, seen: Mapping[str, Seen]) -> dict[str, str]:
    """Note the items without a good row; return the problems of items that are not whole, by id."""
    writer, damage = f"settled-{uuid4().hex[:12]}", dict[str, str]()
    for item, (location, lacking) in seen.items():
        if lacking:
            damage[item] = f"{', '.join(lacking[:3])} is missing or cut short"
        elif lacking is None:
            try:
                folder.journals.note("done", writer, _read_row(folder, item, location))
            except ValueError as error:
                damage[item] = str(error)
    return damage


def _read_row(folder: BatchFolder, item: str, location: str) -> dict[str, Any]:
    files = folder.layout.read(item, location, ["run.json"])
    if "run.json" not in files:
        raise InvalidValueError(_NO_ITEM)
    info = read_info(files, location)
    row = folder.row(item, location, files, info)
    if lost := info.files.keys() - (sizes_in(row) or {}).keys():
        raise InvalidValueError(f"{', '.join(sorted(lost)[:3])} is missing")
    return row


def _of_item(item: str, reason: str, location: str, end: str) -> str:
    return f"item {item} is not whole: {reason} ({location}); it is {end}"


def _report(lines: Sequence[str]) -> None:
    for line in lines[:_MOST_NAMED]:
        say(line)
    if len(lines) > _MOST_NAMED:
        say(f"and {len(lines) - _MOST_NAMED:,} more")
