"""`FirstCalls`: what a model returned in the first calls of a run, for another run that begins with
the same calls: the model does not run again for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..models.caches import is_cached
from ..models.denoiser import Denoiser
from ..models.denoiser_call import innermost, unwrapped
from ..models.pipeline import Given
from .hooks import has_other_hooks

Forward = Callable[..., Any]


class _Given(NamedTuple):
    """The parts of a call by which it is told from another."""

    sample: Tensor
    timestep: float


class FirstCalls:
    """The first calls of a run of a denoiser.

        with first.recorded():
            pipe("a cat", ...)  # stopped early
        with first.given_back():
            pipe("a cat", ...)  # from the same seed

    A call holds a copy of the latents and of what the model returned: twice the latents' bytes.
    """

    def __init__(self, denoiser: Denoiser):
        self._denoiser = denoiser
        self._calls: list[tuple[_Given, Any]] = []  # each with what the model returned

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record each call inside the block, of a model that allows it, see :meth:`_may_rest`."""

        def record(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            given = self._given(args, kwargs)
            output = forward(*args, **kwargs)
            if given is not None:
                self._calls.append((given, _copy(output)))
            return output

        with self._around(record if self._may_rest() else None):
            yield

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Give back what was recorded, inside the block, as long as each call has the very bits of
        the recorded one; from the first other one on the model runs."""
        calls = list(reversed(self._calls))

        def give(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            if calls:
                given = self._given(args, kwargs)
                recorded, output = calls.pop()
                if _are_same(given, recorded) and self._may_rest():
                    return _copy(output)
                calls.clear()
            return forward(*args, **kwargs)

        with self._around(give if calls else None):
            yield

    def _given(self, args: tuple[object, ...], kwargs: Given) -> _Given | None:
        """Return a copy of a call's latents, and its timestep; None if they are not known."""
        call = self._denoiser.family.read_call(unwrapped(self._denoiser.model), args, kwargs)
        return None if call.sample is None else _Given(call.sample.clone(), float(call.timestep))

    @contextmanager
    def _around(self, run: Forward | None) -> Iterator[None]:
        """Let ``run(forward, *args, **kwargs)``, if there is one, take each call of the model."""
        if run is None:
            yield
            return
        model = unwrapped(self._denoiser.model)
        held = vars(model)
        before = held.get("forward")
        forward = model.forward
        # Pipelines read the signature of their model's forward.
        held["forward"] = functools.wraps(forward)(functools.partial(run, forward))
        try:
            yield
        finally:
            del held["forward"]
            if before is not None:
                held["forward"] = before

    def _may_rest(self) -> bool:
        """Check that nothing is seen in the model that could count or remember its calls: foreign
        hooks, forwards and processors, a compiled part, a cache, dropout."""
        model = unwrapped(self._denoiser.model)
        now = replace(self._denoiser)  # modules may have been replaced since
        if model.training or now.compiled_parts or is_cached(now):
            return False
        return all(_is_plain(part) for part in now.modules.values() if part is not model)


def _is_plain(part: nn.Module) -> bool:
    processor = innermost(getattr(part, "processor", None))
    is_known = processor is None or type(processor).__module__.startswith("diffusers.models.")
    is_moved = hasattr(part, "_hf_hook")  # accelerate moves weights
    return is_known and (is_moved or "forward" not in vars(part)) and not has_other_hooks(part)


def _are_same(given: _Given | None, recorded: _Given) -> bool:
    if given is None or given.timestep != recorded.timestep:
        return False
    return torch.equal(given.sample, recorded.sample)


def _copy(output: Any) -> Any:
    return tree_map_only(Tensor, lambda value: value.detach().clone(), output)
