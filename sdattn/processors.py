"""The attention processors.

    ObservingProcessor     lets another processor make the output and hands on what it attended to
    TorchAttnProcessor     computes attention itself, in pure torch, and lets a controller edit it

A processor is called by its attention layer as
``processor(attn, hidden_states, encoder_hidden_states, attention_mask, temb)`` with
``hidden_states`` ``[B, N, C]`` (or ``[B, C, rows, cols]``), the text states ``[B, T, C_text]`` or
None for self-attention, and gives back the shape of ``hidden_states``.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn

from .attended import Attended, OfHeads, Rows
from .attention import attention_probs, fold_heads, merge_heads, split_heads, unfold_heads
from .sdpa import SdpaWatch, Seen, told

Controller = Callable[[Tensor, bool, str], Tensor | None]
Observer = Callable[[Attended], None]
LARGE = 1 << 20  # numbers in the hidden states; in smaller layers a watch costs more than it spares


class ObservingProcessor:
    """Let ``inner`` make the output; hand the probabilities it used to ``observe``.

    The output is the very tensor that ``inner`` returned. A :class:`TorchAttnProcessor` shows its
    probabilities itself, as a controller left them. Those of any other follow from its query and
    key, which are read by forward hooks on the layer's own projections (``to_q`` and ``to_k``, or
    the fused ``to_kv`` and ``to_qkv``) while ``inner`` runs, so they include LoRA and whatever
    else acts on the projections. In large layers on the CPU, where the kernel that makes the output
    tells the logsumexp as well, that takes the place of a softmax here.

    Where ``inner`` has weights (IP-Adapter) it is a module as well: they move with the model.

    Raises (when called):
        RuntimeError: ``inner`` called neither of these projections, so what it used is unknown.
    """

    def __new__(cls, inner: Any, *_: Any) -> "ObservingProcessor":
        kind: Any = cls
        return super().__new__(_uncompiled(kind, isinstance(inner, nn.Module)))

    def __init__(self, inner: Any, observe: Observer):
        if isinstance(self, nn.Module):
            nn.Module.__init__(self)
        self.inner = inner
        self.observe = observe
        self.listeners: list[Callable[[list[Seen]], object]] = []

        # diffusers reads the signature of `processor.__call__` at every call, to choose the keyword
        # arguments that it passes on, so this object has to show the signature of the inner one.
        @wraps(inner.__call__)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            return type(self).__call__(self, *args, **kwargs)

        vars(call)["__signature__"] = inspect.signature(inner.__call__)
        vars(self)["__call__"] = call

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of a model's copy: the copy is not watched."""
        return copy.deepcopy(self.inner, memo)

    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        inner = innermost(self)
        if isinstance(inner, TorchAttnProcessor):
            return self._shown(inner, attn, *args, **kwargs)
        return self._observed(attn, *args, **kwargs)

    def _shown(self, inner: "TorchAttnProcessor", attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        shown: list[Tensor] = []
        inner.watchers.append(shown.append)
        try:
            output = self.inner(attn, *args, **kwargs)
        finally:
            inner.watchers.remove(shown.append)
        [probs] = shown  # [B, heads, N, T]

        def of_rows(rows: Rows) -> OfHeads:
            def of_heads(heads: slice, columns: Sequence[int] | None) -> Tensor:
                own = probs[rows][:, heads].to(torch.float32, copy=True)  # of theirs none is kept
                return _columns(own, columns)

            return of_heads

        batch, heads, cells, keys = probs.shape
        self.observe(Attended(batch, heads, cells, keys, of_rows))
        return cast(Tensor, output)

    def _observed(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        seen: dict[str, Tensor] = {}
        given = by_name(args, kwargs)
        images = _ImageKeys(innermost(self), given.get("encoder_hidden_states"))
        hooks = [
            module.register_forward_hook(partial(_keep_output, seen, name))
            for name in ("to_q", "to_k", "to_kv", "to_qkv")
            if (module := getattr(attn, name, None)) is not None
        ]
        hooks += images.hooks()
        calls: list[Seen] = []
        hidden = given["hidden_states"]
        watch = hidden.device.type == "cpu" and hidden.numel() >= LARGE
        call_inner = partial(self._watched, calls) if watch else self.inner
        try:
            output: Tensor = call_inner(attn, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        query, key = _query_and_key(seen, self.inner)
        call = told(calls, len(query), attn.heads, query.shape[1], key.shape[1])
        mask = given.get("attention_mask")

        def of_rows(rows: Rows) -> OfHeads:
            if call is None:
                text = observed_probs(attn, query, key, mask, rows)
            else:
                text = call.of_rows(slice(None), slice(None), rows)
            return images.beside(text, attn, query, rows)

        shape = len(query), attn.heads, query.shape[1], key.shape[1] + sum(images.columns)
        self.observe(Attended(*shape, of_rows))
        return output

    def _watched(self, calls: list[Seen], attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The output of ``inner``; ``calls`` takes what was handed to torch's attention, which the
        innermost of nested observers sees."""
        first = self
        while isinstance(first.inner, ObservingProcessor):
            first = first.inner
        first.listeners.append(calls.extend)
        try:
            if first is not self:
                return cast(Tensor, self.inner(attn, *args, **kwargs))
            with SdpaWatch() as watch:
                output: Tensor = self.inner(attn, *args, **kwargs)
            for listener in self.listeners:
                listener(watch.calls)
            return output
        finally:
            first.listeners.remove(calls.extend)


@cache
def _uncompiled(cls: Any, is_module: bool) -> Any:
    """The class with its call left out of compiled models, and as a module if need be.

    Made when the first one is: importing torch's compiler takes longer than all else here.
    """
    bases = (cls, nn.Module) if is_module and not issubclass(cls, nn.Module) else (cls,)
    call = torch.compiler.disable(cls.__call__)
    return type(cls.__name__, bases, {"__call__": call, "__doc__": cls.__doc__})


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a layer hands to its processor, behind itself."""
    names = "hidden_states", "encoder_hidden_states", "attention_mask"
    return {**dict(zip(names, args, strict=False)), **kwargs}


def innermost(processor: Any) -> Any:
    """The processor behind those that only observe."""
    while isinstance(processor, ObservingProcessor):
        processor = processor.inner
    return processor


def _keep_output(
    seen: dict[str, Tensor], name: str, _module: nn.Module, _args: Any, output: Tensor
) -> None:
    seen.setdefault(name, output)


class _ImageKeys:
    """The keys that an IP-Adapter's processor makes of its image prompts.

    The picture attends to them apart from the text, in one softmax an adapter, or one an image
    where masks say which image goes where (Ye et al. 2023, "IP-Adapter", equation 4).
    """

    def __init__(self, processor: Any, states: Any):
        self.projections = list(getattr(processor, "to_k_ip", ()))
        # (text states, [image states [B, images, tokens, width] of each adapter])
        given = states[1][: len(self.projections)] if isinstance(states, tuple) else ()
        self.columns = [one.shape[1] * one.shape[2] for one in given]
        self.keys: list[list[Tensor]] = [[] for _ in self.projections]

    def hooks(self) -> list[Any]:
        def keep(keys: list[Tensor], _module: nn.Module, _args: Any, output: Tensor) -> None:
            keys.append(output.flatten(1, -2))  # [B, tokens, width]

        return [
            projection.register_forward_hook(partial(keep, keys))
            for projection, keys in zip(self.projections, self.keys, strict=True)
        ]

    def beside(self, text: OfHeads, attn: Any, query: Tensor, rows: Rows) -> OfHeads:
        """The image columns behind those of the text; zeros for an adapter that is switched
        off."""
        if not self.columns:
            return text
        adapters = [
            ([observed_probs(attn, query, key, None, rows) for key in keys], columns)
            for keys, columns in zip(self.keys, self.columns, strict=False)
        ]

        def of_heads(heads: slice, columns: Sequence[int] | None) -> Tensor:
            parts = [text(heads, None)]
            for images, width in adapters:
                parts += [image(heads, None) for image in images]
                if not images:
                    parts.append(parts[0].new_zeros((*parts[0].shape[:-1], width)))
            return _columns(torch.cat(parts, dim=-1), columns)

        return of_heads


def _columns(probs: Tensor, columns: Sequence[int] | None) -> Tensor:
    return probs if columns is None else probs[..., list(columns)]


def _query_and_key(seen: dict[str, Tensor], inner: Any) -> tuple[Tensor, Tensor]:
    if "to_qkv" in seen:
        query, key, _ = seen["to_qkv"].chunk(3, dim=-1)
        return query, key
    if "to_q" in seen and "to_kv" in seen:
        return seen["to_q"], seen["to_kv"].chunk(2, dim=-1)[0]
    if "to_q" in seen and "to_k" in seen:
        return seen["to_q"], seen["to_k"]
    raise RuntimeError(
        f"The processor {type(inner).__name__} did not call the layer's own to_q and to_k "
        f"(called: {', '.join(seen) or 'none'}), so what it attended to cannot be known. Set "
        "another processor before capture, sdattn.TorchAttnProcessor() for example."
    )


def observed_probs(
    attn: Any, query: Tensor, key: Tensor, mask: Tensor | None, rows: Rows
) -> OfHeads:
    """The probabilities that follow from the query and key an observed layer used.

    Args:
        attn: the attention layer; its ``heads``, ``norm_q`` and ``norm_k`` are used.
        query: ``[B, N, heads*d]``, any floating dtype.
        key: ``[B, T, heads*d]``.
        mask: None or the layer's ``attention_mask``, added to the scores.
        rows: those of the batch that are wanted.

    Returns:
        Of some heads, float32 ``[images, heads, N, T]``; with all columns every row sums to 1.
    """
    if mask is not None:
        mask = _mask_by_head(mask, len(query), attn.heads, key.shape[1]).float()
        mask = mask if len(mask) == 1 else mask[rows]
    query = _heads_of(query[rows], attn.heads, getattr(attn, "norm_q", None))
    key = _heads_of(key[rows], attn.heads, getattr(attn, "norm_k", None))

    def of_heads(heads: slice, columns: Sequence[int] | None) -> Tensor:
        of_mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        probs = attention_probs(query[:, heads].float(), key[:, heads].float(), of_mask)
        return _columns(probs, columns)

    return of_heads


def _heads_of(x: Tensor, heads: int, norm: Any) -> Tensor:
    """``[B, N, heads*d]`` as ``[B, heads, N, d]``, normed: each head by itself or, where the norm
    is as wide as all of them, across them."""
    if norm is None:
        return split_heads(x, heads)
    # diffusers' RMSNorm calls its width dim
    width = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
    if isinstance(width, tuple) and width[-1] == x.shape[-1]:
        return split_heads(norm(x), heads)
    return cast(Tensor, norm(split_heads(x, heads)))


def _mask_by_head(mask: Tensor, batch: int, heads: int, n_keys: int) -> Tensor:
    """A layer's mask, ``[B, 1 or N, T]`` or folded ``[B*heads, 1 or N, T]``, as 4-D."""
    if mask.ndim == 3 and mask.shape[0] == batch * heads and heads > 1:
        mask = unfold_heads(mask, heads)  # [B, heads, 1 or N, T]
    elif mask.ndim == 3 and mask.shape[0] in (1, batch):
        mask = mask.unsqueeze(1)  # [B, 1, 1 or N, T]
    if mask.ndim != 4 or mask.shape[-1] != n_keys:
        raise ValueError(
            f"An attention mask of shape {list(mask.shape)} does not fit {batch} images, {heads} "
            f"heads and {n_keys} keys. Pass [batch, 1 or queries, keys]."
        )
    return mask


class TorchAttnProcessor:
    """Attention in pure torch, open to a controller that reads or edits the probabilities.

    It imports no diffusers and works in any module with ``to_q``, ``to_k``, ``to_v``, ``to_out``
    and ``heads``; the parts that a diffusers ``Attention`` may have besides (``spatial_norm``,
    ``group_norm``, ``norm_cross``, ``norm_q``, ``norm_k``, ``residual_connection``,
    ``rescale_output_factor``) are used where they are set. Its output agrees with diffusers'
    ``AttnProcessor2_0`` up to rounding; like that one it scales by ``1 / sqrt(d)``.

    Args:
        controller: called once per call of the layer as ``controller(probs, is_cross, place)``
            with contiguous ``probs`` ``[B*heads, N, T]``, row ``batch * heads + head``. A tensor
            that it returns is used; if it returns None, ``probs`` is used as it is then, so an
            edit in place counts. None for plain attention.
        place: ``"down"``, ``"mid"`` or ``"up"``, handed to the controller.
    """

    def __init__(self, controller: Controller | None = None, place: str = ""):
        self.controller = controller
        self.place = place
        self.watchers: list[Callable[[Tensor], object]] = []  # shown the probs [B, heads, N, T]

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend; returns the shape of ``hidden_states``."""
        if getattr(attn, "add_k_proj", None) is not None:
            raise TypeError(
                "TorchAttnProcessor computes self- and cross-attention; this layer's is joint (it "
                "has add_k_proj). Leave its own processor in place; capture() can watch it."
            )
        residual = hidden_states
        if getattr(attn, "spatial_norm", None) is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if hidden_states.ndim == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)  # [B, rows*cols, C]
        if getattr(attn, "group_norm", None) is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)

        query, key, value = self._project(attn, hidden_states, encoder_hidden_states)
        mask = attention_mask
        if mask is not None:
            mask = _mask_by_head(mask, len(query), attn.heads, key.shape[-2])
        probs = attention_probs(query, key, mask)  # [B, heads, N, T]
        probs = self._controlled(probs, is_cross=encoder_hidden_states is not None)
        for watcher in self.watchers:
            watcher(probs)
        hidden_states = merge_heads(probs @ value)  # [B, N, heads*d]

        hidden_states = _to_out(attn, hidden_states)
        if residual.ndim == 4:
            hidden_states = hidden_states.transpose(1, 2).reshape(residual.shape)
        if getattr(attn, "residual_connection", False):
            hidden_states = hidden_states + residual
        return hidden_states / getattr(attn, "rescale_output_factor", 1.0)

    def _project(
        self, attn: Any, hidden_states: Tensor, text_states: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if text_states is None:
            text_states = hidden_states
        elif getattr(attn, "norm_cross", None):
            text_states = attn.norm_encoder_hidden_states(text_states)
        norm_q, norm_k = getattr(attn, "norm_q", None), getattr(attn, "norm_k", None)
        query = _heads_of(attn.to_q(hidden_states), attn.heads, norm_q)
        key = _heads_of(attn.to_k(text_states), attn.heads, norm_k)
        return query, key, split_heads(attn.to_v(text_states), attn.heads)

    def _controlled(self, probs: Tensor, is_cross: bool) -> Tensor:
        if self.controller is None:
            return probs
        folded = fold_heads(probs).contiguous()
        edited = self.controller(folded, is_cross, self.place)
        if edited is None:
            edited = folded
        if edited.shape != folded.shape:
            raise ValueError(
                f"The controller {type(self.controller).__name__} was given attention "
                f"{list(folded.shape)} ([batch*heads, queries, keys]) and returned "
                f"{list(edited.shape)}. Return the same shape, or None after an edit in place."
            )
        return edited.to(probs.dtype).view_as(probs)


def _to_out(attn: Any, hidden_states: Tensor) -> Tensor:
    layers = attn.to_out if isinstance(attn.to_out, nn.ModuleList) else [attn.to_out]
    for layer in layers:  # a linear projection and, in diffusers, a dropout
        hidden_states = layer(hidden_states)
    return hidden_states
