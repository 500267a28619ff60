from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidValueError
from .calls import AttentionCall
from .core import causal_mask
from .processor import TorchAttnProcessor


class MultiHeadAttention(nn.Module):
    """``concat_h(softmax(q_h k_h^T / sqrt(d)) v_h) W``, with the softmax returned too.

        attend = MultiHeadAttention(64, heads=4, cross_attention_dim=32)
        output, weights = attend(cells, text)  # [B, N, 64], [B, 4, N, T]

    Its parts have the names of diffusers' ``Attention`` (``to_q``, ``to_k``, ``to_v``, ``to_out``,
    ``heads``, ``processor``), so processors, controllers and :func:`sdattn.capture` work with it
    and with any model made of such modules. Everything is pure torch and differentiable.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2 and equation 1.

    Args:
        query_dim: width C of the input and of the output.
        heads: number of heads h.
        dim_head: width d of a head (default: ``query_dim / heads``).
        cross_attention_dim: width of the states for keys and values; None for self-attention.
        bias: whether the projections to query, key and value have one.
        out_bias: whether the output projection has one.
        attention_dropout: share of the weights set to zero in training.
        dropout: share of the output set to zero in training, before a residual connection of yours.

    Raises:
        ValueError: ``query_dim`` does not divide into ``heads`` and ``dim_head`` is not given; a
            dropout outside [0, 1].
    """

    # Attributes that a processor of diffusers asks its layer for, which this one does not use.
    spatial_norm = group_norm = norm_cross = norm_q = norm_k = None
    residual_connection = False
    rescale_output_factor = 1.0

    def __init__(
        self,
        query_dim: int,
        heads: int = 8,
        dim_head: int | None = None,
        *,
        cross_attention_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = True,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
    ):
        super().__init__()
        if dim_head is None and (heads < 1 or query_dim % heads):
            raise InvalidValueError(
                f"A width of {query_dim} does not divide into {heads} heads. Choose another "
                "number of heads, or pass dim_head, the width of each."
            )
        if not (0 <= attention_dropout <= 1 and 0 <= dropout <= 1):
            raise InvalidValueError(
                f"attention_dropout={attention_dropout}, dropout={dropout}: pass shares from 0 to "
                "1."
            )
        inner = heads * (query_dim // heads if dim_head is None else dim_head)
        states = query_dim if cross_attention_dim is None else cross_attention_dim
        self.heads = heads
        self.is_cross_attention = cross_attention_dim is not None
        self.attention_dropout = attention_dropout
        self.to_q = nn.Linear(query_dim, inner, bias=bias)
        self.to_k = nn.Linear(states, inner, bias=bias)
        self.to_v = nn.Linear(states, inner, bias=bias)
        self.to_out = nn.ModuleList([nn.Linear(inner, query_dim, out_bias), nn.Dropout(dropout)])
        self.processor: Any = TorchAttnProcessor()
        self.watchers: list[
            Callable[[AttentionCall], object]
        ] = []  # as those of a ControlledProcessor

    def set_processor(self, processor: Any) -> None:
        if isinstance(self.processor, nn.Module) and not isinstance(processor, nn.Module):
            del self.processor  # a module may not be overwritten by a plain object
        self.processor = processor

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: ``[B, N, query_dim]``.
            encoder_hidden_states: ``[B, T, cross_attention_dim]``; None for self-attention, where T
                is N.
            attention_mask: ``[B, heads, N, T]``, ``[B, N, T]`` or ``[N, T]``, with size 1 to
                broadcast an axis; a tokenizer's mask ``[B, T]`` as ``padding_mask(mask)``. Boolean:
                True takes part. Integer: 0 is masked, all else takes part. Floating: added to the
                scores.
            is_causal: query i sees keys 0 to i only, in addition to the mask.

        Returns:
            ``(output [B, N, query_dim], weights [B, heads, N, T])``: the weights that made the
            output, after dropout and a controller's edit. A query that may attend to nothing has
            zeros. They are None if the processor shows none.

        Raises:
            ValueError: states for a module of self-attention, or none for one of cross-attention;
                a mask that does not fit.
        """
        if self.is_cross_attention != (encoder_hidden_states is not None):
            kind, found = ("cross", "none") if self.is_cross_attention else ("self", "some")
            raise InvalidValueError(
                f"This module was made for {kind}-attention (cross_attention_dim is "
                f"{'set' if self.is_cross_attention else 'None'}) and was given {found} of "
                "encoder_hidden_states. Make it with cross_attention_dim, the width of the states "
                "that it attends to, or leave both out."
            )
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        mask = _mask(attention_mask, hidden_states.shape[1], keys.shape[1], is_causal, keys.device)
        shown: list[AttentionCall] = []
        # Like diffusers' processors, this one returns only the output; its call comes here.
        self.watchers.append(shown.append)
        try:
            output = self.processor(self, hidden_states, encoder_hidden_states, mask)
        finally:
            self.watchers.remove(shown.append)
        return output, shown[0].probs if shown else None

    def prepare_attention_mask(
        self, attention_mask: Tensor, _target_length: int, batch_size: int, **_: object
    ) -> Tensor:
        """Return the mask as diffusers' processors ask for it, ``[B, heads, N or 1, T]``."""
        return attention_mask.expand(batch_size, self.heads, -1, -1)


def _mask(
    mask: Tensor | None, queries: int, keys: int, is_causal: bool, device: torch.device
) -> Tensor | None:
    """Combine the mask and the causal one: ``[B or 1, heads or 1, N or 1, T]``, bool or float."""
    if mask is not None:
        mask = mask if mask.is_floating_point() else mask != 0
        if not 2 <= mask.ndim <= 4 or mask.shape[-1] != keys:
            raise InvalidValueError(
                f"An attention mask of shape {list(mask.shape)} does not fit {queries} queries and "
                f"{keys} keys. Pass [batch, heads, queries, keys], [batch, queries, keys] or "
                "[queries, keys], with size 1 to broadcast an axis."
            )
        if mask.ndim == 2:
            mask = mask[None]
        if mask.ndim == 3:
            mask = mask[:, None]
    if not is_causal:
        return mask
    seen = causal_mask(queries, keys, device)[None, None]
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
