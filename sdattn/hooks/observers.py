"""`ObservingProcessor`: let another processor make the output, and hand on what it attended to.

A processor is called by its attention layer as
``processor(attn, hidden_states, encoder_hidden_states, attention_mask, temb)`` with
``hidden_states`` ``[B, N, C]`` (or ``[B, C, rows, cols]``), the text states ``[B, T, C_text]`` or
None for self-attention, and gives back the shape of ``hidden_states``.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..attention import TorchAttnProcessor, attention_probs, merge_heads, split_heads
from ..attention.processor import heads_of, mask_by_head
from ..models.denoiser_call import innermost
from .attended import Attended, OfHeads, Rows, chosen_columns, given_probs
from .sdpa import SdpaWatch, told
from .witness import UseWatch, is_plain, misfit, used_in

Observer = Callable[[Attended], None]
QUERY_KEY = ("to_q", "to_k", "to_kv", "to_qkv")  # projections; the last two are fused ones
LARGE = 1 << 20  # numbers in the hidden states; in smaller layers a watch costs more than it spares


class ObservingProcessor:
    """Let ``inner`` make the output; hand the probabilities it used to ``observe``.

    The output is the very tensor that ``inner`` returned. A :class:`TorchAttnProcessor` shows its
    probabilities itself, as a controller left them. Those of diffusers' plain processors follow
    from their query and key, which are read by forward hooks on the layer's own projections
    (``to_q`` and ``to_k``, or the fused ``to_kv`` and ``to_qkv``) while ``inner`` runs, so they
    include LoRA and whatever else acts on the projections. In large layers on the CPU, where the
    kernel that makes the output tells the logsumexp as well, that takes the place of a softmax
    here. Any other processor is watched by :class:`sdattn.hooks.witness.UseWatch`: shown is what it
    multiplied its values with, whatever it did to it before.

    Where ``inner`` has weights (IP-Adapter) it is a module as well: they move with the model. Calls
    of other threads than the one that made it go to ``inner`` unobserved.

    Attributes:
        misfit: of a processor that is not plain, the largest :func:`sdattn.hooks.witness.misfit`
            of its calls, a tensor on their device; above 1 where what was shown did not make the
            output.

    Raises (when called):
        RuntimeError: what ``inner`` used is unknown: it called none of these projections, or made
            something else of its values than any attention that was seen.
    """

    is_observer = True

    def __new__(cls, inner: Any, *_: Any) -> "ObservingProcessor":
        kind: Any = cls
        return super().__new__(_uncompiled(kind, isinstance(inner, nn.Module)))

    def __init__(self, inner: Any, observe: Observer):
        if isinstance(self, nn.Module):
            nn.Module.__init__(self)
        self.inner = inner
        self.observe = observe
        self.thread = get_ident()
        self.listeners: list[Callable[[list[Any]], object]] = []
        self.misfit: Tensor | None = None

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
        if get_ident() != self.thread:
            return cast(Tensor, self.inner(attn, *args, **kwargs))
        return self._observed(attn, *args, **kwargs)

    def _observed(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        inner = innermost(self)
        if isinstance(inner, TorchAttnProcessor):
            return self._shown(inner, attn, *args, **kwargs)
        if is_plain(attn, inner):
            return self._followed(attn, *args, **kwargs)
        return self._witnessed(attn, *args, **kwargs)

    def _shown(self, inner: TorchAttnProcessor, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        shown: list[Tensor] = []

        def watcher(probs: Tensor) -> None:
            if get_ident() == self.thread:
                shown.append(probs)

        inner.watchers.append(watcher)
        try:
            output = self.inner(attn, *args, **kwargs)
        finally:
            inner.watchers.remove(watcher)
        if len(shown) != 1:
            raise RuntimeError(
                f"The processor {type(inner).__name__} showed its probabilities {len(shown)} times "
                "in one call, so what it attended to cannot be known. Leave __call__ to "
                "TorchAttnProcessor and edit by a controller, or leave this layer out (layers=…)."
            )
        self.observe(given_probs(shown[0]))  # [B, heads, N, T]
        return cast(Tensor, output)

    def _followed(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        """What a plain processor attended to, which follows from its query and key."""
        given = by_name(args, kwargs)
        images = _ImageKeys(innermost(self), given.get("encoder_hidden_states"))
        calls: list[Any] = []
        hidden = given["hidden_states"]
        watch = hidden.device.type == "cpu" and hidden.numel() >= LARGE
        call_inner = partial(self._watched, calls, SdpaWatch) if watch else self.inner
        with self._projected(attn, *QUERY_KEY, images=images) as seen:
            output: Tensor = call_inner(attn, *args, **kwargs)
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

    def _witnessed(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        """What any other processor attended to: what made its output of the values. Of a kernel
        that is not seen, the softmax of the query and key, where that makes the same of them."""
        events: list[Any] = []
        arrived: list[Tensor] = []
        with self._projected(attn, *QUERY_KEY, "to_v", arrived=arrived) as seen:
            output = self._watched(events, UseWatch, attn, *args, **kwargs)
        used = used_in(events, arrived[-1], attn.heads) if arrived else None
        if used is None:
            mask = by_name(args, kwargs).get("attention_mask")
            used = _softmax_of(attn, seen, mask, self.inner)
        self._check(*used[1:], *arrived)
        self.observe(used[0])
        return output

    def _check(self, predicted: Tensor, *arrived: Tensor) -> None:
        """Refuse what did not make the output: at the first call at once; later ones are noted, so
        that the device need not wait."""
        fits = len(arrived) == 1 and arrived[0].shape == predicted.shape
        found = misfit(predicted, arrived[0]) if fits else torch.tensor(torch.inf)
        first = self.misfit is None
        self.misfit = found if self.misfit is None else self.misfit.fmax(found)
        if not fits or (first and found.device.type != "meta" and found > 1):
            raise RuntimeError(unknown_use(innermost(self)))

    @contextmanager
    def _projected(
        self,
        attn: Any,
        *names: str,
        images: "_ImageKeys | None" = None,
        arrived: list[Tensor] | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """What the layer's projections give in this thread, by name; ``arrived`` takes what its
        output projection gets."""
        seen: dict[str, Tensor] = {}

        def keep(name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
            if get_ident() == self.thread:
                seen.setdefault(name, output)

        def arrive(_module: nn.Module, args: Any) -> None:
            if get_ident() == self.thread and arrived is not None:
                arrived.append(args[0])

        hooks = [
            module.register_forward_hook(partial(keep, name))
            for name in names
            if (module := getattr(attn, name, None)) is not None
        ]
        hooks += [] if images is None else images.hooks(self.thread)
        if arrived is not None and (last := _output_projection(attn)) is not None:
            hooks.append(last.register_forward_pre_hook(arrive))
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _watched(
        self, calls: list[Any], kind: type[SdpaWatch], attn: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The output of ``inner``; ``calls`` takes what was handed to torch's attention, which the
        innermost of nested observers sees."""
        first = one = self
        while isinstance(one.inner, ObservingProcessor):
            one = one.inner
            first = one if one.thread == self.thread else first
        first.listeners.append(calls.extend)
        try:
            if first is not self:
                return cast(Tensor, self.inner(attn, *args, **kwargs))
            with kind() as watch:
                output: Tensor = self.inner(attn, *args, **kwargs)
            for listener in self.listeners:
                listener(watch.calls)
            return output
        finally:
            first.listeners.remove(calls.extend)

    # diffusers sets these on whatever it finds in the layer, and processors read their own.
    @property
    def _attention_backend(self) -> Any:
        return innermost(self)._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        innermost(self)._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return innermost(self)._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        innermost(self)._parallel_config = config


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

    def hooks(self, thread: int) -> list[Any]:
        def keep(keys: list[Tensor], _module: nn.Module, _args: Any, output: Tensor) -> None:
            if get_ident() == thread:
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
            return chosen_columns(torch.cat(parts, dim=-1), columns)

        return of_heads


