"""Caches of diffusers (TaylorSeer, MagCache, FirstBlockCache, FasterCache), which leave layers of a
model out in some of its calls."""

from __future__ import annotations

from itertools import chain

from .denoiser import Denoiser
from .denoiser_call import unwrapped


def is_cached(denoiser: Denoiser) -> bool:
    """Check whether a cache of diffusers is on in a model, or in the one that stands in for it."""
    other = denoiser.stands_in
    for module in chain(denoiser.modules.values(), other.modules.values() if other else ()):
        registry = vars(module).get("_diffusers_hook")
        # Of diffusers' hooks the caches alone remember earlier calls.
        if registry is not None and any(hook._is_stateful for hook in registry.hooks.values()):
            return True
    return False


def may_run_prompts_alone(model: object) -> bool:
    """Check for FasterCache, which in some calls of a model gives its layers the second half of a
    guided batch alone, the prompts', and guesses the other."""
    registry = vars(unwrapped(model)).get("_diffusers_hook")
    return "faster_cache_denoiser" in getattr(registry, "hooks", {})
