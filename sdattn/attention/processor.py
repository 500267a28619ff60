"""`TorchAttnProcessor`: attention in pure torch, in layers of diffusers or any like them.

A processor is called by its attention layer as
``processor(attn, hidden_states, encoder_hidden_states, attention_mask, temb)`` with
``hidden_states`` ``[B, N, C]`` (or ``[B, C, rows, cols]``), the text states ``[B, T, C_text]`` or
None for self-attention, and gives back the shape of ``hidden_states``.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import InvalidTypeError, InvalidValueError, RunError
from .core import (
    attention_probs,
    fold_heads,
    heads_of,
    merge_heads,
    split_heads,
    unfold_heads,
)

Controller = Callable[[Tensor, bool, str], Tensor | None]


def mask_by_head(mask: Tensor, batch: int, heads: int, n_keys: int) -> Tensor:
    """A layer's mask, ``[B, 1 or N, T]`` or folded ``[B*heads, 1 or N, T]``, as 4-D."""
    if mask.ndim == 3 and mask.shape[0] == batch * heads and heads > 1:
        mask = unfold_heads(mask, heads)  # [B, heads, 1 or N, T]
    elif mask.ndim == 3 and mask.shape[0] in (1, batch):
        mask = mask.unsqueeze(1)  # [B, 1, 1 or N, T]
    if mask.ndim != 4 or mask.shape[-1] != n_keys:
        raise InvalidValueError(
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
        place: ``"down"``, ``"mid"`` or ``"up"``, handed to the controller. An
            :class:`sdattn.AttentionStore` that is attached knows it by the layer, so that one
            processor serves all layers:
            ``unet.set_attn_processor(TorchAttnProcessor(store))``.

    Raises (when called):
        TypeError: the layer's attention is joint.
        RuntimeError: the controller is a store that does not know this layer, and no ``place``
            was given.
        ValueError: the controller returned another shape; a mask that does not fit.
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
            raise InvalidTypeError(
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
            mask = mask_by_head(mask, len(query), attn.heads, key.shape[-2])
        # In this order: the controller edits, dropout thins, watchers see what makes the output.
        probs = attention_probs(query, key, mask)  # [B, heads, N, T]
        probs = self._controlled(attn, probs, is_cross=encoder_hidden_states is not None)
        if attn.training and getattr(attn, "attention_dropout", 0.0):
            probs = nn.functional.dropout(probs, attn.attention_dropout)
        for watcher in (*self.watchers, *getattr(attn, "watchers", ())):
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
        query = heads_of(attn.to_q(hidden_states), attn.heads, norm_q)
        key = heads_of(attn.to_k(text_states), attn.heads, norm_k)
        return query, key, split_heads(attn.to_v(text_states), attn.heads)

    def _controlled(self, attn: Any, probs: Tensor, is_cross: bool) -> Tensor:
        if self.controller is None:
            return probs
        place = self._place(attn, len(probs))
        # The contract of prompt-to-prompt: heads folded into the batch, and an edit in place
        # counts.
        folded = fold_heads(probs).contiguous()
        edited = self.controller(folded, is_cross, place)
        if edited is None:
            edited = folded
        if edited.shape != folded.shape:
            raise InvalidValueError(
                f"The controller {type(self.controller).__name__} was given attention "
                f"{list(folded.shape)} ([batch*heads, queries, keys]) and returned "
                f"{list(edited.shape)}. Return the same shape, or None after an edit in place."
            )
        return edited.to(probs.dtype).view_as(probs)

    def _place(self, attn: Any, batch: int) -> str:
        """The layer's place: the one given, or what a store that knows the layer says."""
        begin_layer = getattr(self.controller, "begin_layer", None)
        if begin_layer is None:
            return self.place
        known = begin_layer(attn, batch)
        if not (self.place or known):
            raise RunError(
                f"The {type(self.controller).__name__} does not know which layers call it, and a "
                f"layer of class {type(attn).__name__} did. {self.controller.HOW}"  # type: ignore[union-attr]
            )
        return self.place or known


def _to_out(attn: Any, hidden_states: Tensor) -> Tensor:
    layers = attn.to_out if isinstance(attn.to_out, nn.ModuleList) else [attn.to_out]
    for layer in layers:  # a linear projection and, in diffusers, a dropout
        hidden_states = layer(hidden_states)
    return hidden_states
