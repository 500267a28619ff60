"""Rows of a denoiser's batch, or calls of it, that belong to each branch of the guidance.

With classifier-free guidance (Ho and Salimans 2022) a pipeline runs the prompt and the negative
prompt in one batch, or one after the other. Many pipelines name the branch of each call, see
:mod:`sdattn.models.cache_contexts`. For all others the order depends on the pipeline: it is looked
up in the families of models, never guessed from the batch.
"""

import weakref
from typing import Any

from ..errors import InvalidValueError, NotInCallError
from .cache_contexts import CacheContexts
from .families import guidance_of
from .guiders import GuiderWatch, guider_of, unperturbed
from .parts import Branch as Branch
from .parts import Order as Order
from .pipeline import Model, Pipeline
from .running_call import running_call, running_variables


def guided_order(pipeline: Pipeline) -> Order:
    """Return the chunks of a guided batch for this class of pipeline, in order; None is neither
    branch. Raise ValueError for an unknown layout."""
    return guidance_of(pipeline).order


def branch_order(pipeline: Pipeline) -> Order:
    """Return the chunks of the batch that ``pipeline`` runs now, by its own property.

    Ask at every call of the model, since guidance may be turned off in the middle of a run. The
    perturbed copy that PAG appends (Ahn et al. 2024) is neither branch.
    """
    return _with_perturbed(pipeline, guided_order(pipeline), pipeline.do_classifier_free_guidance)


def _with_perturbed(pipeline: Pipeline, guided: Order, is_guided: bool) -> Order:
    order: Order = guided if is_guided else ("conditional",)
    if getattr(pipeline, "do_perturbed_attention_guidance", False):
        order = (*order, None)
    return order


class GuidanceWatch:
    """Order of the branches at each call of a pipeline's model, for every known pipeline.

    The name that the pipeline gives the call decides, if it names one branch; otherwise the facts
    that its family knows about the class, from :meth:`listen` on.

    Args:
        pipeline: pipeline of a class that :func:`guided_order` knows. It is held weakly.

    Raises:
        ValueError: the class is not known.
    """

    def __init__(self, pipeline: Pipeline):
        self._pipeline = weakref.ref(pipeline)
        self._layout = guidance_of(pipeline)
        self.guided = self._layout.order
        self._known_by = self._layout.known_by
        self._contexts: CacheContexts | None = None  # while it listens
        self._guider = GuiderWatch()
        self._is_named = False  # whether the pipeline named the last call's branch
        self._step: object = None
        self._calls = 0  # within this step
        self._progress: tuple[object, list[float]] | None = None  # a schedule, and each step's

    def listen(self) -> None:
        """Follow the names that the pipeline gives its calls, until :meth:`close`."""
        self._contexts = CacheContexts(self.pipeline)

    @property
    def pipeline(self) -> Any:
        """Watched pipeline, or None once it is gone."""
        return self._pipeline()

    @property
    def in_turn(self) -> bool:
        """True if the branches run one after the other, each in its own calls."""
        return self._is_named or self._known_by in ("calls", "guider")

    @property
    def may_never_act(self) -> bool:
        """True if guidance is on but may end before the first step."""
        guided = self._known_by == "truncation" and self.pipeline is not None
        return guided and bool(self.pipeline.do_classifier_free_guidance)

    def order(self, model: Model | None = None) -> Order:
        """Return the chunks of the batch of the call that begins now, of ``model`` if the pipeline
        has two. Ask once per call."""
        named = self.named(model)
        self._is_named = named is not None
        if named is not None:
            return named
        if self._known_by == "guider":
            return self._guider.order(guider_of(self.pipeline, model))
        if self._known_by == "calls":
            return self._next_in_turn()
        if self._known_by == "truncation":
            return self._until_truncation()
        if self._known_by == "property":
            return branch_order(self.pipeline)
        return self._by_variable()

    def named(self, model: Model | None = None) -> Order | None:
        """Return the branch that names the call that begins now (``model.cache_context("cond")``),
        even outside the pipeline's own call, or None if it has no such name."""
        named = None if self._contexts is None else self._contexts.order()
        return None if named is None else unperturbed(guider_of(self.pipeline, model), named)

    def _by_variable(self) -> Order:
        variables = running_variables(self.pipeline)
        if variables is None or "do_classifier_free_guidance" not in variables:
            raise NotInCallError(
                f"The model of a {type(self.pipeline).__name__} was called outside of the "
                "pipeline's own call, so whether its batch is guided is not known. Capture its "
                "UNet or transformer instead."
            )
        # a pipeline may call the model again in a step; a run has its own steps
        step = running_call(self.pipeline), variables.get("i")
        is_again = step == self._step
        self._step = step
        if self._layout.once and is_again:
            return (None,)
        order = (*self.guided, *(None,) * variables.get(self._layout.further, 0))
        return _with_perturbed(self.pipeline, order, bool(variables["do_classifier_free_guidance"]))

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

    def _until_truncation(self) -> Order:
        # The pipeline's own rule, in its own arithmetic: rows alone do not show guidance that
        # never begins. Values are read once a run, so that the device does not wait later.
        pipeline = self.pipeline
        scheduler = pipeline.scheduler
        schedule = scheduler.timesteps
        if self._progress is None or self._progress[0] is not schedule:
            self._progress = schedule, ((1000 - schedule.float()) / 1000).tolist()
        step = scheduler.step_index
        if step is None:  # before the first step, which in image to image is a later one
            step = scheduler.begin_index or 0
        most = pipeline._cfg_truncation
        has_ended = most is not None and float(most) <= 1 and self._progress[1][step] > most
        return ("conditional",) if has_ended else branch_order(pipeline)

    def close(self) -> None:
        """Stop listening."""
        if self._contexts is not None:
            self._contexts.close()


def branch_rows(order: Order, batch: int) -> dict[Branch, slice]:
    """Return the rows of each branch in a batch of ``batch`` rows made of equal chunks in
    ``order``; raise ValueError if it does not divide into them."""
    images, rest = divmod(batch, len(order))
    if rest or not images:
        raise InvalidValueError(
            f"The model was called with a batch of {batch}, which does not divide into "
            f"{len(order)} chunks of guidance {order}. Was the model called outside its pipeline? "
            "Then capture the model itself."
        )
    chunks = {name: slice(i * images, (i + 1) * images) for i, name in enumerate(order)}
    return {name: rows for name, rows in chunks.items() if name is not None}
