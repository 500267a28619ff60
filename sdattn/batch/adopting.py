"""A folder whose ``batch.json`` is lost: whether its items are a run's, and are as written."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from .checking import check_item
from .folder import BatchFolder
from .layouts import Layout, layout_of
from .rows import Known, copies_of

_OTHER = {"folder": "shard", "shard": "folder"}


def check_adopted(
    folder: BatchFolder, settings: Mapping[str, Any], fingerprints: Mapping[str, str], force: bool
) -> dict[str, str]:
    """Read all items of a folder whole, before it is taken.

    Args:
        folder: open; the checksums of each ``run.json`` are in its rows, where they are left.
        settings: of the run that takes it.
        fingerprints: of each item of that run.
        force: let items stay, or be made anew, that are not this run's.

    Returns:
        The items of the run that are damaged, id to place; each is named on stderr.

    Raises:
        ValueError: the items lie in the other format, or are of another run.
    """
    root, temporary, rows = folder.root, folder.temporary, folder.rows()
    other = {**settings, "format": _OTHER[settings["format"]]}
    if any(True for _ in layout_of(other, root, temporary).find()):
        raise ValueError(
            f"{root} holds items of the format {other['format']!r}. Pass --format "
            f"{other['format']}, or choose another --out."
        )
    layout = layout_of(settings, root, temporary)
    there = list(layout.find())
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(partial(_look, layout, settings["save"], fingerprints, rows), there))
    strange = sorted(
        item for (item, _), problems in zip(there, found, strict=True) if problems is None
    )
    if strange and not force:
        raise ValueError(
            f"{root} holds {len(strange)} item(s) that this command does not make, {strange[0]} "
            "for one: they are of another input, model or settings. Give the command that made "
            "them, or pass --force to make anew what differs and keep the rest."
        )
    damaged: dict[str, str] = {}
    for (item, place), problems in zip(there, found, strict=True):
        if problems:
            end = "made anew" if item in fingerprints else "left as it is"
            print(f"sdattn: {item}: {problems[0]} ({place}); it is {end}", file=sys.stderr)
            damaged |= {item: place} if item in fingerprints else {}
    return damaged


def _look(
    layout: Layout,
    save: list[str],
    fingerprints: Mapping[str, str],
    rows: Mapping[str, Known],
    where: tuple[str, str],
) -> list[str] | None:
    """What is wrong with an item; None where it is as it was written, but for another run."""
    item, place = where
    one = rows.get(item)
    row = None if one is None or one.place != place else b"".join(copies_of([one]))
    if problems := check_item(layout, item, place, row, ()):
        return problems
    info = json.loads(layout.read(item, place, ["run.json"])["run.json"])
    if info.get("fingerprint") != fingerprints.get(item):
        return None
    return check_item(layout, item, place, row, save)
