"""`Queue`: plain layers only hand over query and key while the model runs; what they attended to is
computed for all layers of one shape together, when the model's pass ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from ..look.attended import Attended, Columns, Projected, new_sums

if TYPE_CHECKING:
    from .running_sums import RunningSum

# Bytes of query and key that wait, by kind of device; more is worked off before the pass ends.
MAX_QUEUED_BYTES = {"cpu": 8 << 20}
MAX_QUEUED_BYTES_ELSEWHERE = 64 << 20
# Numbers in a layer's query and key up to which it waits on a CPU: joining larger ones costs more
# than it saves (scripts/benchmarks/bench_queue.py).
SMALL_ON_CPU = 1 << 16


def may_wait(attended: Attended) -> TypeGuard[Projected]:
    """Check whether what a call attended to can be computed later, and is small enough."""
    if not isinstance(attended, Projected):
        return False
    query, key = attended.query, attended.key
    if query.is_inference() or query.requires_grad or key.requires_grad:
        return False  # no versions are counted; a graph would be held
    return query.device.type != "cpu" or query.numel() + key.numel() <= SMALL_ON_CPU


@dataclass
class _Entry:
    """One call of a layer: where it is added, and the versions of its query and key."""

    held: RunningSum
    attended: Projected
    columns: Columns
    versions: list[int]
    is_added: bool  # only watched for somebody who writes into its query or key


class Queue:
    """Calls that wait to be added to their layers' sums.

    A query or key that somebody writes into while it waits (rotary embeddings in place, say) would
    make a wrong map. So each layer's first call is added at once, and watched; a layer that was
    written into then is never queued.
    """

    def __init__(self) -> None:
        self._waiting: list[_Entry] = []
        self._bytes = 0
        self._groups: dict[tuple[str, ...], Tensor] = {}  # sums by their layers' names

    def put(self, held: RunningSum, attended: Projected, columns: Columns) -> None:
        """Add a call to its layer's sum: at once if it is the layer's first, else later."""
        is_first = not held.calls
        if is_first:
            held.total = attended.add_to(None, columns)
        query, key = attended.query, attended.key
        versions = [query._version, key._version]
        self._waiting.append(_Entry(held, attended, columns, versions, is_first))
        self._bytes += query.nbytes + key.nbytes
        if self._bytes > MAX_QUEUED_BYTES.get(query.device.type, MAX_QUEUED_BYTES_ELSEWHERE):
            self.work_off()

    def work_off(self) -> None:
        """Add what waits; between two passes nothing does."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        groups: dict[object, list[_Entry]] = defaultdict(list)
        for entry in waiting:
            attended = entry.attended
            if [attended.query._version, attended.key._version] != entry.versions:
                entry.held.is_queued = False
                entry.held.is_spoilt |= not entry.is_added
            elif not entry.is_added:
                shape = attended.query.shape, attended.key.shape, attended.heads
                kind = attended.query.dtype, attended.query.device, repr(attended.rows)
                groups[shape, kind, entry.columns].append(entry)
        for entries in groups.values():
            self._add(entries)

    @torch.no_grad()
    def _add(self, entries: Sequence[_Entry]) -> None:
        """Add calls of one shape, as the rows of one call."""
        first = entries[0].attended
        layers = tuple(entry.held for entry in entries)
        is_last = layers[0].keep.steps.last
        if len(entries) == 1:
            layers[0].total = first.add_to(None if is_last else layers[0].total, entries[0].columns)
            return
        together = Projected.joined([entry.attended for entry in entries])
        names = tuple(held.layer.name for held in layers)
        total = self._groups.get(names)
        if is_last or total is None or not _are_views(layers, total):
            zeros = new_sums(first, first.query, entries[0].columns)
            total = torch.cat([zeros if is_last or la.total is None else la.total for la in layers])
            for held, part in zip(layers, total.split(first.batch), strict=True):
                held.total = part
            others = {key: one for key, one in self._groups.items() if set(key).isdisjoint(names)}
            self._groups = {**others, names: total}
        together.add_to(total, entries[0].columns)


def _are_views(layers: Iterable[RunningSum], total: Tensor) -> bool:
    """Check that these layers' sums are still the parts of one tensor."""
    return all(held.total is not None and held.total._base is total for held in layers)
