"""Caches of diffusers (TaylorSeer, MagCache, FirstBlockCache, FasterCache), which leave layers of a
model out in some of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .denoiser import Denoiser
from .denoiser_call import unwrapped


def is_cached(denoiser: Denoiser) -> bool:
    """Check whether a cache of diffusers is on in a model, or in the one that stands in for it."""
    for model in (denoiser.model, denoiser.stands_in):
        for module in () if model is None else unwrapped(model).modules():
            # Of diffusers' hooks the caches alone remember earlier calls.
            if any(hook._is_stateful for hook in _hooks(module).values()):
                return True
    return False


def may_run_prompts_alone(model: object) -> bool:
    """Check for FasterCache, which in some calls of a model gives its layers the second half of a
    guided batch alone, the prompts', and guesses the other."""
    return "faster_cache_denoiser" in _hooks(unwrapped(model))


def _hooks(module: object) -> Mapping[str, Any]:
    """Return diffusers' hooks of a module by name."""
    found: Mapping[str, Any] = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return found
