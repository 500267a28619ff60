"""`Queue`: plain layers only hand over query and key while the model runs; what they attended to is
computed for all layers of one shape together, when the model's pass ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import Tensor

from ..attention.calls import LayerCall, ProjectedCall, Rows
from ..attention.plain import at_a_time
from ..look.attended import Columns, HeadSums, softmax_of

# Bytes of query and key that wait, by kind of device; more is worked off before the pass ends. On
# GPUs the bound is not measured yet.
MAX_QUEUED_BYTES = {"cpu": 8 << 20}
MAX_QUEUED_BYTES_ELSEWHERE = 64 << 20
# Numbers in a layer's query and key up to which it waits on a CPU: joining larger ones costs more
# than it saves (scripts/benchmarks/bench_queue.py).
SMALL_ON_CPU = 1 << 16


def may_wait(call: LayerCall) -> TypeGuard[ProjectedCall]:
    """Check whether what a call attended to can be computed later, and is small enough."""
    if not isinstance(call, ProjectedCall):
        return False
    query = call.query
    key = call.key
    if query.is_inference() or query.requires_grad or key.requires_grad:
        return False  # no versions are counted; a graph would be held
    return query.device.type != "cpu" or query.numel() + key.numel() <= SMALL_ON_CPU


@dataclass(eq=False)
class Total:
    """The sum of a layer's maps.

    Attributes:
        name: the layer's name.
        sums: float32 ``[images, N, T]``; None before anything is added.
        is_last: True if only the last call counts.
        may_wait: False if somebody writes into the layer's query or key.
        is_spoilt: somebody wrote into them while they waited, so the sum is not right.
    """

    name: str
    is_last: bool = False
    sums: Tensor | None = None
    may_wait: bool = True
    is_spoilt: bool = False

    def add(self, attended: HeadSums, columns: Columns) -> None:
        self.sums = attended.add_to(None if self.is_last else self.sums, columns)


@dataclass
class _Entry:
    """One call of a layer: where it is added, and the versions of its query and key."""

    total: Total
    call: ProjectedCall
    rows: Rows
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

    def put(self, total: Total, call: ProjectedCall, rows: Rows, columns: Columns) -> None:
        """Add some rows of a call to its layer's sum: at once if it is the layer's first, else
        later."""
        is_first = total.sums is None
        if is_first:
            total.add(softmax_of(call.of_rows(rows)), columns)
        query = call.query
        key = call.key
        versions = [query._version, key._version]
        self._waiting.append(_Entry(total, call, rows, columns, versions, is_first))
        self._bytes += query.nbytes + key.nbytes
        if self._bytes > MAX_QUEUED_BYTES.get(query.device.type, MAX_QUEUED_BYTES_ELSEWHERE):
            self.work_off()

    def work_off(self) -> None:
        """Add what waits; between two passes nothing does."""
        waiting = self._waiting
        self._waiting = []
        self._bytes = 0
        groups: dict[object, list[_Entry]] = defaultdict(list)
        for entry in waiting:
            call = entry.call
            if [call.query._version, call.key._version] != entry.versions:
                entry.total.may_wait = False
                entry.total.is_spoilt |= not entry.is_added
            elif not entry.is_added:
                shape = call.query.shape, call.key.shape, call.heads
                kind = call.query.dtype, call.query.device, repr(entry.rows)
                groups[shape, kind, entry.columns].append(entry)
        for entries in groups.values():
            self._add(entries)

    @torch.no_grad()
    def _add(self, entries: Sequence[_Entry]) -> None:
        """Add calls of one shape, as the rows of one call."""
        call = entries[0].call
        rows = entries[0].rows
        columns = entries[0].columns
        totals = [entry.total for entry in entries]
        held = [cast(Tensor, total.sums) for total in totals]  # each layer's first call made it
        images = held[0].shape[0]
        each = images * call.heads * call.cells * call.keys
        if len(entries) == 1 or 2 * each > at_a_time(call.query.device):
            for entry in entries:
                entry.total.add(softmax_of(entry.call.of_rows(rows)), columns)
            return
        names = tuple(total.name for total in totals)
        sums = self._groups.get(names)
        if sums is None or any(one._base is not sums for one in held):
            sums = torch.cat(held)
            for total, part in zip(totals, sums.split(images), strict=True):
                total.sums = part
            others = {key: one for key, one in self._groups.items() if set(key).isdisjoint(names)}
            self._groups = {**others, names: sums}
        if totals[0].is_last:
            sums.zero_()
        joined = ProjectedCall.joined([entry.call for entry in entries], rows)
        softmax_of(joined).add_to(sums, columns)
