"""`Sum`: the maps of one layer, added at once, or by a `Queue` when the model's pass ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.calls import LayerCall, ProjectedCall
from ..attention.device_copies import HostCopy, is_gpu_to_cpu
from ..attention.modes import no_autocast, own_arithmetic
from ..follow.passes import CaptureError, Pass
from ..look.attended import HeadSums
from ..look.key_owners import other_owners
from ..look.view import View
from ..models.layers import AttentionLayer
from .keep import Keep
from .layer_part import LayerPart
from .queue import Queue, may_wait


class Sum:
    """Maps of one layer: a running sum over passes (or the last pass alone) and over the averaged
    heads, or a list with one entry per pass.

    A call is added at once, or waits in the ``queue`` for the pass to end. What cannot wait, or is
    held in another way than as one float32 sum on its device, is added at once.

    Args:
        layer: layer that the maps belong to.
        keep: parts to keep.

    Attributes:
        running: running pass, if it is kept for this layer; else None.
        added: passes that were added, or are being added, in order.
        view: which part of a call is shown.
        part: columns, cells and heads that are kept; None before the layer ran.
        total: sum of the maps, ``[images, (heads,) N, tokens]``; None before anything is added.
        each: maps of each pass, in place of the sum.
        rows_apart: largest in any call, see :mod:`sdattn.look.key_owners`.
        may_wait: False if the calls cannot wait.
        problem: reason why the sum is not right; "" if it is.
    """

    def __init__(self, layer: AttentionLayer, keep: Keep, queue: Queue | None = None):
        self.layer = layer
        self.keep = keep
        self.queue = queue or Queue()
        self.running: Pass | None = None
        self.added: list[Pass] = []
        self.view = View(keep.queries, keep.space)
        self.part: LayerPart | None = None
        self.total: Tensor | None = None
        self.each: list[Tensor] = []
        self.copy = HostCopy()
        self.rows_apart: dict[str, Tensor] = {}
        one_by_one = keep.steps.each or keep.heads.each
        elsewhere = keep.device is not None or keep.held_dtype != torch.float32
        self._adds_in_place = not (one_by_one or elsewhere or keep.grad or keep.frames is not None)
        self.may_wait = self._adds_in_place and keep.among is None and not keep.queries.turned
        self.problem = ""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled; a part of a joined sum would be written with all of it."""
        self.tensors()  # nothing is on its way
        total = self.total
        if total is not None and total._base is not None:
            total = total.clone()
        return {**vars(self), "total": total}

    @property
    def calls(self) -> int:
        """Number of calls added."""
        return len(self.added)

    @property
    def held(self) -> list[Pass]:
        """Passes whose maps are held, or whose mean is held, in order."""
        return self.added[-1:] if self.keep.steps.last else self.added

    def is_needed(self) -> bool:
        """Check whether the layer's call that begins now is kept."""
        return self.running is not None

    def take(self, call: LayerCall) -> None:
        """Add the attention of one call of the layer, in the running pass; raise CaptureError for
        other rows or cells, a second call, or missing columns or heads."""
        has_graph = torch.is_grad_enabled() and self.keep.grad
        if torch.is_grad_enabled() != has_graph or torch.is_inference_mode_enabled():
            with own_arithmetic(has_graph):
                self.take(call)
            return
        running = self.running
        assert running is not None
        rows = running.kept_of(call.batch)
        if rows is None:
            raise CaptureError(
                f"{self.layer.name} ran on {call.batch} rows in a pass of {running.batch}, so "
                "which image each row belongs to is not known. Leave this layer out (layers=…)."
            )
        for kind, apart in call.rows_apart.items():
            before = self.rows_apart.get(kind, apart)
            self.rows_apart[kind] = before.fmax(apart) if before.shape == apart.shape else apart
        if rows == ():  # a cache guesses what these rows would make
            return
        can_wait = self.may_wait and running.frame_rows == 1
        if can_wait and isinstance(rows, slice) and may_wait(call):
            part = self._check(call, running)
            self.added.append(running)
            self.queue.put(self, part, call, rows)
            return
        with no_autocast():  # rows of the other branch are dropped before anything is computed
            self.add(self.view.of(call, rows))

    def add(self, attended: HeadSums) -> None:
        """Add the attention of one call's kept rows now."""
        running = self.running
        assert running is not None
        part = self._check(attended, running)
        self.added.append(running)
        self.add_now(part, part.shown(attended))

    def _check(self, attended: HeadSums | ProjectedCall, running: Pass) -> LayerPart:
        """Return what is kept of a call, fixed at the first; refuse one on other cells, or a second
        one in a pass. In a custom model one module may be several layers."""
        if running.n_text and self.added and self.added[-1] is running:
            raise CaptureError(called_twice(self.layer.name))
        if self.part is None:
            self.part = LayerPart(self.layer, self.keep, attended, running)
        else:
            self.part.check(attended)
        return self.part

    def add_now(self, part: LayerPart, attended: HeadSums) -> None:
        """Add what is shown of a call to the sum, or to the list of maps."""
        keep = self.keep
        if keep.steps.last:
            self.problem = ""  # a map that was lost is replaced
        if self._adds_in_place:
            total = None if keep.steps.last else self.total
            self.total = attended.add_to(total, part.columns)
            return
        step = part.map_of(attended)
        if keep.steps.each and part.heads > 1:
            step = step / part.heads
        # On its way from a GPU a map is not waited for until the next.
        if not keep.grad and is_gpu_to_cpu(step, keep.device):
            self._receive()
            self.copy.send(step.to(keep.held_dtype))
        else:
            self._hold(step.to(device=keep.device, dtype=keep.held_dtype))

    def _hold(self, step: Tensor) -> None:
        if self.keep.steps.each:
            self.each.append(step)
        elif self.total is None or self.keep.steps.last:
            self.total = step
        elif self.keep.grad:
            self.total = self.total + step
        else:
            self.total.add_(step)

    def _receive(self) -> None:
        """Add the maps that are on their way from a GPU, out of their pinned memory."""
        sent = self.copy.take()
        if sent is not None:
            is_added = self.total is not None and not self.keep.steps.last
            self._hold(sent if is_added else sent.clone())

    def tensors(self) -> list[Tensor]:
        """Return what is held."""
        self.queue.work_off()
        if self.copy.is_sent:
            with own_arithmetic():
                self._receive()
        return self.each if self.total is None else [self.total]

    def map(self) -> Tensor:
        """Return ``[images, (steps,) (heads,) (frames,) rows, cols, tokens]``."""
        held = self.tensors()
        part = self.part
        assert part is not None
        if self.problem:
            raise CaptureError(self.problem)
        if self.keep.steps.each:
            maps = torch.stack(held, dim=1)
        else:
            maps = held[0] / (part.heads * len(self.held))
        return maps.to(self.keep.dtype).unflatten(-2, part.grid)

    def drop(self, broken: Pass) -> None:
        """Take back what was added in a pass that did not end. Nothing is computed: there may be no
        memory for it."""
        calls = 0
        while self.added and self.added[-1] is broken:
            self.added.pop()
            calls += 1
        if calls and self.copy.drop():  # on its way from a GPU, so in no sum yet
            calls -= 1
        if not self.added:  # what comes next may have other shapes
            self.part = None
            self.total = None
        if self.keep.steps.each:
            del self.each[len(self.added) :]
        elif calls and self.added:
            self.problem = (
                f"A call of the model ended in an error after {self.layer.name} had run, and its "
                "map is in one sum with other calls'. Enter capture() again for a whole "
                "run, or keep each step (steps='all')."
            )

    def close(self, layer: AttentionLayer) -> None:
        """Hold the maps and ``layer`` alone, which names its module no more."""
        self.layer = layer
        self.running = None
        self.view = View(self.keep.queries, self.keep.space)
        if self.part is not None:
            self.part.layer = layer

    def check_owners(self) -> None:
        """Raise CaptureError if a row attended to another row's keys."""
        if problem := other_owners(self.layer.name, self.rows_apart):
            raise CaptureError(problem)


def called_twice(name: str) -> str:
    """Return the message for a layer whose columns belong to more than one text."""
    return (
        f"{name} was called twice in one pass of the model (regional prompting does so, with a "
        "text for each region), so which text its columns are of is not known. Turn that off, or "
        "leave this layer out (layers=…)."
    )
