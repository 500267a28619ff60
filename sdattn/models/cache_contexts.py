"""Name that a pipeline gives each call of its model, meant for diffusers' caches.

About fifty pipelines wrap each call in ``with model.cache_context("cond")`` or another name, since
caches keep a state for each branch of the guidance. diffusers hands the name only to stateful hooks
(models/cache_utils.py, ``CacheMixin.cache_context``), so a stand-in notes it here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, local
from types import MethodType
from typing import Any

from torch.nn import Module

from .denoiser_call import unwrapped
from .parts import Order
from .pipeline import Model, Pipeline

_METHOD = "cache_context"
_changing = Lock()  # for changes to a model's stand-in
# The names in the pipelines of diffusers 0.42 and, from "pred_cond" on, of its guiders. A name that
# is missing ("cond_uncond", of a batch) does not say the branch.
BRANCHES: dict[str, Order] = {
    "cond": ("conditional",),
    "uncond": ("unconditional",),
    "pred_cond": ("conditional",),
    "pred_uncond": ("unconditional",),
    # further calls of a perturbed model: neither branch
    "uncond_stg": (None,),
    "uncond_modality": (None,),
    "pred_cond_stg": (None,),
    "pred_cond_modality": (None,),
    "pred_cond_seg": (None,),
    "pred_cond_skip": (None,),
}


class CacheContexts:
    """Names under which a pipeline's models run, until :meth:`close`. Each model with a
    ``cache_context`` gets a stand-in for that method, until the last listener has left."""

    def __init__(self, pipeline: Pipeline):
        parts = (unwrapped(part) for part in getattr(pipeline, "__dict__", {}).values())
        models = [part for part in parts if isinstance(part, Module) and hasattr(part, _METHOD)]
        self._stand_ins = [_StandIn.of(model) for model in models]

    def order(self) -> Order | None:
        """Return the branch of this thread's running call, or None if no name tells it."""
        for stand_in in self._stand_ins:
            names = stand_in.running.names
            if names and names[-1] in BRANCHES:
                return BRANCHES[names[-1]]
        return None

    def close(self) -> None:
        """Stop listening. A second call has no effect."""
        for stand_in in self._stand_ins:
            stand_in.leave()
        self._stand_ins = []


class _Running(local):
    """Names of a model's running calls in each thread, from the outermost on."""

    def __init__(self) -> None:
        self.names: list[str] = []


class _StandIn:
    """Instance attribute that hides the method of the model's class. The model is held weakly."""

    def __init__(self, model: Model):
        self._model = weakref.ref(model)
        self._before = {name: own for name, own in vars(model).items() if name == _METHOD}
        self._listening = 0
        self.running = _Running()

    @classmethod
    def of(cls, model: Model) -> _StandIn:
        with _changing:
            held = vars(model).get(_METHOD)
            stand_in = held if isinstance(held, cls) else cls(model)
            stand_in._listening += 1
            vars(model)[_METHOD] = stand_in
        return stand_in

    @contextmanager
    def __call__(self, name: str, *args: object, **kwargs: object) -> Iterator[None]:
        names = self.running.names
        names.append(name)
        try:
            with self._own(self._model())(name, *args, **kwargs):
                yield
        finally:
            names.pop()

    def leave(self) -> None:
        with _changing:
            self._listening -= 1
            attributes = getattr(self._model(), "__dict__", {})
            if not self._listening and attributes.get(_METHOD) is self:  # else replaced meanwhile
                del attributes[_METHOD]
                attributes.update(self._before)

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        """Return the copied model's own method, since nobody listens to the copy."""
        return self._own(memo.get(id(self._model())))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the method of the model's class, when a model is pickled."""
        return getattr, (self._model(), _METHOD)

    def _own(self, model: object) -> Any:
        return self._before.get(_METHOD) or MethodType(getattr(type(model), _METHOD), model)
