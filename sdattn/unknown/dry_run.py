"""Calls of a model whose attention puts out what no token gave it, and a few numbers for each token
that it got; another text and another image for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.calls import AttentionCall
from ..attention.modes import no_autocast
from ..follow.installer import Installation
from ..look.sdpa import Unlike
from ..models.denoiser_call import compiled_parts
from .module_calls import ModuleCalls, SeenCall

SEED = 735_299  # one that nobody draws a text from: a norm hides a text that is only longer


def with_other(
    args: Sequence[Any], kwargs: Mapping[str, Any], value: Any, other: Any
) -> tuple[Any, Any]:
    """Return a call's arguments with another value in place of one."""

    def swapped(given: Any) -> Any:
        if isinstance(given, dict):
            return {name: swapped(one) for name, one in given.items()}
        if given is value:
            return other
        return type(given)(map(swapped, given)) if type(given) in (list, tuple) else given

    changed = {name: swapped(given) for name, given in kwargs.items()}
    return [swapped(given) for given in args], changed


def another_image(given: Any) -> Any:
    """Return another image of the same kind: states, ids, or a list with one for each image."""
    if isinstance(given, (list, tuple)):
        return type(given)(map(another_image, given))
    if given.is_floating_point():
        return _noise_like(given)
    largest = int(given.max())
    if not largest:
        return given + 1
    random = torch.Generator().manual_seed(SEED)
    shifts = torch.randint(1, largest + 1, given.shape, generator=random)
    return ((given.long() + shifts.to(given.device)) % (largest + 1)).to(given)


def another_corner(given: Any, other: Any) -> Any:
    """Return an image whose first half of rows and of columns, the last two axes, is the other's;
    the image itself if it has no such axes."""
    if isinstance(given, (list, tuple)):
        return type(given)(map(another_corner, given, other))
    if given.ndim < (4 if given.is_floating_point() else 3):
        return given
    rows, cols = given.shape[-2:]
    corner = given.clone()
    corner[..., : rows // 2, : cols // 2] = other[..., : rows // 2, : cols // 2]
    return corner


def another_text(given: Any) -> Any:
    """Return another random text of the same length: states, or ids of which the first, the last
    and the padding stay, since a model may look for them; or a list of some."""
    if isinstance(given, (list, tuple)):
        return type(given)(another_text(one) if isinstance(one, Tensor) else one for one in given)
    if given.is_floating_point():
        return _noise_like(given)
    rows = given.reshape(-1, given.shape[-1]).tolist()
    return torch.tensor(list(map(_other_ids, rows))).to(given).reshape(given.shape)


def _noise_like(given: Tensor) -> Tensor:
    noise = torch.randn(given.shape, generator=torch.Generator().manual_seed(SEED))
    return noise.to(given) * given.std(correction=0).clamp_min(1e-3)


def _other_ids(ids: Sequence[int]) -> list[int]:
    places = _of_words(ids)
    kept = {one for place, one in enumerate(ids) if place not in places}
    pool = [one for one in range(max(ids) + 1) if one not in kept] or [0]
    random = Random(SEED)
    other = list(ids)
    for place in places:
        choice = random.choice(pool)
        other[place] = choice if choice != ids[place] else pool[pool.index(choice) - 1]
        if other[place] == ids[place]:  # there is no other
            other[place] = int(not ids[place])
    return other


def _of_words(ids: Sequence[int]) -> range:
    """Return the places between the first and the last of a text without its padding, the same id
    several times at an end; more, if none are left."""
    first, last = 0, len(ids)
    while last > 2 and ids[-1] == ids[-2] == ids[last - 1]:
        last -= 1
    while last - first > 2 and ids[0] == ids[1] == ids[first]:
        first += 1
    inner = (range(first + 1, last - 1), range(first + 1, last), range(first, last))
    return next(places for places in (*inner, range(len(ids))) if places)


def changed_tokens(text: Any, other: Any) -> list[bool] | None:
    """Return which ids of a text differ, in any row; None for states, which all do."""
    if not isinstance(text, Tensor) or text.is_floating_point():
        return None
    changed: list[bool] = (text != other).reshape(-1, text.shape[-1]).any(0).tolist()
    return changed


@dataclass(frozen=True)
class Tokens:
    """One attention call, without its values, and a few numbers for each of its queries and keys,
    ``[tokens, 4]``."""

    seen: SeenCall
    shape: tuple[int, ...] = ()
    has_mask: bool = False
    queries: Tensor | None = None
    keys: Tensor | None = None


@torch.no_grad()
def tokens_seen(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tokens], list[Unlike]]:
    """Call a model, and return its attention calls, whose outputs no token has a part in, and what
    a replacement of torch's attention would have made of them."""
    seen: list[Tokens] = []
    calls = ModuleCalls(lambda call: seen.append(_tokens(call)), is_blind=True)
    device = next(model.parameters(), torch.empty(0)).device
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with Installation() as installed, torch.random.fork_rng([device] * (device.type == "cuda")):
        installed.run_eagerly(compiled_parts(model.modules()))
        installed.undo(calls.close)
        calls.follow(installed, dict(model.named_modules()))
        torch.manual_seed(0)
        try:
            model(*args, **kwargs)
        finally:
            for name, value in model.named_buffers():  # running means, counters
                if name in buffers:
                    value.copy_(buffers[name])
    return seen, calls.unlike


def _tokens(seen: SeenCall) -> Tokens:
    """Return what is compared of a call: numbers for each token, of all its rows and features."""
    call = seen.call
    if call is None:
        return Tokens(seen)
    seen.call = without_values(call)
    if call.probs is not None:
        shape = tuple(call.probs.shape)
        tokens = Tokens(seen, shape, keys=_number_each(call.value, _axis(call.value, shape[-1])))
        if call.query is not None and shape[-2] in call.query.shape[1:]:
            axis = _axis(call.query, shape[-2])
            return replace(tokens, queries=_number_each(call.query, axis))
        return tokens
    return Tokens(
        seen,
        shape=(*call.query.shape[:-1], call.key.shape[-2]),
        has_mask=call.mask is not None or call.causal,
        queries=_number_each(call.query),
        keys=_number_each(call.key),
    )


def _axis(part: Tensor, length: int) -> int:
    """Return the axis of so many tokens: of ``[..., N, d]``, ``[B, N, heads, d]`` or ``[B, d,
    N]``."""
    return next((axis for axis in (-2, 1, -1) if part.shape[axis] == length), -2)


def without_values(call: AttentionCall) -> AttentionCall:
    """Return a call with tensors on torch's meta device."""

    def shape_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    names = [field.name for field in fields(call)]
    return replace(call, **{name: shape_of(getattr(call, name)) for name in names})


def _number_each(tokens: Tensor, axis: int = -2) -> Tensor:
    """Return a few sums for each token, ``[tokens, 4]``: one may be alike in two runs by chance;
    ``axis`` counts them."""
    flat = tokens.detach().float().movedim(axis, 0).flatten(1)
    places = torch.arange(1, flat.shape[1] + 1, device=flat.device)[:, None]
    weights = (places * torch.tensor([0.7, 1.1, 1.7, 2.3], device=flat.device)).sin()
    with no_autocast():
        sums: Tensor = flat @ weights
    return sums.cpu()
