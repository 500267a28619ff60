"""Attention recorded inside the graph of a compiled model, so that it stays compiled.

What an observer does at a call (which pass it is, which rows are kept, what is held of them) would
break the graph in every layer. So it is done around the model: the graph has the processor, and one
operation that adds what was attended to to a tensor; between two passes that tensor is read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..attention.calls import four_axes
from ..attention.device_copies import index_on
from ..attention.modes import own_arithmetic
from ..attention.recording import addend, record_softmax
from ..errors import RunError
from ..follow.installer import Installation
from ..follow.passes import CaptureError, Pass
from ..look.attended import Columns, HeadSums, chosen_columns
from ..look.sdpa import TORCHS, no_softmax, replacement
from ..look.unknown_processors import TRACED, is_plain
from ..models.denoiser_call import Size
from ..models.families.unet import is_unet
from ..models.layers import AttentionLayer
from .keep import Keep
from .map_store import CapturedMaps
from .sums import called_twice


def can_record(model: Any, layers: Sequence[AttentionLayer], keep: Keep) -> bool:
    """Check whether these layers can be recorded in a graph: means over heads, in cross- and
    self-attention of a UNet that calls torch's attention, without gradient."""
    one_by_one = keep.grad or keep.heads.each or keep.among is not None
    if one_by_one or not keep.queries.usual or not is_unet(model):
        return False
    return all(_is_traced(layer) for layer in layers)


def _is_traced(layer: AttentionLayer) -> bool:
    processor = layer.module.processor
    while isinstance(processor, Recorder):
        processor = processor.inner
    known = layer.kind in ("cross", "self") and type(processor).__name__ == TRACED
    return known and is_plain(layer.module, processor) and replacement() is None


class Recorder:
    """Let ``inner`` make the output, and add what it attended to, summed over heads, to a tensor.

    torch's compiler puts all of it into the layer's graph, once for all tensors of these shapes.

    Attributes:
        sums: float32 ``[images, N, T]``; None if nothing is recorded.
        rows: int64 ``[images]``, which rows of the batch those are.
    """

    is_observer = True

    def __init__(self, inner: Any):
        self.inner = inner
        self.sums: Tensor | None = None
        self.rows: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the processor itself: the copy of a model is not watched."""
        return copy.deepcopy(self.inner, memo)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = hidden_states, encoder_hidden_states, attention_mask, temb
        if self.sums is None:
            return self.inner(attn, *given, *args, **kwargs)
        with _Recording(self.sums, self.rows):
            return self.inner(attn, *given, *args, **kwargs)


class _Recording(TorchFunctionMode):
    """Adds what the calls of torch's attention in a block attend to."""

    def __init__(self, sums: Tensor, rows: Any):
        super().__init__()
        self.sums = sums
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is TORCHS:
            _record(self.sums, self.rows, args[0], args[1], kwargs.get("attn_mask"))
        return func(*args, **kwargs)


