"""`ObservingProcessor`: let another processor make the output, and hand on what it attended to.

How a layer calls its processor is described in :mod:`sdattn.attention.processor`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor, nn

from ..attention.calls import AttentionCall, LayerCall
from ..errors import RunError
from ..models.denoiser_call import innermost
from .dispatched import watching_processor
from .joint import Joint
from .layer import IsOpen, Layer, Output, Processor
from .projections import Projections, Seen
from .sdpa import SdpaWatch, kernel_name, no_softmax
from .text_stream import RUNNING, TextStream
from .unknown_processors import misfit, unknown_use

Observe = Callable[[LayerCall], None]
Calls = list[AttentionCall]


class See(Protocol):
    """A source: run an observed processor, and return its output and its call, None if that is not
    kept."""

    def __call__(
        self, observer: ObservingProcessor, attn: Layer, /, *args: object, **kwargs: object
    ) -> tuple[Output, LayerCall | None]: ...


def observing(
    inner: Processor,
    observe: Observe,
    see: See,
    is_open: IsOpen,
    is_needed: Callable[[], bool] = lambda: True,
) -> ObservingProcessor:
    """Return an observer of ``inner``, a module if ``inner`` is one, so that weights move along."""
    kind = ObservingModule if isinstance(inner, nn.Module) else ObservingProcessor
    return kind(inner, observe, see, is_open, is_needed)


def _of_innermost(name: str) -> property:
    return property(
        lambda observer: getattr(innermost(observer), name),
        lambda observer, value: setattr(innermost(observer), name, value),
    )


class ObservingProcessor:
    """Let ``inner`` make the output; hand the call that made it to ``observe``.

    The output is the very tensor that ``inner`` returned.

    diffusers asks whatever a layer holds for its class and for the signature of its ``__call__``,
    and no setting tells it to ask elsewhere, so an observer answers for the processor that it
    watches; its own class is ``type(observer)``.

    Args:
        inner: the watched processor; see :func:`observing` for one that has weights.
        observe: function that gets each call.
        see: function that sees a call, such as :func:`sdattn.look.sources.see`.
        is_open: function that tells whether a pass of the followed run is open in this thread.
        is_needed: function that tells, before a call, whether its pass is kept.

    Attributes:
        noted: messages of what may be wrong, each with the largest error of any call: a tensor on
            its device, above 1 if it is wrong.
        kernels: names of kernels that answered in the place of torch's own, each with the largest
            absolute difference of its output in any call: a tensor on its device.
        stream: stream of another text, observed in place of the model's own runs.
        is_self: True in self-attention, where each row's keys should be its own.
        joint: where text and image are in joint attention; None in any other.

    Raises (when called):
        RuntimeError: what ``inner`` used is unknown: it called none of these projections, or made
            something else of its values than any attention that was seen.
    """

    is_observer = True

    def __init__(
        self,
        inner: Processor,
        observe: Observe,
        see: See,
        is_open: IsOpen,
        is_needed: Callable[[], bool] = lambda: True,
    ):
        self.inner = inner
        self.observe = observe
        self.see = see
        self.is_open = is_open
        self.is_needed = is_needed
        self.projections = Projections(is_open)
        self.listeners: list[Callable[[Calls], object]] = []
        self.noted: dict[str, Tensor] = {}
        self.kernels: dict[str, Tensor] = {}
        self.n_seen = 0  # calls; the first may read a value back from the device
        self.stream: TextStream | None = None
        self.is_self = False
        self.joint: Joint | None = None

        # Asked for at every call, to choose the keyword arguments that diffusers passes on.
        def call(attn: Layer, *args: object, **kwargs: object) -> Output:
            return type(self).__call__(self, attn, *args, **kwargs)

        vars(call)["__signature__"] = inspect.signature(inner.__call__)
        vars(self)["__call__"] = call

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # By it diffusers finds processors to skip in perturbed guidance.
        attributes = {**vars(self), **vars(self).get("_modules", {})}
        return type(innermost(self)) if "inner" in attributes else type(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Processor:
        """Return a copy of the processor itself: the copy of a model is not watched."""
        return copy.deepcopy(self.inner, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Return the processor's own, so that a saved model is not watched either."""
        return self.inner.__reduce_ex__(protocol)

    def __call__(self, attn: Layer, *args: object, **kwargs: object) -> Output:
        if torch.compiler.is_dynamo_compiling():  # a decorator would cost every call more
            output: Output = self._run_untraced(attn, *args, **kwargs)
            return output
        return self._run(attn, *args, **kwargs)

    def _run(self, attn: Layer, *args: object, **kwargs: object) -> Output:
        """Return the output of ``inner``, and hand on what it attended to."""
        if not self.looks():
            return self.inner(attn, *args, **kwargs)
        output, call = self.see(self, attn, *args, **kwargs)
        self.n_seen += 1
        if call is not None:
            with torch._C.DisableTorchFunction():  # its softmaxes are none of the model's
                self.observe(call)
        return output

    _run_untraced = torch.compiler.disable(_run)

    def looks(self) -> bool:
        """Check whether a call that begins now is looked at."""
        return RUNNING.get() is self.stream and self.is_open() and self.is_needed()

    def has_nothing_in(self, seen: Seen, calls: Calls) -> bool:
        """Check whether a call that ended made no attention for this observer."""
        return False

    def end(self) -> None:
        """Stop watching, and let go of every callback."""
        self.observe = _nothing
        self.is_open = self.is_needed = self.projections.is_open = _closed
        self.projections.remove()

    def check(self, predicted: Tensor, *arrived: Tensor) -> None:
        """Refuse what did not make the output, see :meth:`note`."""
        # The attention is right if it turns the values into the output projection's input.
        problem = unknown_use(innermost(self))
        if len(arrived) != 1 or arrived[0].shape != predicted.shape:
            raise RunError(problem)
        self.note(problem, misfit(predicted, arrived[0]))

    def note(self, problem: str, error: Tensor) -> None:
        """Refuse an ``error`` above 1: in the first call at once, later ones at the end, so that
        the device need not wait."""
        before = self.noted.get(problem)
        self.noted[problem] = error if before is None else before.fmax(error)
        if not self.n_seen and error.device.type != "meta" and error > 1:
            raise RunError(problem)

    def watched(
        self, calls: Calls, kind: type[SdpaWatch], attn: Layer, *args: object, **kwargs: object
    ) -> Output:
        """Return the output of ``inner``; ``calls`` takes what was handed to torch's attention."""
        first = nested = self
        # Among nested captures the innermost watches torch's calls and tells the others.
        while isinstance(nested.inner, ObservingProcessor):
            nested = nested.inner
            first = nested if nested.looks() else first
        first.listeners.append(calls.extend)
        try:
            if first is not self:
                return self.inner(attn, *args, **kwargs)
            watch = kind()
            with watching_processor(watch, innermost(self), self.is_open):
                output = self.inner(attn, *args, **kwargs)
            for listener in self.listeners:
                listener(watch.calls)
            for by, multiple, difference in watch.unlike:
                self.note(no_softmax(by), multiple)
                before = self.kernels.get(kernel_name(by), difference)
                self.kernels[kernel_name(by)] = before.fmax(difference)
            return output
        finally:
            first.listeners.remove(calls.extend)

    # diffusers sets these on whatever it finds in the layer, and processors read their own.
    _attention_backend = _of_innermost("_attention_backend")
    _parallel_config = _of_innermost("_parallel_config")


class ObservingModule(ObservingProcessor, nn.Module):
    """An observer of a processor with weights (IP-Adapter)."""

    def __init__(self, *args: Any):
        nn.Module.__init__(self)
        ObservingProcessor.__init__(self, *args)


def _nothing(_call: LayerCall) -> None:
    """Hand nothing on: the capture has ended."""


def _closed() -> bool:
    return False
