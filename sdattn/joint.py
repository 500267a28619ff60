"""Joint attention observed: the text columns of a softmax over text and picture, without the
``[N, N]`` matrix.

A row of the softmax is ``exp(scores - logsumexp)``, where the logsumexp of a row is one number. So
with the logsumexp at hand, the text columns need the scores of the text keys only. On the CPU the
kernel that makes the model's output tells the logsumexp as well; elsewhere it is computed in slices
of queries.

Source: Dao et al. 2022, "FlashAttention", algorithm 1, for the logsumexp; Esser et al. 2024,
"Scaling Rectified Flow Transformers", for joint attention.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .processors import Attended, Observer, ObservingProcessor, OfHeads, Rows

FLASH = 1  # of SDPBackend, what torch._fused_sdp_choice answers
SLICE = 1 << 24  # scores in one slice of queries, where the kernel tells no logsumexp

# (queries of the picture, keys of the text) once the layer has run, None where it is not kept
Spans = Callable[[], tuple[slice, slice] | None]


class JointObserver(ObservingProcessor):
    """Let ``inner`` make the output of a joint attention; hand on what the picture's queries pay
    to the text.

    What ``inner`` attended to is seen where it calls torch's ``scaled_dot_product_attention``:
    normed, rotated and joined. The output is that of the very kernel that torch would choose.

    Args:
        inner: the processor that is watched.
        observe: as of :class:`ObservingProcessor`; the probabilities are float32 ``[images, heads,
            queries of the picture, keys of the text]``, the text's part of the joint softmax, so
            a row sums to less than 1.
        spans: where the picture's queries and the text's keys are.

    Raises (when called):
        RuntimeError: ``inner`` did not call ``scaled_dot_product_attention`` just once for text and
            picture together.
    """

    def __init__(self, inner: Any, observe: Observer, spans: Spans):
        super().__init__(inner, observe)
        self.spans = spans
        self.listeners: list[Callable[[_Seen], object]] = []  # told what the innermost one saw

    def _observed(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        innermost = self
        while isinstance(innermost.inner, JointObserver):
            innermost = innermost.inner
        heard: list[_Seen] = []
        innermost.listeners.append(heard.append)
        try:
            call = self._watched if innermost is self else self.inner
            output = call(attn, *args, **kwargs)
        finally:
            innermost.listeners.remove(heard.append)
        [seen] = heard
        if spans := self.spans():
            self.observe(seen.attended(*spans))
        return cast(Tensor, output)

    def _watched(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        states = [kwargs.get("hidden_states", args[0] if args else None)]
        states.append(kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None))
        length = sum(one.shape[1] for one in states if one is not None)
        with _SdpaWatch(length) as watch:
            output = self.inner(attn, *args, **kwargs)
        if len(watch.fitting) != 1:
            raise RuntimeError(
                f"The processor {type(self.inner).__name__} called torch's "
                f"scaled_dot_product_attention {len(watch.fitting)} times for all of its {length} "
                f"tokens of text and picture together (in all {watch.lengths or 'never'}), so what "
                "it attended to cannot be known. Choose that backend before capture, "
                "model.set_attention_backend('native'), or leave this layer out (layers=...)."
            )
        for listener in self.listeners:
            listener(watch.fitting[0])
        return cast(Tensor, output)


class _Seen:
    """One call of ``scaled_dot_product_attention``: query ``[B, heads, N, d]``, key, and what its
    kernel told of the logsumexp, ``[B, heads, N]`` or None."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        scale: float | None,
        logsumexp: Tensor | None,
    ):
        self.query, self.key, self.mask, self.logsumexp = query, key, mask, logsumexp
        self.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale

    def attended(self, picture: slice, text: slice) -> Attended:
        """The text columns of the picture's rows."""
        cells, keys = (one.stop - one.start for one in (picture, text))
        batch, heads = self.query.shape[:2]
        of_rows = partial(self._of_rows, picture, text)
        return Attended(batch, heads, cells, keys, of_rows)

    def _of_rows(self, picture: slice, text: slice, rows: Rows) -> OfHeads:
        mask = None if self.mask is None else self._mask(rows, picture)

        def of_heads(heads: slice, columns: Sequence[int] | None) -> Tensor:
            query = self.query[:, heads, picture][rows].float()
            keys = self.key[:, heads][rows]
            of_mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
            if self.logsumexp is not None:
                logsumexp = self.logsumexp[:, heads, picture, None][rows]
            else:
                logsumexp = _logsumexp(query, keys.float() * self.scale, of_mask)
            scores = query @ (_chosen(keys, text, columns).float() * self.scale).mT
            if of_mask is not None:
                scores += _chosen(of_mask.mT, text, columns).mT
            return scores.sub_(logsumexp).exp_()

        return of_heads

    def _mask(self, rows: Rows, picture: slice) -> Tensor:
        """The mask as an addend, ``[images or 1, heads or 1, N or 1, keys]``."""
        mask = cast(Tensor, self.mask)
        mask = mask[(None,) * (4 - mask.ndim)]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)
        mask = mask if len(mask) == 1 else mask[rows]
        return (mask if mask.shape[2] == 1 else mask[:, :, picture]).float()