def _record(sums: Tensor, rows: Tensor, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
    """Record query ``[B, heads, N, d]`` and key ``[B, heads, T, d]``, by torch's own scale."""
    if sums.shape[1:] != (query.shape[2], key.shape[2]):
        raise RunError(
            f"A layer has {query.shape[2]} queries and {key.shape[2]} keys, and its model was "
            f"called for {sums.shape[1]} and {sums.shape[2]}. Turn off what merges its tokens "
            "(ToMe, tomesd.remove_patch(pipe)), capture the model before it is compiled, or leave "
            "this layer out (layers=…)."
        )
    mask = four_axes(addend(mask))
    if mask is not None:
        mask = mask if len(mask) == 1 else mask.index_select(0, rows)
    given = query.detach().index_select(0, rows), key.detach().index_select(0, rows)
    record_softmax(sums, *given, mask, 1 / math.sqrt(query.shape[-1]))


class Recorders:
    """The recorders of one capture, which follows a thread; none for a model that runs
    eagerly."""

    def __init__(self, is_followed: Callable[[], bool]) -> None:
        self._is_followed = is_followed
        self._of: dict[str, Recorder] = {}
        self._ran: frozenset[str] | None = None  # layers in the first pass
        self._disturbed = False

    def put(self, installed: Installation, model: Any, layers: Sequence[AttentionLayer]) -> None:
        installed.watch(model, self._notice_thread)
        for layer in layers:
            self._of[layer.name] = Recorder(layer.module.processor)
            installed.put(layer, self._of[layer.name])

    def forget(self, layer: AttentionLayer) -> None:
        """Forget a layer that is observed in another way now."""
        self._of.pop(layer.name, None)

    def begin(self, layers: Sequence[AttentionLayer], begun: Pass, device: torch.device) -> None:
        """Begin a pass with nothing recorded, for ``layers`` of the chosen resolutions; refuse an
        attention that no graph shows."""
        if self._of and (by := replacement()) is not None:
            raise CaptureError(f"Inside capture() of a compiled model, {no_softmax(by)}")
        for layer, recorder in self._held(layers):
            cells = math.prod(layer.grid(cast(Size, begun.latent_size))) // begun.frame_rows
            shape = len(begun.rows), cells, cells if layer.kind == "self" else begun.n_text
            sums = recorder.sums
            if sums is None or (sums.shape, sums.device) != (shape, device):
                with torch.inference_mode(False):  # the graph is made for either
                    recorder.sums = torch.zeros(shape, device=device)
            else:
                sums.zero_()
            recorder.rows = index_on(device, begun.rows)

    def end(self, store: CapturedMaps) -> None:
        """End a pass: hand what was recorded to the store; refuse a layer that ran twice."""
        if not self._of:
            return
        held = list(self._held(store.layers))
        # The sums show how often a layer ran: a row adds 1 per head and call. It
        # is read in the first pass only, since the device is waited for.
        if self._ran is None:  # read back once
            sums = {layer: r.sums for layer, r in held if r.sums is not None}
            often = {one.name: float(s[0].sum() / len(s[0]) / one.heads) for one, s in sums.items()}
            if twice := [name for name, calls in often.items() if calls > 1.5]:
                raise CaptureError(called_twice(twice[0]))
            self._ran = frozenset(name for name, calls in often.items() if calls)
        with own_arithmetic():
            for layer, recorder in held:
                kept = store.sums[layer.name]
                if kept.is_needed() and layer.name in self._ran:
                    kept.add(Recorded(cast(Tensor, recorder.sums), layer.heads))

    def rest(self) -> None:
        """Record nothing until the next pass: a stray call may have other shapes."""
        for recorder in self._of.values():
            recorder.sums = None

    def check(self) -> None:
        """Raise CaptureError if another thread called the model."""
        if self._disturbed:
            raise CaptureError(
                "Another thread called this compiled model inside capture(), and what it attended "
                "to was recorded with the rest. Run one after the other, or capture a model that "
                "is not compiled."
            )

    def close(self) -> None:
        """Let go of what was recorded."""
        for recorder in self._of.values():
            recorder.sums = recorder.rows = None

    def _notice_thread(self, *_: object) -> None:
        if not self._is_followed():
            self._disturbed = bool(self._of)

    def _held(self, layers: Sequence[AttentionLayer]) -> Iterator[tuple[AttentionLayer, Recorder]]:
        return ((layer, self._of[layer.name]) for layer in layers if layer.name in self._of)


class Recorded(HeadSums):
    """Sums over heads ``[B, N, T]``, where no more is known."""

    def __init__(self, sums: Tensor, heads: int):
        super().__init__(len(sums), heads, *sums.shape[1:])
        self.sums = sums

    def together(self, frames: int) -> Recorded:
        *_, keys = self.sums.shape
        return Recorded(self.sums.view(self.batch // frames, -1, keys), self.heads)

    def head_sums(self, columns: Columns) -> Iterator[Tensor]:
        yield self.add_to(None, columns)

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        found = chosen_columns(self.sums, columns)
        return found.clone() if total is None else total.add_(found)
