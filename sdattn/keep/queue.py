"""`Queue`: while the model runs, plain layers only leave a copy of their query and key; when its
pass ends, what they attended to is computed for all layers of one shape together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard, cast

import torch
from torch import Tensor

from ..attention import plain
from ..attention.calls import LayerCall, ProjectedCall, chosen_rows
from ..attention.core import split_heads
from ..attention.modes import no_autocast, own_arithmetic
from ..follow.passes import Pass
from ..look.attended import Columns, HeadSums, softmax_of
from ..models.layers import AttentionLayer
from .layer_part import LayerPart

# Bytes of memory for the copies, by kind of device; if a pass has more, some are worked off before
# it ends. On GPUs the bound is not measured yet.
MAX_QUEUED_BYTES = {"cpu": 8 << 20}
MAX_QUEUED_BYTES_ELSEWHERE = 64 << 20
# Numbers in a layer's query and key up to which it waits on a CPU: copying larger ones costs more
# than it saves (scripts/benchmarks/bench_queue.py).
SMALL_ON_CPU = 1 << 16

_FAILED = (
    "The attention of {} could not be added up when the model's call ended, so its maps lack that "
    "call. Enter capture() again for a whole run."
)


def may_wait(call: LayerCall) -> TypeGuard[ProjectedCall]:
    """Check whether what a call attended to can be computed later, from copies."""
    # Another class of tensors may have no memory of its own.
    return isinstance(call, ProjectedCall) and type(call.query) is type(call.key) is Tensor


class Receiver(Protocol):
    """A layer's sum as a queue sees it, see :class:`sdattn.keep.sums.Sum`."""

    layer: AttentionLayer
    added: list[Pass]
    total: Tensor | None
    problem: str

    def add_now(self, part: LayerPart, attended: HeadSums) -> None: ...


class _Kind(NamedTuple):
    """Properties that calls have in common to be computed together."""

    query: torch.Size  # [B, N, heads*d]
    key: torch.Size  # [B, T, heads*d]
    dtype: torch.dtype
    key_dtype: torch.dtype
    device: torch.device
    heads: int
    first: int | None  # row that is kept, and the one after the last
    last: int | None
    columns: Columns

    @property
    def nbytes(self) -> int:
        """Bytes of one call's query and key."""
        of_query = self.query.numel() * self.dtype.itemsize
        return of_query + self.key.numel() * self.key_dtype.itemsize

    def gains(self) -> bool:
        """Check whether computing several calls together costs less than one after the other."""
        is_cpu = self.device.type == "cpu"
        if is_cpu and self.query.numel() + self.key.numel() > SMALL_ON_CPU:
            return False
        rows = len(range(self.query[0])[self.first : self.last])
        each = rows * self.heads * self.query[1] * self.key[1]
        return 2 * each <= plain.at_a_time(self.device)


class _Stack:
    """Memory for copies of queries and keys of one kind of call, used again in each pass, and the
    sums of the layers that wait, which are parts of one tensor."""

    def __init__(self, kind: _Kind, number: int):
        self.heads = kind.heads
        self.rows = slice(kind.first, kind.last)
        (batch, cells, width), keys, device = kind.query, kind.key[1], kind.device
        # The batch, the layers and the heads follow each other in memory, so that rows of the batch
        # of all layers, by head, are a view.
        shape = batch, number, width
        self.query = torch.empty(cells, *shape, dtype=kind.dtype, device=device).movedim(0, 2)
        self.key = torch.empty(keys, *shape, dtype=kind.key_dtype, device=device).movedim(0, 2)
        self.places = list(zip(self.query.unbind(1), self.key.unbind(1), strict=True))
        self.waiting: list[tuple[Receiver, LayerPart]] = []
        self._every = self._of_first(number)
        self._sums: dict[tuple[Receiver, ...], Tensor] = {}

    def put(self, layer_sum: Receiver, part: LayerPart, call: ProjectedCall) -> None:
        """Copy a call's query and key to the next place."""
        query, key = self.places[len(self.waiting)]
        query.copy_(call.query)
        key.copy_(call.key)
        self.waiting.append((layer_sum, part))

    def add(self) -> None:
        """Add what waits to its layers' sums."""
        layer_sums = tuple([one for one, _ in self.waiting])
        number = len(layer_sums)
        if len(set(layer_sums)) < number:  # one ran twice
            for (layer_sum, part), given in zip(self.waiting, self.places, strict=False):
                call = ProjectedCall(*given, self.heads).of_rows(self.rows)
                layer_sum.add_now(part, softmax_of(call))
        else:
            sums = self._joined(layer_sums)
            part = self.waiting[0][1]
            if part.keep.steps.last:
                sums.zero_()
            query, key = self._every if number == len(self.places) else self._of_first(number)
            scale = 1 / math.sqrt(query.shape[-1])
            plain.add_softmax(sums.flatten(0, 1), query, key, None, scale, part.columns)
        self.waiting.clear()

    def _of_first(self, number: int) -> list[Tensor]:
        """Return query and key of the first calls as one call's, ``[images*number, heads, N or T,
        d]``: their kept rows."""
        found = []
        for copies in (self.query, self.key):
            some = chosen_rows(copies[:, :number], self.rows)  # [images, number, N or T, heads*d]
            found.append(split_heads(some.flatten(0, 1), self.heads))
        return found

    def _joined(self, layer_sums: tuple[Receiver, ...]) -> Tensor:
        """Return the sums of these layers in one tensor ``[images, layers, N, columns]``, of which
        each layer has its part."""
        sums = self._sums.get(layer_sums)
        held = [cast(Tensor, one.total) for one in layer_sums]  # each layer's first call made it
        if sums is None or any(own._base is not sums for own in held):
            sums = torch.stack(held, dim=1)
            for one, own in zip(layer_sums, sums.unbind(1), strict=True):
                one.total = own
            others = [one for one in self._sums if set(one).isdisjoint(layer_sums)]
            self._sums = {one: self._sums[one] for one in others} | {layer_sums: sums}
        return sums