def _output_projection(attn: Any) -> nn.Module | None:
    to_out = getattr(attn, "to_out", None)
    return to_out[0] if isinstance(to_out, nn.ModuleList) else to_out


def unknown_use(inner: Any) -> str:
    """What to say of a processor that made its output of no attention that was seen."""
    return (
        f"What reached the layer's to_out from the processor {type(inner).__name__} is not what "
        "any attention that could be seen makes of its values, so what it attended to cannot be "
        "known. Multiply the values by the probabilities with torch.bmm, or call torch's "
        "scaled_dot_product_attention, and change nothing behind that; or edit by a controller, "
        "sdattn.TorchAttnProcessor(controller); or leave this layer out (layers=…)."
    )


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


def _softmax_of(
    attn: Any, seen: dict[str, Tensor], mask: Tensor | None, inner: Any
) -> tuple[Attended, Tensor]:
    """The softmax of the query and key, and what it makes of the values, ``[B, N, heads*d]``.

    A head at a time, since a kernel that is not seen may be there to hold no ``[N, T]``.
    """
    query, key = _query_and_key(seen, inner)
    joined = seen.get("to_kv", seen.get("to_qkv"))
    value = seen.get("to_v") if joined is None else joined[..., -key.shape[-1] :]
    if value is None:
        raise RuntimeError(unknown_use(inner))
    of_rows = partial(observed_probs, attn, query, key, mask)
    with torch.no_grad():
        values = split_heads(value, attn.heads).float()
        probs_of = of_rows(slice(None))
        heads = [slice(head, head + 1) for head in range(attn.heads)]
        made = torch.cat([probs_of(head, None) @ values[:, head] for head in heads], dim=1)
    shape = len(query), attn.heads, query.shape[1], key.shape[1]
    return Attended(*shape, of_rows), merge_heads(made).to(value.dtype)


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
        mask = mask_by_head(mask, len(query), attn.heads, key.shape[1])
        mask = mask if len(mask) == 1 else mask[rows]
    query = heads_of(query[rows], attn.heads, getattr(attn, "norm_q", None))
    key = heads_of(key[rows], attn.heads, getattr(attn, "norm_k", None))

    def of_heads(heads: slice, columns: Sequence[int] | None) -> Tensor:
        of_mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        probs = attention_probs(query[:, heads].float(), key[:, heads].float(), of_mask)
        return chosen_columns(probs, columns)

    return of_heads
