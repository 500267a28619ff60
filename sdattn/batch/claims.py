"""Whether a folder belongs to this very run: its input, its model and its settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from .. import __version__
from ..runs.info import FORMAT as RUN_FORMAT
from .adopting import check_adopted
from .folder import FORMAT, BatchFolder
from .plan import Job, digest, digest_inputs
from .request import Request
from .rows import Known

_TOLD = ("weights", "dtype", "save", "preset")  # settings that the items' files follow from


def settings_of(request: Request, pipe: Any, weights: str) -> dict[str, Any]:
    """What ``batch.json`` says of a run's settings."""
    settings: dict[str, Any] = {
        "model": str(request.model),
        "weights": weights,
        "pipeline": type(pipe).__name__,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "save": sorted(request.save),
        "preset": json.loads(json.dumps(request.preset.to_json())),
        "options": json.loads(json.dumps(dict(request.options))),  # as it will be read again
        "format": request.format,
        "shard_bytes": request.shard_bytes,
    }
    settings["fingerprint"] = digest([RUN_FORMAT, *(settings[name] for name in _TOLD)])
    return settings


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
    """A run that wants a folder.

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
        """Take a folder, bring it in order, and tell what of the run is whole in it.

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
        rows = folder.settle(fingerprints)
        stale = _stale(rows, fingerprints)
        if stale and not force:
            raise ValueError(
                f"{folder.root} holds {len(stale)} item(s) of other settings, {sorted(stale)[0]} "
                "for one. Choose another --out, or pass --force to make them anew."
            )
        if stale:
            folder.layout.discard(stale)
            rows = folder.settle(fingerprints)
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


def _stale(rows: Mapping[str, Known], fingerprints: Mapping[str, str]) -> dict[str, str]:
    return {
        item: one.place
        for item, one in rows.items()
        if item in fingerprints and one.fingerprint != fingerprints[item]
    }


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
