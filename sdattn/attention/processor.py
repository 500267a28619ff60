"""Attention in pure torch, in layers of diffusers or any like them.

Their processors are called as ``processor(attn, hidden_states, encoder_hidden_states,
attention_mask, temb)`` with ``hidden_states`` ``[B, N, C]`` (or ``[B, C, rows, cols]``) and the
text states ``[B, T, C_text]``, or None for self-attention. They return the shape of
``hidden_states``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidTypeError
from .calls import AttentionCall
from .controlled import ControlledProcessor, mask_by_head, projected_out
from .core import (
    attention_probs,
    fold_heads,
    heads_of,
    merge_heads,
    split_heads,
    unfold_heads,
)


class TorchAttnProcessor(ControlledProcessor):
    """Attention in pure torch, open to a controller that reads or edits the probabilities.

    It imports no diffusers and works in any module with ``to_q``, ``to_k``, ``to_v``, ``to_out``
    and ``heads``; it also uses a diffusers ``Attention``'s optional parts (``spatial_norm``,
    ``group_norm``, ``norm_cross``, ``norm_q``, ``norm_k``, ``residual_connection``,
    ``rescale_output_factor``) if they are set. Its output agrees with diffusers'
    ``AttnProcessor2_0`` up to rounding; like that one it scales by ``1 / sqrt(d)``.

    Args:
        controller: called once per call of the layer as ``controller(probs, is_cross, place)``
            with contiguous ``probs`` ``[B*heads, N, T]``, row ``batch * heads + head``. A returned
            tensor is used; if it returns None, ``probs`` is used as it is then, so an edit in place
            counts. None for plain attention.
        place: ``"down"``, ``"mid"`` or ``"up"``, passed to the controller. An attached
            :class:`sdattn.AttentionStore` finds it from the layer, so that one processor serves
            all layers: ``unet.set_attn_processor(TorchAttnProcessor(store))``.

    Raises:
        TypeError: a controller that takes other arguments.

    Raises (when called):
        TypeError: the layer's attention is joint, or to an image as well as to the text.
        ValueError: the controller returned another shape; a mask that does not fit.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Attend; return the shape of ``hidden_states``."""
        if getattr(attn, "add_k_proj", None) is not None:
            raise InvalidTypeError(
                "TorchAttnProcessor computes self- and cross-attention; this layer's is joint, or "
                "to an image as well (it has add_k_proj). TorchJointProcessor computes joint "
                "attention; or leave its own processor in place."
            )
        residual = hidden_states
        if getattr(attn, "spatial_norm", None) is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if hidden_states.ndim == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)  # [B, rows*cols, C]
        if getattr(attn, "group_norm", None) is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)

        query, key, value = self._project(attn, hidden_states, encoder_hidden_states)
        batch, heads = query.shape[:2]
        # In this order: the controller edits, dropout thins, watchers see the final weights. Heads
        # are folded, as a product of matrices and a controller take them: [B*heads, N, T].
        if attention_mask is None:
            probs = attention_probs(fold_heads(query), fold_heads(key))
        else:
            mask = mask_by_head(attention_mask, batch, heads, key.shape[-2])
            probs = fold_heads(attention_probs(query, key, mask))
        probs = self._controlled(attn, probs, batch, is_cross=encoder_hidden_states is not None)
        if attn.training and getattr(attn, "attention_dropout", 0.0):
            probs = nn.functional.dropout(probs, attn.attention_dropout)
        output = unfold_heads(torch.bmm(probs, fold_heads(value)), heads)  # [B, heads, N, d]
        inputs = query, key, value
        self._show(
            attn, lambda: AttentionCall(*inputs, probs=unfold_heads(probs, heads), output=output)
        )
        hidden_states = merge_heads(output)  # [B, N, heads*d]

        hidden_states = projected_out(attn.to_out, hidden_states)
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
        query = heads_of(attn.to_q(hidden_states), attn.heads, getattr(attn, "norm_q", None))
        key = heads_of(attn.to_k(text_states), attn.heads, getattr(attn, "norm_k", None))
        return query, key, split_heads(attn.to_v(text_states), attn.heads)