def _chosen(keys: Tensor, text: slice, columns: Sequence[int] | None) -> Tensor:
    """Of ``[..., keys, width]`` those of the text, or some columns of it."""
    return keys[..., text, :] if columns is None else keys[..., text, :][..., list(columns), :]


def _logsumexp(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Of each query's scores over all keys, ``[images, heads, N, 1]``, a slice at a time.

    Where a gradient is wanted, the scores of a slice are computed again for it, not kept.
    """
    images, heads, n, _ = query.shape
    step = max(1, SLICE // (images * heads * key.shape[-2]))

    def of_slice(part: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        scores = part @ key.mT
        return (scores if mask is None else scores + mask).logsumexp(-1, keepdim=True)

    parts = []
    for start in range(0, n, step):
        rows = slice(start, start + step)
        of_rows = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        given = query[:, :, rows], key, of_rows
        graph = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        parts.append(
            checkpoint(of_slice, *given, use_reentrant=False) if graph else of_slice(*given)
        )
    return torch.cat(parts, dim=2)


class _SdpaWatch(TorchFunctionMode):
    """See the calls of ``scaled_dot_product_attention`` in a block of code, in this thread only.

    Those from ``length`` tokens to themselves are the joint attention; others (the image prompts of
    an IP-Adapter) are let pass.
    """

    def __init__(self, length: int):
        super().__init__()
        self.length = length
        self.fitting: list[_Seen] = []
        self.lengths: list[str] = []  # of all calls, queries x keys

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(partial(func, *args, **kwargs), *args, **kwargs)

    def _attend(
        self,
        attend: Callable[[], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.lengths.append(f"{query.shape[-2]}x{key.shape[-2]}")
        if not query.shape[-2] == key.shape[-2] == self.length:
            return attend()
        if dropout_p or is_causal or enable_gqa:
            raise RuntimeError(
                "A joint attention with dropout, a causal mask or grouped queries is not known. "
                "Leave this layer out (layers=...)."
            )
        logsumexp = None
        if _kernel_tells(query, key, value, attn_mask, scale):
            output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, False, scale=scale
            )
        else:
            output = attend()
        self.fitting.append(_Seen(query, key, attn_mask, scale, logsumexp))
        return output


def _kernel_tells(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> bool:
    """Whether torch would run the CPU's flash kernel, whose logsumexp is then free.

    With a mask it would too, but not without preparing it first; with a graph the logsumexp has
    no gradient.
    """
    if query.device.type != "cpu" or mask is not None:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return False
    return torch._fused_sdp_choice(query, key, value, scale=scale) == FLASH
