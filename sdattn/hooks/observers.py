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

from ..attention.controlled import ControlledProcessor
from ..errors import RunError
from ..models.denoiser_call import innermost
from .attended import Attended, GivenProbs, QueryKey
from .image_prompts import (
    IMAGE,
    attends_to_image,
    beside_images,
    image_projections,
    softmax_of,
    used_by,
)
from .projections import ARRIVED, Projections, by_name, named, output_projection, query_and_key
from .replaced import no_softmax, replacement, spied
from .sdpa import SdpaWatch, exact_call
from .text_stream import TextStream, running_stream
from .unknown_processors import GATES, ProductWatch, gated, is_plain, misfit, unknown_use

Observer = Callable[[Attended], None]
Observation = tuple[Tensor, Attended | None]  # the output of a processor, and what it attended to
# (observer, attn, *args, **kwargs): have the observer's inner processor run and see what it uses
Look = Callable[..., Observation]
Wanted = Callable[[], bool]
QUERY_KEY = ("to_q", "to_k", "to_kv", "to_qkv")  # projections; the last two are fused ones
LARGE = 1 << 20  # numbers in the hidden states; in smaller layers a watch costs more than it spares


def observing(
    inner: Any, observe: Observer, look: Look | None = None, wanted: Wanted | None = None
) -> ObservingProcessor:
    """An observer of ``inner``, which is a module where ``inner`` is: its weights then move with
    the model."""
    kind = ObservingModule if isinstance(inner, nn.Module) else ObservingProcessor
    return kind(inner, observe, look, wanted)


def _of_innermost(name: str) -> property:
    return property(
        lambda observer: getattr(innermost(observer), name),
        lambda observer, value: setattr(innermost(observer), name, value),
    )


