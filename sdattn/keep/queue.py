"""`Queue`: while the model runs, plain layers only hand over query and key; when its pass ends,
what they attended to is computed for all layers of one shape together."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, cast

import torch
from torch import Tensor

from ..attention.calls import LayerCall, ProjectedCall, Rows
from ..attention.modes import own_arithmetic
from ..attention.plain import at_a_time
from ..follow.passes import Pass
from ..look.attended import HeadSums, softmax_of
from ..models.layers import AttentionLayer
from .keep import Keep
from .layer_part import LayerPart

# Bytes of query and key that wait, by kind of device; more is worked off before the pass ends. What
# was added last is held too, up to as many. On GPUs the bound is not measured yet.
MAX_QUEUED_BYTES = {"cpu": 8 << 20}
MAX_QUEUED_BYTES_ELSEWHERE = 64 << 20
# Numbers in a layer's query and key up to which it waits on a CPU: joining larger ones costs more
# than it saves (scripts/benchmarks/bench_queue.py).
SMALL_ON_CPU = 1 << 16

_WRITTEN = (
    "Something wrote into the query or key of {} after the layer had run, and had not done so in "
    "the first step, so what it attended to is lost. Leave this layer out (layers=…)."
)
_FAILED = (
    "The attention of {} could not be added up when the model's call ended, so its maps lack that "
    "call. Enter capture() again for a whole run."
)


def may_wait(call: LayerCall) -> TypeGuard[ProjectedCall]:
    """Check whether what a call attended to can be computed later, and is small enough."""
    if not isinstance(call, ProjectedCall):
        return False
    query = call.query
    key = call.key
    if query.is_inference() or query.requires_grad or key.requires_grad:
        return False  # no versions are counted; a graph would be held
    if type(query) is not Tensor or type(key) is not Tensor:
        return False  # may have no memory of its own
    return query.device.type != "cpu" or query.numel() + key.numel() <= SMALL_ON_CPU


class Receiver(Protocol):
    """A layer's sum as a queue sees it, see :class:`sdattn.keep.sums.Sum`."""

    layer: AttentionLayer
    keep: Keep
    added: list[Pass]
    total: Tensor | None
    may_wait: bool
    is_trusted: bool
    problem: str

    def add_now(self, part: LayerPart, attended: HeadSums) -> None: ...


@dataclass(slots=True, eq=False)
class _Entry:
    """One call of a layer: where it is added, and the versions and memory of its query and key."""

    layer_sum: Receiver
    part: LayerPart
    call: ProjectedCall
    rows: Rows
    versions: tuple[int, int]
    memory: tuple[tuple[int, int], ...]  # (first address, one behind the last) of each
    is_added: bool  # only watched for somebody who writes into its query or key


class Queue:
    """Calls that wait to be added to their layers' sums.

    A query or key that somebody writes into while it waits would make a wrong map. torch counts its
    own writes (rotary embeddings in place, say), but not what a CUDA graph or a kernel writes into
    a workspace that it uses again. A workspace is known by its memory: the tensors that wait, and
    the ones that were added last, are held, so that a new tensor cannot share memory with them.
    Each layer's first call is added at once, and watched. A layer that was written into, or that
    shares memory, waits no more.
    """

    def __init__(self) -> None:
        self._waiting: list[_Entry] = []
        self._bytes = 0
        self._last: list[_Entry] = []  # that were added last, whose memory is held
        self._starts: list[int] = []  # of that memory, in parts that do not overlap
        self._ends: list[int] = []
        self._groups: dict[tuple[str, ...], Tensor] = {}  # sums by their layers' names

    def put(self, layer_sum: Receiver, part: LayerPart, call: ProjectedCall, rows: Rows) -> None:
        """Add some rows of a call to its layer's sum: at once if the layer is not known to leave
        its query and key alone, else later."""
        query = call.query
        key = call.key
        of_query = query.untyped_storage()
        of_key = key.untyped_storage()
        start = of_query.data_ptr()
        memory = [(start, start + of_query.nbytes())]
        start = of_key.data_ptr()
        memory.append((start, start + of_key.nbytes()))
        for start, end in memory:
            before = bisect_left(self._starts, end) - 1
            if before >= 0 and self._ends[before] > start:
                layer_sum.may_wait = False  # that memory is still held
        is_added = layer_sum.total is None or not (layer_sum.is_trusted and layer_sum.may_wait)
        if is_added:
            layer_sum.add_now(part, softmax_of(call.of_rows(rows)))
        versions = query._version, key._version
        entry = _Entry(layer_sum, part, call, rows, versions, tuple(memory), is_added)
        self._waiting.append(entry)
        self._bytes += query.nbytes + key.nbytes
        if self._bytes > MAX_QUEUED_BYTES.get(query.device.type, MAX_QUEUED_BYTES_ELSEWHERE):
            self.work_off()

    def work_off(self) -> None:
        """Add what waits; between two passes nothing does."""
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = []
        self._bytes = 0
        shared = self._hold(waiting)
        groups: dict[object, list[_Entry]] = defaultdict(list)
        for number, entry in enumerate(waiting):
            call = entry.call
            layer_sum = entry.layer_sum
            if number in shared or (call.query._version, call.key._version) != entry.versions:
                layer_sum.may_wait = False
                if not entry.is_added:
                    layer_sum.problem = _WRITTEN.format(layer_sum.layer.name)
            elif entry.is_added:
                layer_sum.is_trusted = True
            else:
                query = call.query
                kind = query.shape, call.key.shape, call.heads, query.dtype, query.device
                groups[kind, id(entry.rows), entry.part.columns].append(entry)
        try:
            with own_arithmetic():
                for entries in groups.values():
                    self._add(entries)
        except BaseException:
            for entries in groups.values():
                for entry in entries:
                    entry.layer_sum.problem = _FAILED.format(entry.layer_sum.layer.name)
            raise

    def _hold(self, waiting: list[_Entry]) -> set[int]:
        """Hold the memory of these calls until the next are added, and return the numbers of those
        that share some with another call."""
        self._last = waiting
        self._starts = []
        self._ends = []
        parts: list[tuple[int, int, int]] = []
        for number, entry in enumerate(waiting):
            for start, end in entry.memory:
                parts.append((start, end, number))
        parts.sort()
        shared = set()
        furthest = -1  # the call whose memory goes furthest so far
        for start, end, number in parts:
            if not self._ends or start >= self._ends[-1]:
                self._starts.append(start)
                self._ends.append(end)
                furthest = number
                continue
            if number != furthest:  # query and key of one call may be parts of one tensor
                shared |= {number, furthest}
            if end > self._ends[-1]:
                self._ends[-1] = end
                furthest = number
        return shared

    def drop(self) -> None:
        """Forget what waits: its pass did not end."""
        waiting = self._waiting
        self._waiting = []
        self._bytes = 0
        for entry in waiting:
            if not entry.is_added:
                entry.layer_sum.added.pop()

    def close(self) -> None:
        """Let go of all tensors of the model, and of sums that were joined."""
        self.drop()
        self._last = []
        self._groups = {}

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
