"""Rows of a denoiser's batch, or calls of it, that belong to each branch of the guidance.

With classifier-free guidance (Ho and Salimans 2022) a pipeline runs the prompt and the negative
prompt in one batch, or one after the other. Which branch a call is of, is told by

- the name that the pipeline gives the call (`CacheContexts`), where it names one branch;
- the guider of a modular pipeline, which names the predictions of each step in order;
- the family of the pipeline's class otherwise. It is never guessed from the batch.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from ..errors import InvalidValueError, NotInCallError
from .cache_contexts import BRANCHES, CacheContexts
from .call_options import is_modular
from .denoiser_call import unwrapped
from .families import UNMAPPED, registered
from .parts import GUIDED, Guidance
from .parts import Branch as Branch
from .parts import Order as Order
from .pipeline import Given, Model, Pipeline

# Guiders that perturb the model where others have the negative prompt (Karras et al. 2024)
_PERTURBING = ("AutoGuidance",)


def guidance_of(pipe: Pipeline) -> Guidance:
    """Return how a pipeline runs guidance: from the guider of a modular pipeline, or from the
    family that names its class or nearest base; raise ValueError if there is none, or the class
    lacks the property that its family needs."""
    if is_modular(pipe) and guider_of(pipe) is not None:
        return GUIDED
    layouts: dict[str, Guidance] = {}
    for family in registered():
        layouts.update(family.guidance)
    for cls in type(pipe).__mro__:
        found = layouts.get(cls.__name__)
        if cls.__name__ in UNMAPPED:
            raise InvalidValueError(
                f"The maps of a {type(pipe).__name__} cannot be told apart: "
                f"{UNMAPPED[cls.__name__]}. Use another pipeline of the same model."
            )
        has_property = hasattr(type(pipe), "do_classifier_free_guidance")
        if found and (found.known_by != "property" or has_property):
            return found
    raise InvalidValueError(
        f"How a {type(pipe).__name__} lays out guidance in its batch is not known. Capture its "
        "UNet or transformer instead (capture(pipe.unet)): every batch row is then an image of "
        "its own."
    )


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

    It counts no calls: whoever reads them says which call of its step each one is.

    Args:
        pipeline: pipeline of a class that :func:`guided_order` knows. It is held weakly.

    Raises:
        ValueError: the class is not known.
    """

    def __init__(self, pipeline: Pipeline):
        self._pipeline = weakref.ref(pipeline)
        self._layout = guidance_of(pipeline)
        self._known_by = self._layout.known_by
        self._names: CacheContexts | None = None  # while it listens
        self._progress: tuple[object, list[float]] | None = None  # a schedule, and each step's

    def listen(self) -> None:
        """Follow the names that the pipeline gives its calls, until :meth:`close`."""
        if self._names is None:
            self._names = CacheContexts(self.pipeline)

    @property
    def pipeline(self) -> Any:
        """Watched pipeline, or None once it is gone."""
        return self._pipeline()

    @property
    def in_turn(self) -> bool:
        """True if the branches run one after the other, each in its own calls."""
        return self._known_by in ("calls", "guider")

    @property
    def may_never_act(self) -> bool:
        """True if guidance is on but may end before the first step."""
        guided = self._known_by == "truncation" and self.pipeline is not None
        return guided and bool(self.pipeline.do_classifier_free_guidance)

    def order(self, model: Model | None, number: int, variables: Given | None = None) -> Order:
        """Return the chunks of the batch of the call that begins now.

        Args:
            model: called model, of a pipeline that has two.
            number: number of the call in its step, from 0, of all branches.
            variables: variables of the pipeline's running call.

        Raises:
            NotInCallError: only a call of the pipeline can tell.
            ValueError: more calls in a step than are known, or a prediction of no known prompt.
        """
        named = self.named(model)
        if named is not None:
            return named
        if self._known_by == "guider":
            return _predicted(guider_of(self.pipeline, model), number)
        if self._known_by == "calls":
            return self._in_turn(number)
        if self._known_by == "truncation":
            return self._until_truncation()
        if self._known_by == "property":
            return branch_order(self.pipeline)
        return self._by_variable(number, variables)

    def named(self, model: Model | None = None) -> Order | None:
        """Return the branch that names the call that begins now (``model.cache_context("cond")``),
        even outside the pipeline's own call, or None if it has no such name."""
        named = None if self._names is None else self._names.order()
        return None if named is None else _unperturbed(guider_of(self.pipeline, model), named)

    def step(self, model: Model | None, variables: Given) -> object:
        """Return what the pipeline counts its steps by in its running call, or None if unknown: the
        guider's step, or the variable ``i`` of the loops of diffusers."""
        guider = guider_of(self.pipeline, model) if self._known_by == "guider" else None
        step = variables.get("i") if guider is None else guider._step
        return step if isinstance(step, int) else None

    def _by_variable(self, number: int, variables: Given | None) -> Order:
        if variables is None or "do_classifier_free_guidance" not in variables:
            raise NotInCallError(
                f"The model of a {type(self.pipeline).__name__} was called outside of the "
                "pipeline's own call, so whether its batch is guided is not known. Capture its "
                "UNet or transformer instead."
            )
        if self._layout.once and number:
            return (None,)
        order = (*self._layout.order, *(None,) * variables.get(self._layout.further, 0))
        return _with_perturbed(self.pipeline, order, bool(variables["do_classifier_free_guidance"]))

    def _in_turn(self, number: int) -> Order:
        if number > 1:
            raise InvalidValueError(
                f"A {type(self.pipeline).__name__} called its model {number + 1} times in one "
                "step, and which is of the negative prompt is not known. Capture its transformer."
            )
        # The prompt is always first.
        return ("unconditional",) if number else ("conditional",)

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
        if self._names is not None:
            self._names.close()


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


