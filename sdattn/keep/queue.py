"""`Queue`: while the model runs, plain layers only hand over query and key; when its pass ends, what
they attended to is computed for all layers of one shape together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor

from ..attention.calls import LayerCall, ProjectedCall, Rows
from ..attention.plain import at_a_time
from ..look.attended import softmax_of
from .layer_part import LayerPart

if TYPE_CHECKING:
    from .sums import Sum

# Bytes of query and key that wait, by kind of device; more is worked off before the pass ends. On
# GPUs the bound is not measured yet.
MAX_QUEUED_BYTES = {"cpu": 8 << 20}
MAX_QUEUED_BYTES_ELSEWHERE = 64 << 20
# Numbers in a layer's query and key up to which it waits on a CPU: joining larger ones costs more
# than it saves (scripts/benchmarks/bench_queue.py).
SMALL_ON_CPU = 1 << 16


_WRITTEN = (
    "Something wrote into the query or key of {} after the layer had run, and had not done so in "
    "the first step, so what it attended to is lost. Leave this layer out (layers=…)."
)


def may_wait(call: LayerCall) -> TypeGuard[ProjectedCall]:
    """Check whether what a call attended to can be computed later, and is small enough."""
    if not isinstance(call, ProjectedCall):
        return False
    query = call.query
    key = call.key
    if query.is_inference() or query.requires_grad or key.requires_grad:
        return False  # no versions are counted; a graph would be held
    return query.device.type != "cpu" or query.numel() + key.numel() <= SMALL_ON_CPU


@dataclass
class _Entry:
    """One call of a layer: where it is added, and the versions of its query and key."""

    layer_sum: Sum
    part: LayerPart
    call: ProjectedCall
    rows: Rows
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

    def put(self, layer_sum: Sum, part: LayerPart, call: ProjectedCall, rows: Rows) -> None:
        """Add some rows of a call to its layer's sum: at once if it is the layer's first, else
        later."""
        is_first = layer_sum.total is None
        if is_first:
            layer_sum.add_now(part, softmax_of(call.of_rows(rows)))
        query = call.query
        key = call.key
        versions = [query._version, key._version]
        self._waiting.append(_Entry(layer_sum, part, call, rows, versions, is_first))
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
                entry.layer_sum.may_wait = False
                if not entry.is_added:
                    entry.layer_sum.problem = _WRITTEN.format(entry.layer_sum.layer.name)
            elif not entry.is_added:
                shape = call.query.shape, call.key.shape, call.heads
                kind = call.query.dtype, call.query.device, repr(entry.rows)
                groups[shape, kind, entry.part.columns].append(entry)
        for entries in groups.values():
            self._add(entries)

    def drop(self) -> None:
        """Forget what waits: its pass did not end."""
        waiting = self._waiting
        self._waiting = []
        self._bytes = 0
        for entry in waiting:
            if not entry.is_added:
                entry.layer_sum.added.pop()

    @torch.no_grad()
    def _add(self, entries: Sequence[_Entry]) -> None:
        """Add calls of one shape, as the rows of one call."""
        call = entries[0].call
        rows = entries[0].rows
        layer_sums = [entry.layer_sum for entry in entries]
        part = entries[0].part
        held = [cast(Tensor, one.total) for one in layer_sums]  # each layer's first call made it
        images = held[0].shape[0]
        each = images * call.heads * call.cells * call.keys
        runs_twice = len({id(one) for one in layer_sums}) < len(layer_sums)
        if len(entries) == 1 or runs_twice or 2 * each > at_a_time(call.query.device):
            for entry in entries:
                entry.layer_sum.add_now(part, softmax_of(entry.call.of_rows(rows)))
            return
        names = tuple(one.layer.name for one in layer_sums)
        sums = self._groups.get(names)
        for own in held:
            if own._base is not sums:
                sums = None
        if sums is None:
            sums = torch.cat(held)
            for one, own in zip(layer_sums, sums.split(images), strict=True):
                one.total = own
            others = {key: one for key, one in self._groups.items() if set(key).isdisjoint(names)}
            self._groups = {**others, names: sums}
        if layer_sums[0].keep.steps.last:
            sums.zero_()
        joined = ProjectedCall.joined([entry.call for entry in entries], rows)
        softmax_of(joined).add_to(sums, part.columns)
