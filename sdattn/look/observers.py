"""`ObservingProcessor`: let another processor make the output, and hand on what it attended to.

How a layer calls its processor is described in :mod:`sdattn.attention.processor`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..attention.calls import AttentionCall
from ..errors import RunError
from ..models.denoiser_call import innermost
from .attended import Attended
from .dispatched import hidden_backend, watching
from .projections import Projections, named
from .sdpa import SdpaWatch, kernel_name, no_softmax
from .text_stream import RUNNING, TextStream
from .unknown_processors import misfit, unknown_use

Observe = Callable[[Attended], None]
# (observer, inner, attn, *args, **kwargs): have the processor run; return its output, and what it
# attended to, if that is kept
Look = Callable[..., tuple[Any, Attended | None]]
Wanted = Callable[[], bool]
Calls = list[AttentionCall]


def observing(
    inner: Any, observe: Observe, look: Look, wanted: Wanted | None = None
) -> ObservingProcessor:
    """Return an observer of ``inner``, a module if ``inner`` is one, so that weights move along."""
    kind = ObservingModule if isinstance(inner, nn.Module) else ObservingProcessor
    return kind(inner, observe, look, wanted)


def _of_innermost(name: str) -> property:
    return property(
        lambda observer: getattr(innermost(observer), name),
        lambda observer, value: setattr(innermost(observer), name, value),
    )


class ObservingProcessor:
    """Let ``inner`` make the output; hand the probabilities it used to ``observe``.

    The output is the very tensor that ``inner`` returned. Calls from other threads are not
    observed.

    Args:
        inner: the watched processor; see :func:`observing` for one that has weights.
        observe: function that gets what each call attended to.
        look: function that sees what a call attended to, such as :func:`sdattn.look.sources.see`.
        wanted: function that tells, before a call, whether anybody would look.

    Attributes:
        noted: messages of what may be wrong, each with the largest error of any call: a tensor on
            its device, above 1 if it is wrong.
        kernels: names of kernels that answered in the place of torch's own, each with the largest
            difference of its output, as in ``noted``.
        stream: stream of another text, observed in place of the model's own runs.
        is_self: True in self-attention, where each row's keys should be its own.

    Raises (when called):
        RuntimeError: what ``inner`` used is unknown: it called none of these projections, or made
            something else of its values than any attention that was seen.
    """

    is_observer = True

    def __init__(
        self,
        inner: Any,
        observe: Observe,
        look: Look,
        wanted: Wanted | None = None,
    ):
        self.inner = inner
        self.observe = observe
        self.look = look
        self.wanted = wanted or (lambda: True)
        self.thread = get_ident()
        self.projections = Projections()
        self.listeners: list[Callable[[Calls], object]] = []
        self.noted: dict[str, Tensor] = {}
        self.kernels: dict[str, Tensor] = {}
        self.is_first = True  # call, which may read a value back from the device
        self.stream: TextStream | None = None
        self.is_self = False

        # diffusers reads the signature of `processor.__call__` at every call, to choose the keyword
        # arguments that it passes on, so this object has to show the signature of the inner one.
        @wraps(inner.__call__)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            return type(self).__call__(self, *args, **kwargs)

        vars(call)["__signature__"] = inspect.signature(inner.__call__)
        vars(self)["__call__"] = call

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The watched processor's class, by which diffusers finds processors to skip in perturbed
        guidance; ``type()`` gives the observer's own."""
        attributes = {**vars(self), **vars(self).get("_modules", {})}
        return type(innermost(self)) if "inner" in attributes else type(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the processor itself: the copy of a model is not watched."""
        return copy.deepcopy(self.inner, memo)

    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_dynamo_compiling():  # a decorator would cost every call more
            return cast(Tensor, self._run_untraced(attn, *args, **kwargs))
        return self._run(attn, *args, **kwargs)

    def _run(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of ``inner``, and hand on what it attended to."""
        if not self.looks():
            return cast(Tensor, self.inner(attn, *args, **kwargs))
        output, attended = self.look(self, innermost(self), attn, *args, **kwargs)
        self.is_first = False
        if attended is not None:
            with torch._C.DisableTorchFunction():  # its softmaxes are none of the model's
                self.observe(attended)
        return output

    _run_untraced = torch.compiler.disable(_run)

    def looks(self) -> bool:
        """Check whether a call that begins now, in this thread, is looked at."""
        mine = RUNNING.get() is self.stream and get_ident() == self.thread
        return mine and self.wanted()

    def end(self) -> None:
        """Stop watching, and let go of every callback."""
        self.observe = self.wanted = _nothing
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
        if self.is_first and error.device.type != "meta" and error > 1:
            raise RunError(problem)

    @contextmanager
    def projected(self, attn: Any, *names: str) -> Iterator[dict[str, Tensor]]:
        """Yield a dict that has, after the block, the outputs of the layer's projections in this
        thread, by name; the first of several."""
        first: dict[str, Tensor] = {}
        with self.projections.during(named(attn, names)) as seen:
            yield first
        first.update((name, calls[0]) for name, calls in seen.items())

    def watched(self, calls: Calls, kind: type[SdpaWatch], *args: Any, **kwargs: Any) -> Any:
        """Return the output of ``inner``; ``calls`` takes what was handed to torch's attention."""
        first = nested = self
        # Among nested captures the innermost watches torch's calls and tells the others.
        while isinstance(nested.inner, ObservingProcessor):
            nested = nested.inner
            first = nested if nested.looks() else first
        first.listeners.append(calls.extend)
        try:
            if first is not self:
                return self.inner(*args, **kwargs)
            watch = kind()
            hidden = filter(None, [hidden_backend(innermost(self))])
            with watching(watch, hidden):
                output = self.inner(*args, **kwargs)
            for listener in self.listeners:
                listener(watch.calls)
            for by, unlike in watch.unlike:
                self.note(no_softmax(by), unlike)
                self.kernels[kernel_name(by)] = self.noted[no_softmax(by)]
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


def _nothing(*_: object) -> Any:
    """Do nothing, and want nothing: the capture has ended."""