def guider_of(pipe: Pipeline, model: Model | None = None) -> Any:
    """Return the guider that runs for a model of a pipeline, or None if it has no guider.

    Wan 2.2 has a second one, for the second transformer.
    """
    other = unwrapped(getattr(pipe, "transformer_2", None))
    second = model is not None and unwrapped(model) is other
    names = ("guider_2", "guider") if second else ("guider",)
    for name in names:
        held = getattr(pipe, name, None)
        if hasattr(held, "prepare_inputs"):
            return held
    return None


def _predicted(guider: Any, number: int) -> Order:
    """Return the branch of a call by its guider, a batch of one chunk.

    A guider (diffusers' ``BaseGuidance``) makes one batch for each prediction of a step, and the
    model runs on one after the other, the prompt's first. ``set_state`` begins a step, and
    ``prepare_inputs`` names its predictions in order: ``pred_cond``, ``pred_uncond``, and calls of
    a perturbed model. ``is_conditional`` does not tell the branch: it is true for some calls of a
    perturbed model, always true for LTX-2's guider, and never for SmoothedEnergyGuidance (diffusers
    0.42).
    """
    if guider._step is None:
        raise NotInCallError(
            f"The model was called outside of its pipeline, whose {type(guider).__name__} has "
            "not run yet, so which prompt the call is of is not known. Capture the model."
        )
    names = _predictions(guider)
    name = names[number] if number < len(names) else None
    if name not in BRANCHES:
        raise InvalidValueError(
            f"Call {number + 1} of the model in a step is for {name or 'nothing'} of a "
            f"{type(guider).__name__}, which makes {', '.join(names)}, so which prompt it has "
            f"is not known. Known are: {', '.join(BRANCHES)}."
        )
    return _unperturbed(guider, BRANCHES[name])


def _unperturbed(guider: Any, order: Order) -> Order:
    """Return the branch of a call, or no branch for a negative prompt through a perturbed model."""
    perturbs = any(cls.__name__ in _PERTURBING for cls in type(guider).__mro__)
    return (None,) if perturbs and order == ("unconditional",) else order


def makes_negative(guider: Any) -> bool:
    """Check whether a run has passes for the negative prompt in at least some of its steps."""
    whole = copy.copy(guider)
    whole._num_inference_steps = None  # without its steps it has all that are enabled
    return "pred_uncond" in _predictions(whole)


def _predictions(guider: Any) -> list[str]:
    # from a copy: some guiders restart their momentum when they are asked
    batches = copy.copy(guider).prepare_inputs({})
    return [getattr(batch, guider._identifier_key) for batch in batches]
