"""Several runs' folders into one: the parts of an input, or the disks of several machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..runs.folder import check_apart
from .folder import BatchFolder, Held
from .gallery import write_gallery
from .plan import digest
from .rows import bad_lines_in


@dataclass(frozen=True)
class Merged:
    """What came of a merge.

    Attributes:
        items: that ``out`` holds now.
        wanted: that the runs' input has.
        missing: ids of those that are in none of the runs, in the order of the input; of runs of
            an earlier version only those that they name.
    """

    items: int
    wanted: int
    missing: list[str]

    @property
    def lacks(self) -> int:
        """How many items are missing, named or not."""
        return len(self.missing) or max(0, self.wanted - self.items)


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
        FileExistsError: ``out`` is one of the runs, holds one or lies in one.
        FileNotFoundError: as :func:`sdattn.batch.reading.open_batch`.
        OSError: one of the runs is being written, or ``out`` cannot be.
    """
    made = merge_runs(roots, out)
    return made.items, made.wanted


def merge_runs(roots: Sequence[str | Path], out: str | Path) -> Merged:
    """:func:`merge`, which tells what is missing too."""
    runs = [BatchFolder(root) for root in roots]
    for run in runs:
        if not run.lock.free():
            raise OSError(
                f"{run.root} is being written: {run.lock.describe_holder()}. Wait for it, or stop "
                "it."
            )
    manifest = _merged([run.manifest for run in runs], [str(run.root) for run in runs])
    check_apart(Path(out), *(Path(run.root) for run in runs))
    found = [run.held() for run in runs]
    _check_twins(runs, [held for held, _ in found])
    target, name = BatchFolder(out), uuid4().hex[:12]
    target.open(name)
    try:
        if not target.is_new and _identity(target.manifest) != _identity(manifest):
            raise ValueError(f"{out} is the folder of other runs. Choose another --out.")
        ids = _ids(runs)
        target.claim(manifest, ids)
        _take_missing(target, name, runs, [held for held, _ in found])
        number = target.gather()
        _merge_errors(runs, target)
        write_gallery(target)
        target.seal(number)
        told = dict.fromkeys([*ids, *(one for _, lost in found for one in lost)])
        told |= dict.fromkeys(target.failures())
        whole = target.rows()
        missing = [item for item in told if item not in whole]
        return Merged(number, manifest["input"]["items"], missing)
    finally:
        target.close()


def _ids(runs: Sequence[BatchFolder]) -> list[str]:
    """The ids of the input that runs drew, or of their parts of several inputs."""
    inputs = [run.manifest["input"] for run in runs]
    if len({one["digest"] for one in inputs}) == 1:
        return next(filter(None, (run.ids() for run in runs)), [])
    found: dict[str, None] = {}
    for run, one in zip(runs, inputs, strict=True):
        which, of = map(int, one["part"].split("/"))
        found |= dict.fromkeys(run.ids()[which - 1 :: of])
    return [*found]


def _take_missing(
    target: BatchFolder,
    name: str,
    runs: Sequence[BatchFolder],
    found: Sequence[Mapping[str, Held]],
) -> None:
    """Add what ``target`` does not hold yet, noted by ``name``."""
    whole = set(target.settle({item for held in found for item in held}))
    layout = target.layout
    for run, held in zip(runs, found, strict=True):
        for item, one in held.items():
            if item not in whole:
                where = item, one.place
                layout.take(run.layout, where, one.line, partial(target.note_whole, name))
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


def _check_twins(runs: Sequence[BatchFolder], rows: Sequence[Mapping[str, Held]]) -> None:
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
        for row in bad_lines_in(run.root / "errors.jsonl"):
            bad[of, row["line"]] = row
    target.gather_errors(bad.values(), target.rows())
