"""Several runs' folders into one: the parts of an input, or the disks of several machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from .folder import BatchFolder
from .gallery import write_gallery
from .plan import digest
from .rows import Known


def merge(roots: Sequence[str | Path], out: str | Path) -> tuple[int, int]:
    """Bring the items of several batch runs into one folder.

    Where the runs drew parts of one input the folder is that of the whole input: the command
    without ``--part`` goes on in it. Items are linked where the disk allows it and copied
    elsewhere; the runs stay as they are. The same call again does what is missing.

    Args:
        roots: folders of batch runs, of one model, with the same settings.
        out: a new folder, or one that an earlier call made of these runs.

    Returns:
        The number of items in ``out``, and how many their input has.

    Raises:
        ValueError: the runs differ in model or settings, one id is of two different items, or
            ``out`` is of other runs.
        FileNotFoundError: as :func:`sdattn.batch.reading.open_batch`.
        OSError: one of the runs is being written, or ``out`` cannot be.
    """
    runs = [BatchFolder(root) for root in roots]
    for run in runs:
        if not run.lock.free():
            raise OSError(
                f"{run.root} is being written: {run.lock.describe_holder()}. Wait for it, or stop "
                "it."
            )
    manifest = _merged([run.manifest for run in runs], [str(run.root) for run in runs])
    rows = [run.rows() for run in runs]
    _check_twins(runs, rows)
    target, name = BatchFolder(out), uuid4().hex[:12]
    target.open(name)
    try:
        if not target.is_new and _identity(target.manifest) != _identity(manifest):
            raise ValueError(f"{out} is the folder of other runs. Choose another --out.")
        target.claim(manifest)
        _take_missing(target, name, runs, rows)
        number = target.gather()
        _merge_errors(runs, target)
        write_gallery(target)
        return number, manifest["input"]["items"]
    finally:
        target.close()


def _take_missing(
    target: BatchFolder,
    name: str,
    runs: Sequence[BatchFolder],
    rows: Sequence[Mapping[str, Known]],
) -> None:
    """Add what ``target`` does not hold yet, noted by ``name``."""
    whole, layout = set(target.settle()), target.layout
    for run, found in zip(runs, rows, strict=True):
        source = run.layout
        there = dict(source.find())  # a row may be of an item that was removed by hand
        for item, one in found.items():
            if item not in whole and there.get(item) == one.place:
                where = item, one.place
                layout.take(source, where, one.line, partial(target.note_whole, name))
                whole.add(item)
    layout.flush()


def _identity(manifest: Mapping[str, Any]) -> tuple[str, str, str]:
    settings = manifest["settings"]
    return settings["fingerprint"], settings["format"], manifest["input"]["digest"]


def _merged(manifests: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    first = manifests[0]
    for name, one in zip(names, manifests, strict=True):
        for key in ("fingerprint", "format"):
            if one["settings"][key] != first["settings"][key]:
                raise ValueError(
                    f"{name} and {names[0]} were made with different models or settings: "
                    f"{_told(one)} and {_told(first)}. Only runs that agree can be merged."
                )
    inputs = [one["input"] for one in manifests]
    made = {**inputs[0], "part": "1/1"}
    if len({one["digest"] for one in inputs}) == 1:
        made["items"] = made["all_items"]
    else:
        made["source"] = ", ".join(dict.fromkeys(one["source"] for one in inputs))
        made["digest"] = digest(sorted(one["digest"] for one in inputs))
        made["items"] = made["all_items"] = sum(one["items"] for one in inputs)
        made["bad_lines"] = sum(one["bad_lines"] for one in inputs)
    return {**first, "input": made}


def _told(manifest: Mapping[str, Any]) -> str:
    settings = manifest["settings"]
    names = ("model", "weights", "dtype", "save", "format")
    told = [f"{name} {settings[name]}" for name in names]
    return ", ".join([*told, f"preset {settings['preset']['name']}"])


def _check_twins(runs: Sequence[BatchFolder], rows: Sequence[Mapping[str, Known]]) -> None:
    """Refuse an id of two different items; the same item in two runs is fine."""
    seen: dict[str, tuple[str, BatchFolder]] = {}
    for run, found in zip(runs, rows, strict=True):
        for item, one in found.items():
            mark, owner = seen.setdefault(item.lower(), (one.fingerprint, run))
            if mark != one.fingerprint:
                raise ValueError(
                    f"Item {item!r} of {run.root} is not that of {owner.root}. Give the items of "
                    "one of them other ids and draw it again."
                )


def _merge_errors(runs: Sequence[BatchFolder], target: BatchFolder) -> None:
    bad: dict[tuple[str, int], Any] = {}
    for run in runs:
        for row in run.failures().values():
            target.note("failed", "merged", row)
        of = run.manifest["input"]["digest"]
        path = run.root / "errors.jsonl"
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            row = json.loads(line)
            if "id" not in row:
                bad[of, row["line"]] = row
    target.gather_errors(bad.values(), target.rows())
