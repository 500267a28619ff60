"""Outputs of an attention layer's projections while it runs, seen by hooks that stay."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from ..attention.calls import AttentionCall
from ..attention.controlled import mask_by_head
from ..attention.core import heads_of
from ..errors import RunError
from ..follow.hooks import hook_after, hook_before
from ..models.denoiser_call import innermost
from .layer import Arguments, IsOpen, Layer
from .unknown_processors import title

ARRIVED = "to_out"  # the one whose input is seen
INTO = "into "  # before the name of a projection whose input is seen too
Projection = tuple[str, nn.Module | None]  # a projection by its name
Seen = dict[str, list[Tensor]]  # projections' outputs, by name, a tensor per call


def named(attn: Layer, names: Sequence[str]) -> list[Projection]:
    """Return projections of an attention layer, None for those that it lacks."""
    modules = attn._modules  # asking the module for each costs more
    return [(name, modules.get(name)) for name in names]


def output_projection(attn: Layer) -> nn.Module | None:
    to_out = getattr(attn, "to_out", getattr(attn, "out_layer", None))  # Kandinsky 5's name
    return to_out[0] if isinstance(to_out, nn.ModuleList) else to_out


def query_and_key(seen: Seen, inner: object) -> tuple[Tensor, Tensor]:
    """Return a layer's query and key ``[B, N or T, heads*d]`` from its projections' outputs; raise
    RuntimeError if the processor ``inner`` called none of them."""
    if "to_qkv" in seen:
        query, key, _ = seen["to_qkv"][0].chunk(3, dim=-1)
        return query, key
    if "to_q" in seen and "to_kv" in seen:
        return seen["to_q"][0], seen["to_kv"][0].chunk(2, dim=-1)[0]
    if "to_q" in seen and "to_k" in seen:
        return seen["to_q"][0], seen["to_k"][0]
    name = title(innermost(inner))
    raise RunError(
        f"{name[0].upper()}{name[1:]} did not call the layer's own to_q and "
        f"to_k (called: {', '.join(seen) or 'none'}), so what it attended to cannot be known. Set "
        "another processor before capture, sdattn.TorchAttnProcessor() for example."
    )


def projected_call(
    attn: Layer, query: Tensor, key: Tensor, mask: Tensor | None = None, norm_k: str = "norm_k"
) -> AttentionCall:
    """Return the call of a layer by its projections' outputs, ``[B, N, heads*d]`` and ``[B, T,
    heads*d]``; ``norm_k`` names the norm of this key."""
    query = heads_of(query, attn.heads, getattr(attn, "norm_q", None))
    key = heads_of(key, attn.heads, getattr(attn, norm_k, None))
    if mask is not None:
        mask = mask_by_head(mask, len(query), attn.heads, key.shape[2])
    return AttentionCall(query, key, mask=mask)


class Projections:
    """The outputs of a layer's projections in an observed call, and the input of its output
    projection. The hooks stay from the first call until :meth:`remove`. They are made again if a
    projection was replaced (LoRA, fused projections), or a user's hook follows them and may change
    the output."""

    def __init__(self, is_open: IsOpen) -> None:
        self.is_open = is_open
        self._parts: Sequence[Projection] = ()
        self._hooks: list[_Hook] = []
        self._outer: list[Seen | None] = []  # of a layer that runs again in its run (checkpointing)
        self.seen: Seen | None = None  # in the running call

    def during(self, parts: Sequence[Projection]) -> Projections:
        """Return a block to enter, which gives what these projections put out in it, by name, each
        call of them in order."""
        if not self.are_seen(parts):
            self.remove()
            self._parts = parts
            for name, module in parts:
                if module is not None:
                    self._hooks.append(_Hook(self, name, module))
        return self

    def are_seen(self, parts: Sequence[Projection]) -> bool:
        """Check whether hooks show what these projections give to the layer."""
        # The usual call finds its hooks in place: registering them costs more than a small layer.
        return parts == self._parts and all([hook.is_last() for hook in self._hooks])

    def __enter__(self) -> Seen:
        self._outer.append(self.seen)
        self.seen = {}
        return self.seen

    def __exit__(self, *_: object) -> None:
        self.seen = self._outer.pop()

    def remove(self) -> None:
        """Take the hooks out."""
        for hook in self._hooks:
            hook.remove()
        self._parts = ()
        self._hooks = []


class _Hook:
    """A hook of one projection."""

    def __init__(self, owner: Projections, name: str, module: nn.Module):
        self.owner = owner
        self.name = name
        self.is_input = name == ARRIVED or name.startswith(INTO)
        self.beside: dict[int, Any]
        if self.is_input:
            self.beside = module._forward_pre_hooks
            self.remove = hook_before(module, self)
        else:
            self.beside = module._forward_hooks
            self.remove = hook_after(module, self)

    def __call__(
        self, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor | None = None
    ) -> None:
        owner = self.owner
        if owner.seen is not None and owner.is_open():
            given = args[0] if output is None else output
            owner.seen.setdefault(self.name, []).append(given)

    def is_last(self) -> bool:
        """Check whether only observers' hooks come after it."""
        for hook in reversed(self.beside.values()):
            if hook is self:
                return True
            if not isinstance(hook, _Hook):
                return False
        return False  # somebody took it out


@cache
def _names_of(call: Callable[..., object]) -> list[str]:
    """Return the names of a function's arguments that may be given by position."""
    given = inspect.signature(call).parameters.values()
    return [one.name for one in given if one.kind is one.POSITIONAL_OR_KEYWORD]


def by_name(inner: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
    """Return a processor's arguments, after the layer, by diffusers' names or else by position."""
    names = ["hidden_states", "encoder_hidden_states", "attention_mask"]
    if len(args) > 1:  # not the usual call
        own = _names_of(type(inner).__call__)[2:]
        names = own if len(own) >= len(args) and names[0] in own else names
    return {**dict(zip(names, args, strict=False)), **kwargs}
