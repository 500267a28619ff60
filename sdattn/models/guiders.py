"""Guider of a modular pipeline, which tells what each call of the model predicts.

A guider (diffusers' ``BaseGuidance``) makes one batch for each prediction of a step, and the model
runs on one after the other, the prompt's first. ``set_state`` begins a step, and ``prepare_inputs``
names its predictions in order: ``pred_cond``, ``pred_uncond``, and calls of a perturbed model.
``is_conditional`` does not tell the branch: it is true for some calls of a perturbed model, always
true for LTX-2's guider, and never for SmoothedEnergyGuidance (diffusers 0.42).
"""

import copy
import operator
from typing import Any

from ..errors import InvalidValueError, NotInCallError
from .cache_contexts import BRANCHES
from .parts import Order
from .pipeline import Model, Pipeline

# Guiders that perturb the model where others have the negative prompt (Karras et al. 2024)
_PERTURBING = ("AutoGuidance",)


def guider_of(pipe: Pipeline, model: Model | None = None) -> Any:
    """Return the guider that runs for a model of a pipeline, or None if it has no guider.

    Wan 2.2 has a second one, for the second transformer.
    """
    second = model is not None and model is getattr(pipe, "transformer_2", None)
    names = ("guider_2", "guider") if second else ("guider",)
    held = (getattr(pipe, name, None) for name in names)
    return next((one for one in held if hasattr(one, "prepare_inputs")), None)


class GuiderWatch:
    """Branch of each call of a pipeline's model, by its guider. Ask once per call."""

    def __init__(self) -> None:
        self._step: tuple[object, ...] = ()
        self._calls = 0  # within this step

    def order(self, guider: Any) -> Order:
        """Return the branch of the call that begins now, a batch of one chunk; raise NotInCallError
        if the guider has not run yet, ValueError for a prediction whose prompt is not known, or
        more calls than the guider names."""
        # set_state begins a step; not every guider counts its passes itself
        step = guider, guider._step, guider._timestep
        if guider._step is None:
            raise NotInCallError(
                f"The model was called outside of its pipeline, whose {type(guider).__name__} has "
                "not run yet, so which prompt the call is of is not known. Capture the model."
            )
        same = len(self._step) == 3 and all(map(operator.is_, step, self._step))
        self._step = step
        self._calls = self._calls + 1 if same else 1
        names = _predictions(guider)
        name = names[self._calls - 1] if self._calls <= len(names) else None
        if name not in BRANCHES:
            raise InvalidValueError(
                f"Call {self._calls} of the model in a step is for {name or 'nothing'} of a "
                f"{type(guider).__name__}, which makes {', '.join(names)}, so which prompt it has "
                f"is not known. Known are: {', '.join(BRANCHES)}."
            )
        return unperturbed(guider, BRANCHES[name])


def unperturbed(guider: Any, order: Order) -> Order:
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