class ObservingProcessor:
    """Let ``inner`` make the output; hand the probabilities it used to ``observe``.

    The output is the very tensor that ``inner`` returned. A processor of sdattn's own shows its
    probabilities itself, as a controller left them. Those of diffusers' plain processors follow
    from their query and key, which are read by forward hooks on the layer's own projections
    (``to_q`` and ``to_k``, or the fused ``to_kv`` and ``to_qkv``) while ``inner`` runs, so they
    include LoRA and whatever else acts on the projections. In large layers on the CPU, where the
    kernel that makes the output gives the logsumexp as well, that takes the place of a softmax
    here. Any other processor is watched by
    :class:`sdattn.hooks.unknown_processors.ProductWatch`: shown is what it multiplied its values
    with, whatever it did to it before.

    Calls of other threads than the one that made it go to ``inner`` unobserved.

    Args:
        inner: the processor that is watched; see :func:`observing` for one that has weights.
        observe: is handed what each call attended to.
        look: sees that in another way than the above.
        wanted: says, before a call, whether anybody would look; the call is else ``inner``'s alone.

    Attributes:
        noted: what may be wrong with what was shown, as a message, and by how much at most in any
            call: a tensor on its device, above 1 where it is wrong.
        stream: of another text, whose runs of the blocks are looked at in place of the model's.

    Raises (when called):
        RuntimeError: what ``inner`` used is unknown: it called none of these projections, or made
            something else of its values than any attention that was seen.
    """

    is_observer = True

    def __init__(
        self,
        inner: Any,
        observe: Observer,
        look: Look | None = None,
        wanted: Wanted | None = None,
    ):
        self.inner, self.observe, self.look = inner, observe, look
        self.wanted = wanted or _always
        self.thread = get_ident()
        self.projections = Projections()
        self.listeners: list[Callable[[list[Any]], object]] = []
        self.noted: dict[str, Tensor] = {}
        self.is_first = True  # call, which may read a value back from the device
        self.stream: TextStream | None = None

        # diffusers reads the signature of `processor.__call__` at every call, to choose the keyword
        # arguments that it passes on, so this object has to show the signature of the inner one.
        @wraps(inner.__call__)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            return type(self).__call__(self, *args, **kwargs)

        vars(call)["__signature__"] = inspect.signature(inner.__call__)
        vars(self)["__call__"] = call

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the processor that is watched: diffusers looks processors up by it, to skip
        their attention in a pass of perturbed guidance. ``type()`` gives the observer's own."""
        held = {**vars(self), **vars(self).get("_modules", {})}
        return type(innermost(self)) if "inner" in held else type(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of a model's copy: the copy is not watched."""
        return copy.deepcopy(self.inner, memo)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not self.looks():
            return cast(Tensor, self.inner(attn, *args, **kwargs))
        if self.look is None:
            output, attended = self._see(attn, *args, **kwargs)
        else:
            output, attended = self.look(self, attn, *args, **kwargs)
        self.is_first = False
        if attended is not None:
            self.observe(attended)
        return output

    def looks(self) -> bool:
        """Whether a call that begins now, in this thread, is looked at."""
        mine = running_stream() is self.stream and get_ident() == self.thread
        return mine and self.wanted()

    def end(self) -> None:
        """Stop watching, and let go of every callback."""
        self.observe, self.wanted = _nothing, _never
        self.projections.remove()

    def _see(self, attn: Any, *args: Any, **kwargs: Any) -> Observation:
        inner = innermost(self)
        # From what is known for certain to what has to be worked out: a processor that shows its
        # probabilities, one whose formula is known, any other.
        if isinstance(inner, ControlledProcessor):
            return self._shown(inner, attn, *args, **kwargs)
        if is_plain(attn, inner):
            return self._followed(inner, attn, *args, **kwargs)
        return self._witnessed(attn, *args, **kwargs)

    def _shown(
        self, inner: ControlledProcessor, attn: Any, *args: Any, **kwargs: Any
    ) -> Observation:
        shown: list[Tensor] = []

        def watcher(probs: Tensor) -> None:
            if get_ident() == self.thread:
                shown.append(probs)

        inner.watchers.append(watcher)
        try:
            output = self.inner(attn, *args, **kwargs)
        finally:
            inner.watchers.remove(watcher)
        if len(shown) != 1:
            raise RunError(
                f"The processor {type(inner).__name__} showed its probabilities {len(shown)} times "
                "in one call, so what it attended to cannot be known. Leave __call__ to "
                "sdattn's class and edit by a controller, or leave this layer out (layers=…)."
            )
        return cast(Tensor, output), GivenProbs(shown[0])  # [B, heads, N, T]

    def _followed(self, inner: Any, attn: Any, *args: Any, **kwargs: Any) -> Observation:
        """What a plain processor attended to, which follows from its query and key."""
        given = by_name(inner, args, kwargs)
        hidden, states = given["hidden_states"], given.get("encoder_hidden_states")
        adapters = image_projections(inner) if isinstance(inner, nn.Module) else []
        calls: list[Any] = []
        with self.projections.during([*named(attn, QUERY_KEY), *adapters]) as seen:
            # On the CPU the kernel's logsumexp spares a softmax, which pays in large layers only.
            is_large = hidden.device.type == "cpu" and hidden.numel() >= LARGE
            if is_large or replacement() is not None:  # which has to be seen at work
                output = self.watched(calls, SdpaWatch, attn, *args, **kwargs)
            else:
                output = self.inner(attn, *args, **kwargs)
        query, key = query_and_key(seen, self.inner)
        attended: Attended
        shape = len(query), attn.heads, query.shape[1], key.shape[1]
        call = exact_call(calls, *shape) if calls else None
        if call is not None:
            attended = call.attended()
        else:
            attended = QueryKey.masked(attn, query, key, given.get("attention_mask"))
        if adapters:
            attended = beside_images(attended, attn, query, states, adapters, seen)
        return output, attended

    def _witnessed(self, attn: Any, *args: Any, **kwargs: Any) -> Observation:
        """What any other processor attended to: what made its output of the values. Of a kernel
        that is not seen, the softmax of the query and key, where that makes the same of them."""
        events: list[Any] = []
        names = (*QUERY_KEY, "to_v", GATES, *(IMAGE if attends_to_image(attn) else ()))
        parts = [*named(attn, names), (ARRIVED, output_projection(attn))]
        with self.projections.during(parts) as seen:
            output = self.watched(events, ProductWatch, attn, *args, **kwargs)
        arrived = seen.pop(ARRIVED, [])
        used = used_by(attn, events, arrived[-1], seen) if arrived else None
        if used is None:
            mask = by_name(innermost(self), args, kwargs).get("attention_mask")
            used = softmax_of(attn, seen, mask, self.inner)
        attended, predicted = used
        self.check(gated(predicted, seen.get(GATES, ())), *arrived)
        return output, attended

    def check(self, predicted: Tensor, *arrived: Tensor) -> None:
        """Refuse what did not make the output, see :meth:`note`."""
        # What was found is right if it turns the values into what reached the output projection.
        fits = len(arrived) == 1 and arrived[0].shape == predicted.shape
        problem = unknown_use(innermost(self))
        if not fits:
            raise RunError(problem)
        self.note(problem, misfit(predicted, arrived[0]))

    def note(self, problem: str, found: Tensor) -> None:
        """Refuse what is wrong, ``found`` above 1: in the first call at once; later ones are noted,
        so that the device need not wait."""
        before = self.noted.get(problem)
        self.noted[problem] = found if before is None else before.fmax(found)
        if self.is_first and found.device.type != "meta" and found > 1:
            raise RunError(problem)

    @contextmanager
    def projected(self, attn: Any, *names: str) -> Iterator[dict[str, Tensor]]:
        """What the layer's projections give inside, in this thread, by name; of one that is called
        more than once the first."""
        first: dict[str, Tensor] = {}
        with self.projections.during(named(attn, names)) as seen:
            yield first
        first.update((name, calls[0]) for name, calls in seen.items())

    def watched(
        self, calls: list[Any], kind: type[SdpaWatch], attn: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The output of ``inner``; ``calls`` takes what was handed to torch's attention, which the
        innermost of nested observers sees."""
        first = nested = self
        # Of captures inside each other the innermost watches torch's calls and tells the others.
        while isinstance(nested.inner, ObservingProcessor):
            nested = nested.inner
            first = nested if nested.looks() else first
        first.listeners.append(calls.extend)
        try:
            if first is not self:
                return cast(Tensor, self.inner(attn, *args, **kwargs))
            with kind() as watch, spied(watch.attend):
                output: Tensor = self.inner(attn, *args, **kwargs)
            for listener in self.listeners:
                listener(watch.calls)
            for by, unlike in watch.unlike:
                self.note(no_softmax(by), unlike)
            return output
        finally:
            first.listeners.remove(calls.extend)

    # diffusers sets these on whatever it finds in the layer, and processors read their own.
    _attention_backend = _of_innermost("_attention_backend")
    _parallel_config = _of_innermost("_parallel_config")


class ObservingModule(ObservingProcessor, nn.Module):
    """An observer of a processor with weights (IP-Adapter)."""

    def __init__(self, inner: Any, *given: Any):
        nn.Module.__init__(self)
        ObservingProcessor.__init__(self, inner, *given)


def _always() -> bool:
    return True


def _never() -> bool:
    return False


def _nothing(_attended: Attended) -> None:
    """What an observer does whose capture has ended."""
