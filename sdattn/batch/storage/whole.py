"""Which items of a batch run's folder are whole: each of their files is there with its size.

Rows repeat what the items themselves say, with the checksum of ``run.json`` and the size of each
file: after a crash what is missing is read from the items.
"""

import sys
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

from ...errors import InvalidValueError
from ...files.writing import sha256
from ...runs.info import read_info
from .folder import BatchFolder
from .layouts import Layout
from .rows import NotedRow, row_of, rows_in, sizes_in

_NO_ITEM = "it has no run.json"
_MOST_NAMED = 20  # items named one by one


class WholeItem(NamedTuple):
    """An item that is whole."""

    line: int
    location: str
    fingerprint: str


def settle(folder: BatchFolder, redrawn: Container[str] = ()) -> dict[str, NotedRow]:
    """Bring ``metadata.jsonl`` to what is there.

    Args:
        folder: open.
        redrawn: items that can be made anew: of those that are not whole what is left is removed.
            Others are named on stderr, and stay.

    Returns:
        The rows of the items that are whole, and of those that stay as they are, by id.
    """
    layout, journals = folder.layout, folder.journals
    # What is there, and of whom files are missing. An item without a row, or with a damaged one, is
    # read and noted; what cannot be read is damage.
    locations, missing = dict(layout.find()), _missing_files(folder)
    layout.clear_unfinished()
    damage = _note_unnoted(folder, locations, missing)
    # Damage that this run makes anew is removed. To remove items may move others to another shard,
    # so all of it is looked at again.
    stale = {item: locations[item] for item in damage if item in redrawn}
    if stale:
        _report([_of_item(item, damage[item], at, "made anew") for item, at in stale.items()])
        layout.discard(stale)  # which may move others
        return settle(folder, redrawn)
    # What is no item at all is not ours to remove.
    for item, reason in damage.items():
        if reason == _NO_ITEM:
            raise InvalidValueError(
                f"{folder.root / locations[item]} is no item: {reason}. Remove it."
            )
    _report(
        [f"{reason}; what it held is made anew" for _, reason in layout.broken()]
        + [
            _of_item(item, reason, locations[item], "left as it is")
            for item, reason in damage.items()
        ]
    )
    # Rows are kept of the whole, and of damaged items that had one and stay as they are.
    kept = [item for item in damage if (item, locations[item]) in missing]
    journals.gather({item: locations[item] for item in [*(locations.keys() - damage), *kept]})
    return journals.rows()


def find_whole(folder: BatchFolder) -> set[str]:
    """The items of which every file is there with its size; those without a row, which may be of
    another process, too."""
    there = [*folder.layout.find()]  # first: a storage is then listed once
    missing = _missing_files(folder)
    return {item for item, location in there if not missing.get((item, location))}


def whole_items(folder: BatchFolder) -> tuple[dict[str, WholeItem], list[str]]:
    """The items that are whole, by id, whether they have a row or not, and the ids of those that
    have one and are not. It only reads."""
    layout, rows = folder.layout, folder.journals.rows()
    there, found = [*layout.find()], dict[str, WholeItem]()
    missing = _missing_files(folder)
    for item, location in there:
        row, lost = rows.get(item), missing.get((item, location))
        with suppress(OSError, ValueError):
            if lost is None:
                read = _read_row(layout, item, location)
                if read["id"] == item:
                    found[item] = WholeItem(read["line"], location, read["fingerprint"])
            elif not lost and row is not None and row.location == location:
                found[item] = WholeItem(row.line, location, row.fingerprint)
    return found, [item for item in rows if item not in found]


def _missing_files(folder: BatchFolder) -> dict[tuple[str, str], list[str]]:
    """By id and location of each row: the files that are missing or of another size."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in folder.journals.files()[0 if folder.trusts_rows else 1 :]:
        for row in rows_in(path):
            written = sizes_in(row)
            if written is not None and isinstance(row.get("place"), str):
                where = row["id"], row["place"]
                found[where] = folder.layout.lacking(*where, written)
    return found


def _note_unnoted(
    folder: BatchFolder, locations: Mapping[str, str], missing: Mapping[tuple[str, str], list[str]]
) -> dict[str, str]:
    """Note the items that have no row, or a damaged one; returns what is wrong with
    those that are not whole, by id."""
    writer, damage = f"settled-{uuid4().hex[:12]}", dict[str, str]()
    for item, location in locations.items():
        lost = missing.get((item, location))
        if lost:
            damage[item] = f"{', '.join(lost[:3])} is missing or cut short"
        elif lost is None:
            try:
                row = _read_row(folder.layout, item, location)
                folder.journals.note("done", writer, row)
            except ValueError as error:
                damage[item] = str(error)
    return damage


def _read_row(layout: Layout, item: str, location: str) -> dict[str, Any]:
    """The row of an item from its ``run.json``; a ValueError says what is wrong with it."""
    files = layout.read(item, location, ["run.json"])
    if "run.json" not in files:
        raise InvalidValueError(_NO_ITEM)
    info = read_info(files, location)
    sizes = layout.sizes(item, location, ["run.json", *info.files])
    if lost := [name for name in info.files if name not in sizes]:
        raise InvalidValueError(f"{', '.join(lost[:3])} is missing")
    return row_of(info, location, sha256(files["run.json"]), sizes)


def _of_item(item: str, reason: str, location: str, end: str) -> str:
    return f"item {item} is not whole: {reason} ({location}); it is {end}"


def _report(lines: Sequence[str]) -> None:
    """The first of them on stderr, and how many more there are."""
    for line in lines[:_MOST_NAMED]:
        print(f"sdattn: {line}", file=sys.stderr)
    if len(lines) > _MOST_NAMED:
        print(f"sdattn: and {len(lines) - _MOST_NAMED:,} more", file=sys.stderr)
