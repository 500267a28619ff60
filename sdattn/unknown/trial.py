"""`rehearsed()`: what a capture would make of calls that a dry run saw, without a call of the
model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..keep.keep import Keep
from ..keep.map_store import CapturedMaps
from ..look.sdpa import Unlike
from .module_calls import ModuleCalls, SeenCall
from .told import Placed
from .watching import new_watch


def rehearsed(
    model: Any,
    args: tuple[object, ...],
    kwargs: Mapping[str, Any],
    calls: Sequence[SeenCall],
    unlike: Sequence[Unlike],
    options: Mapping[str, Any],
) -> list[Placed | None]:
    """Return the place of each call in a capture with some ``options``; None for one in no map.
    Nothing is computed: the ``calls`` have no values. How far the outputs of a replacement of
    torch's attention are ``unlike`` torch's own is judged as in a capture.

    Raises:
        ValueError, RuntimeError: whatever the capture would raise.
    """
    keep = Keep.of(**options)
    store = CapturedMaps([], keep)
    watch = new_watch(model, store, keep)
    names: dict[tuple[str, int, str | None], str] = {}
    try:
        begun = watch.run.reader.read(model, args, kwargs)
        watch.begin_pass(begun)
        found = []
        for one in calls:
            settled = set(watch.calls.doubtful)
            found.append(watch.see(replace(one, names=names)))
            _settle(watch.calls, settled, one.arrived)
        watch.calls.unlike.extend(unlike)
        watch.end_pass(begun)
        watch.check()
        store.check()
    finally:
        watch.close()
    return found


def _settle(doubts: ModuleCalls, before: set[str], arrived: set[int]) -> None:
    """Tell which image the rows of the last call belong to, by the images that it went on as."""
    for name in set(doubts.doubtful) - before:
        if len(doubts.doubtful[name]) in arrived:
            del doubts.doubtful[name]
    if max(arrived, default=1) > 1:
        doubts.several.update(doubts.folded)
    doubts.folded.clear()