class Queue:
    """Calls that wait to be added to their layers' sums.

    The calls of a kind that was not seen before are added at once. From the next pass on they leave
    copies of query and key, which nobody can have written into yet, as the layer has just run.
    """

    def __init__(self) -> None:
        self._stacks: dict[_Kind, _Stack | None] = {}  # None: added at once
        self._new: Counter[_Kind] = Counter()  # calls of kinds that have no stack yet
        self._bytes = 0

    def put(self, layer_sum: Receiver, part: LayerPart, call: ProjectedCall, rows: slice) -> None:
        """Add some rows of a call to its layer's sum, later if there is a place for it, else at
        once."""
        query = call.query
        key = call.key
        of_key = key.shape, query.dtype, key.dtype, query.device
        kind = _Kind(query.shape, *of_key, call.heads, rows.start, rows.stop, part.columns)
        stack = self._stacks.get(kind)
        if stack is None or layer_sum.total is None:
            if kind not in self._stacks:
                self._new[kind] += 1
            with no_autocast():
                layer_sum.add_now(part, softmax_of(call.of_rows(rows)))
            return
        if len(stack.waiting) == len(stack.places):
            self._add([stack])
        stack.put(layer_sum, part, call)

    def work_off(self) -> None:
        """Add what waits; between two passes nothing does."""
        waiting = [stack for stack in self._stacks.values() if stack is not None and stack.waiting]
        if waiting:
            self._add(waiting)

    def end_pass(self) -> None:
        """Add what waits, and make a stack for each new kind of call that gains by it, as far as
        the bytes reach."""
        self.work_off()
        if not self._new:
            return
        new = self._new
        self._new = Counter()
        self._stacks.update(dict.fromkeys(new))
        gaining = [kind for kind in new if kind.gains()]
        for left, kind in zip(range(len(gaining), 0, -1), gaining, strict=True):
            most = MAX_QUEUED_BYTES.get(kind.device.type, MAX_QUEUED_BYTES_ELSEWHERE)
            number = min(new[kind], (most - self._bytes) // left // kind.nbytes)
            if number >= min(new[kind], 2):
                with own_arithmetic():
                    self._stacks[kind] = _Stack(kind, number)
                self._bytes += number * kind.nbytes

    def _add(self, stacks: Sequence[_Stack]) -> None:
        try:
            with own_arithmetic():
                for stack in stacks:
                    stack.add()
        except BaseException:
            for stack in stacks:
                for layer_sum, _ in stack.waiting:
                    layer_sum.problem = _FAILED.format(layer_sum.layer.name)
                stack.waiting.clear()
            raise

    def drop(self) -> None:
        """Forget what waits: its pass did not end."""
        self._new.clear()
        for stack in self._stacks.values():
            if stack is not None:
                for layer_sum, _ in stack.waiting:
                    layer_sum.added.pop()
                stack.waiting.clear()

    def close(self) -> None:
        """Let go of all copies, and of sums that were joined."""
        self.drop()
        self._stacks = {}
        self._bytes = 0
