"""Whether a folder belongs to this very run: its input, its model and its settings; and whether
the items of one whose ``batch.json`` is lost do, and are as they were written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from .. import __version__
from ..runs.info import FORMAT as RUN_FORMAT
from .checking import check_item
from .folder import BatchFolder, layout_of
from .layouts import Layout
from .manifest import FORMAT
from .plan import Job, digest, digest_inputs
from .request import Request
from .rows import NotedRow, row_at
from .whole import settle

_DECISIVE = ("weights", "dtype", "save", "preset")  # settings that the items' files follow from
_OTHER = {"folder": "shard", "shard": "folder"}


def settings_of(request: Request, pipe: Any, weights: str) -> dict[str, Any]:
    """What ``batch.json`` says of a run's settings."""
    settings: dict[str, Any] = {
        "model": str(request.model),
        "weights": weights,
        "pipeline": type(pipe).__name__,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "save": sorted(request.save),
        "preset": request.preset.to_json(),
        "options": dict(request.options),
        "format": request.format,
        "shard_bytes": request.shard_bytes,
    }
    settings["fingerprint"] = digest([RUN_FORMAT, *(settings[name] for name in _DECISIVE)])
    return json.loads(json.dumps(settings))  # to compare with those of a batch.json


def describe_input(
    request: Request, jobs: Sequence[Job], items: int, bad_lines: int
) -> dict[str, Any]:
    """What ``batch.json`` says of a run's input; ``items`` are those of its part."""
    return {
        "source": str(request.source),
        "digest": digest_inputs(jobs),
        "part": "{}/{}".format(*request.part),
        "items": items,
        "all_items": len(jobs),
        "bad_lines": bad_lines,
    }


@dataclass(frozen=True)
class Claim:
    """A run that asks for a folder.

    Attributes:
        settings: see :func:`settings_of`.
        input: see :func:`describe_input`.
        batch_size: items that run together; another one is no other run.
    """

    settings: Mapping[str, Any]
    input: Mapping[str, Any]
    batch_size: int

    def make(
        self,
        folder: BatchFolder,
        fingerprints: Mapping[str, str],
        ids: Iterable[str] = (),
        *,
        force: bool = False,
        adopt: bool = False,
    ) -> set[str]:
        """Take a folder and bring it in order; returns what of the run is whole in it.

        Args:
            folder: open and locked.
            fingerprints: of each item of the run, by id.
            ids: of the whole input, in its order.
            adopt: read every item whole, and have those that are damaged made anew.
            force: where the folder is of another input, model or setting, remove the items that
                differ and keep the others.

        Raises:
            ValueError: the folder is of another input, model or setting.
        """
        new = folder.is_new
        differences = [] if new else self._differences(folder.manifest)
        if differences and not force:
            raise ValueError(
                f"{folder.root} belongs to another run: {'; '.join(differences)}. Choose another "
                "--out, or pass --force to make anew what differs and keep the rest."
            )
        if not new and folder.manifest["settings"]["format"] != self.settings["format"]:
            raise ValueError(
                f"{folder.root} has the format {folder.manifest['settings']['format']!r}, which "
                "--force does not change. Choose another --out."
            )
        damaged = {}
        if adopt:
            damaged = check_adopted(folder, self.settings, fingerprints, force)
        folder.claim(self._document(), ids)
        folder.layout.discard(damaged)
        rows = settle(folder, fingerprints)
        stale = _stale(rows, fingerprints)
        if stale and not force:
            raise ValueError(
                f"{folder.root} holds {len(stale)} item(s) of other settings, {sorted(stale)[0]} "
                "for one. Choose another --out, or pass --force to make them anew."
            )
        if stale:
            folder.layout.discard(stale)
            rows = settle(folder, fingerprints)
        return rows.keys() & fingerprints.keys()

    def _document(self) -> dict[str, Any]:
        """``batch.json``."""
        return {
            "format": FORMAT,
            "settings": self.settings,
            "input": self.input,
            "batch_size": self.batch_size,
            "versions": {
                "sdattn": __version__,
                **{name: version(name) for name in ("torch", "diffusers", "transformers")},
            },
        }

    def _differences(self, manifest: Mapping[str, Any]) -> list[str]:
        """How the run that made a folder differs from this one, a phrase each."""
        found = []
        before = manifest["settings"]
        for name in ("weights", "pipeline", "dtype", "save", "preset", "options", "format"):
            old, new = before.get(name), self.settings[name]
            if old != new:
                what = "the model's weights or configuration" if name == "weights" else name
                found.append(f"{what} {_short(old)} is now {_short(new)}")
        old, new = manifest["input"], self.input
        for name, what in (("part", "part"), ("digest", "input")):
            if old[name] != new[name]:
                text = f"the {what} is another one"
                found.append(f"{text} ({old['source']}: {old['items']} items, now {new['items']})")
                break
        return found


def _stale(rows: Mapping[str, NotedRow], fingerprints: Mapping[str, str]) -> dict[str, str]:
    return {
        item: row.place
        for item, row in rows.items()
        if item in fingerprints and row.fingerprint != fingerprints[item]
    }


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
    root, temporary, rows = folder.root, folder.temporary, folder.journals.rows()
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
    rows: Mapping[str, NotedRow],
    where: tuple[str, str],
) -> list[str] | None:
    """What is wrong with an item; None where it is as it was written, but for another run."""
    item, place = where
    row = row_at(rows, item, place)
    if problems := check_item(layout, item, place, row, ()):
        return problems
    info = json.loads(layout.read(item, place, ["run.json"])["run.json"])
    if info.get("fingerprint") != fingerprints.get(item):
        return None
    return check_item(layout, item, place, row, save)
