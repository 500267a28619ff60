"""Runs that may be stopped before the steps that their preset reads keep the earlier steps too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import CaptureError
from ..follow.capture_warnings import Stopped
from ..keep.keep import Steps
from ..maps.capture import MapStore
from ..maps.layermaps import read_steps
from ..maps.presets import Preset
from ..models.pipeline import Options

_CALLBACKS = ("callback_on_step_end", "callback")  # by which a run is stopped
_EARLY = "early "


class StoppedError(CaptureError):
    """A run was stopped before the steps that its preset reads, so it has no maps.

    Attributes:
        images: what was drawn, PIL; lists of frames for videos.
    """

    def __init__(self, message: str, images: Sequence[object] = ()):
        super().__init__(message)
        self.images = list(images)


def has_callback(options: Options) -> bool:
    """Check whether a run with these options of the pipeline may be stopped by a callback."""
    return any(options.get(name) for name in _CALLBACKS)


def with_early(watched: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what to capture of a run that may be stopped: also the steps before the part to keep,
    in stores of their own."""
    found = dict(watched)
    for name, kept in watched.items():
        part = Steps.of(kept.get("steps", "mean")).part
        if part is not None and part.first > 0:
            found[_EARLY + name] = {**kept, "steps": (0.0, part.first)}
    return found


def settled(stores: Mapping[str, MapStore], images: Sequence[object]) -> dict[str, MapStore]:
    """Return the stores to read after a run, checked; raise StoppedError if it was stopped too
    early for any of them."""
    own = {name: store for name, store in stores.items() if not name.startswith(_EARLY)}
    stopped = own["prompt"].stopped
    if stopped is not None and not own["prompt"].maps:
        own = {name: stores.get(_EARLY + name, store) for name, store in own.items()}
        if not own["prompt"].maps:
            said = (
                f"The run was stopped after {stopped.after} of {stopped.steps} steps, before those "
                "that its preset reads, so there are no maps. What was drawn is in `images` of "
                "this error. To have maps of a run that may be stopped, keep each step: "
                "`capture_options={'steps': 'all'}`."
            )
            raise StoppedError(said, images)
    for store in own.values():
        store.check()
    return own


def stop_of(store: MapStore, preset: Preset) -> Stopped | None:
    """Return where the run was stopped, with the steps that a preset's maps are of."""
    if store.stopped is None:
        return None
    kept = [number for number in range(len(store.passes)) if store.keeps(number)]
    return replace(store.stopped, kept=tuple(kept[place] for place in read_steps(store, preset)))
