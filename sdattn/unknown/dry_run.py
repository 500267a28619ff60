"""Calls of a model whose attention puts out zeros, and a number for each token that it got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.modes import no_autocast
from ..follow.installer import Installation
from .module_calls import ModuleCalls, SeenCall

SEED = 735_299  # one that nobody draws a text from: a norm hides a text that is only longer


def with_other(args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> tuple[Any, Any]:
    """Return a call's arguments with another tensor in place of one, or of each in a list."""

    def swapped(given: Any) -> Any:
        if isinstance(given, dict):
            return {name: swapped(one) for name, one in given.items()}
        if given is not value:
            return given
        if isinstance(given, Tensor):
            return _other(given)
        return type(given)(_other(one) if isinstance(one, Tensor) else one for one in given)

    changed = {name: swapped(given) for name, given in kwargs.items()}
    return [swapped(given) for given in args], changed


def _other(given: Tensor) -> Tensor:
    """Return another tensor of the same kind: other states, or the ids in reverse; if those are
    the same, 1 for 0 and 0 for all others."""
    if not given.is_floating_point():
        turned = given.flip(-1)
        return (given == 0).to(given) if torch.equal(turned, given) else turned
    noise = torch.randn(given.shape, generator=torch.Generator().manual_seed(SEED))
    return noise.to(given) * given.std().clamp_min(1e-3)


@dataclass(frozen=True)
class Tokens:
    """One attention call, with a few numbers for each of its queries and keys, ``[tokens, 4]``."""

    seen: SeenCall
    shape: tuple[int, ...] = ()
    has_mask: bool = False
    queries: Tensor | None = None
    keys: Tensor | None = None


@torch.no_grad()
def tokens_seen(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tokens]:
    """Call a model, and return its attention calls, which put out zeros."""
    seen: list[Tokens] = []
    calls = ModuleCalls(lambda call: seen.append(_tokens(call)), is_blind=True)
    device = next(model.parameters(), torch.empty(0)).device
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with Installation() as installed, torch.random.fork_rng([device] * (device.type == "cuda")):
        installed.run_eagerly(model)
        installed.undo(calls.close)
        calls.follow(installed, dict(model.named_modules()))
        torch.manual_seed(0)
        try:
            model(*args, **kwargs)
        finally:
            for name, value in model.named_buffers():  # running means, counters
                if name in buffers:
                    value.copy_(buffers[name])
    return seen


def _tokens(seen: SeenCall) -> Tokens:
    """Return what is compared of a call: numbers for each token, of all its rows and features."""
    call = seen.call
    if call is None:
        return Tokens(seen)
    if call.probs is not None:
        shape = tuple(call.probs.shape)
        axis = -2 if call.value.shape[-2] == shape[-1] else 1
        tokens = Tokens(seen, shape, keys=_number_each(call.value, axis))
        if call.query is not None and call.query.shape[-2] == shape[-2]:
            return replace(tokens, queries=_number_each(call.query))
        return tokens
    return Tokens(
        seen,
        shape=(*call.query.shape[:-1], call.key.shape[-2]),
        has_mask=call.mask is not None or call.causal,
        queries=_number_each(call.query),
        keys=_number_each(call.key),
    )


def _number_each(tokens: Tensor, axis: int = -2) -> Tensor:
    """Return a few sums for each token, ``[tokens, 4]``: one may be alike in two runs by chance;
    ``axis`` counts them."""
    flat = tokens.detach().float().movedim(axis, 0).flatten(1)
    places = torch.arange(1, flat.shape[1] + 1, device=flat.device)[:, None]
    weights = (places * torch.tensor([0.7, 1.1, 1.7, 2.3], device=flat.device)).sin()
    with no_autocast():
        sums: Tensor = flat @ weights
    return sums.cpu()
