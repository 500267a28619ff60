"""Which rows of a denoiser's batch, or which of its calls, belong to which branch of the guidance.

With classifier-free guidance (Ho and Salimans 2022) a pipeline runs the prompt and the negative
prompt in one batch, or one after the other. Many pipelines name the branch of each call, see
:mod:`sdattn.models.cache_contexts`. Of all else their order is the pipeline's own affair: it is
looked up in the families of models, never guessed from the batch.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, cast

from ..errors import InvalidValueError
from .cache_contexts import CacheContexts
from .families import guidance_of
from .family import Branch as Branch
from .family import Order as Order
from .guiders import GuiderWatch, guider_of, unperturbed


def guided_order(pipeline: Any) -> Order:
    """The chunks of a guided batch of this class of pipeline, in order; None is neither branch.

    Raises:
        ValueError: the batch layout of this class of pipeline is not known.
    """
    return guidance_of(pipeline).order


def branch_order(pipeline: Any) -> Order:
    """The chunks of the batch that ``pipeline`` is running now, by its own property.

    To be asked at every call of the model, since guidance may be turned off in the middle of a
    run. The perturbed copy that PAG appends (Ahn et al. 2024) is neither branch.
    """
    order = guided_order(pipeline)
    if not pipeline.do_classifier_free_guidance:
        order = ("conditional",)
    if getattr(pipeline, "do_perturbed_attention_guidance", False):
        order = (*order, None)
    return order


class GuidanceWatch:
    """The order of the branches at each call of a pipeline's model, for every known pipeline.

    The name that the pipeline gives the call says it, where that names one branch; else what its
    family knows of the class, from :meth:`listen` on.

    Args:
        pipeline: one of a class that :func:`guided_order` knows. It is held weakly.

    Raises:
        ValueError: it does not.
    """

    def __init__(self, pipeline: Any):
        self._pipeline = weakref.ref(pipeline)
        layout = guidance_of(pipeline)
        self.guided = layout.order
        self._known_by = layout.known_by
        self._contexts: CacheContexts | None = None  # while it listens
        self._guider = GuiderWatch()
        self._is_named = False  # of the last call: whether the pipeline named its branch
        self._step: Any = None
        self._calls = 0  # within this step
        self._first: tuple[Any, int] | None = None  # call of a guided run: its schedule, its rows
        self._has_ended = False
        self._is_guided: bool | None = None
        self._thread = get_ident()

    def listen(self) -> None:
        """Have the pipeline say more than its attributes do, until :meth:`close`."""
        self._contexts = CacheContexts(self.pipeline)
        if self._known_by == "encode_prompt":
            _listeners(self.pipeline).append(self._hear)

    @property
    def pipeline(self) -> Any:
        """None once it is gone."""
        return self._pipeline()

    @property
    def in_turn(self) -> bool:
        """Whether the branches run one after the other, each in calls of its own."""
        return self._is_named or self._known_by in ("calls", "guider")

    @property
    def may_miss(self) -> bool:
        """Whether the call that :meth:`order` was asked for is of one branch, in a guided run."""
        return self.in_turn or self._has_ended

    def order(self, batch: int | None = None, model: Any = None) -> Order:
        """The chunks of the batch of the call that begins now; to be asked once a call.

        Args:
            batch: its rows, which say where guidance ends that the pipeline does not speak of.
            model: the one that is called, where the pipeline has two.
        """
        named = None if self._contexts is None else self._contexts.order()
        self._is_named = named is not None
        if named is not None:
            return unperturbed(guider_of(self.pipeline, model), named)
        if self._known_by == "guider":
            return self._guider.order(guider_of(self.pipeline, model))
        if self._known_by == "calls":
            return self._next_in_turn()
        if self._known_by == "rows":
            return self._by_rows(batch)
        if self._known_by == "property":
            return branch_order(self.pipeline)
        if self._is_guided is None:
            raise InvalidValueError(
                f"A {type(self.pipeline).__name__} called its model without encode_prompt, so "
                "whether the batch is guided is not known. Capture its transformer instead."
            )
        return self.guided if self._is_guided else ("conditional",)

    def _next_in_turn(self) -> Order:
        # The scheduler moves on between steps only, so a second call within a step is the
        # negative prompt's. (Timesteps do not show it: second-order schedulers repeat them.)
        scheduler = self.pipeline.scheduler
        step = id(scheduler.timesteps), scheduler.step_index
        self._calls = self._calls + 1 if step == self._step else 1
        self._step = step
        if self._calls > 2:
            raise InvalidValueError(
                f"A {type(self.pipeline).__name__} called its model {self._calls} times in one "
                "step, and which is of the negative prompt is not known. Capture its transformer."
            )
        # The prompt is always first.
        again = self._calls == 2
        return ("unconditional",) if again else ("conditional",)

    def _by_rows(self, batch: int | None) -> Order:
        order, schedule = branch_order(self.pipeline), self.pipeline.scheduler.timesteps
        self._has_ended = False
        if len(order) == 1 or batch is None:
            return order
        if self._first is None or self._first[0] is not schedule:
            self._first = schedule, batch
        self._has_ended = batch * len(order) == self._first[1]
        return ("conditional",) if self._has_ended else order

    def _hear(self, guided: bool) -> None:
        if get_ident() == self._thread:  # not of a run in another thread
            self._is_guided = guided

    def close(self) -> None:
        """Stop listening."""
        if self._contexts is not None:
            self._contexts.close()
        if self.pipeline is None:
            return
        standing_in = vars(self.pipeline).get("encode_prompt")
        listeners = getattr(standing_in, "listeners", [])
        if self._hear in listeners:
            listeners.remove(self._hear)
            if not listeners:
                vars(self.pipeline).pop("encode_prompt")
                vars(self.pipeline).update(cast(Any, standing_in).before)


def _listeners(pipeline: Any) -> list[Callable[[bool], None]]:
    """Called at each ``encode_prompt`` of this pipeline object with whether the run is guided.

    A function that stands in for the method holds them, for as long as there are any.
    """
    encode = pipeline.encode_prompt
    if hasattr(encode, "listeners"):
        return cast(list[Callable[[bool], None]], encode.listeners)
    signature = inspect.signature(encode)

    @functools.wraps(encode)
    def listened(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for listener in listeners:
            listener(bool(bound.arguments["do_classifier_free_guidance"]))
        return encode(*args, **kwargs)

    # In the instance, over the class's own method; close() takes it out again.
    listeners: list[Callable[[bool], None]] = []
    listened.listeners = listeners  # type: ignore[attr-defined]
    own = {name: held for name, held in vars(pipeline).items() if name == "encode_prompt"}
    listened.before = own  # type: ignore[attr-defined]
    pipeline.encode_prompt = listened
    return listeners


def branch_rows(order: Order, batch: int) -> dict[Branch, slice]:
    """The rows of each branch in a batch of ``batch`` rows made of equal chunks in ``order``.

    Raises:
        ValueError: the batch does not divide into that many chunks.
    """
    images, rest = divmod(batch, len(order))
    if rest or not images:
        raise InvalidValueError(
            f"The model was called with a batch of {batch}, which does not divide into "
            f"{len(order)} chunks of guidance {order}. Was the model called outside its pipeline? "
            "Then capture the model itself."
        )
    chunks = {name: slice(i * images, (i + 1) * images) for i, name in enumerate(order)}
    return {name: rows for name, rows in chunks.items() if name is not None}
