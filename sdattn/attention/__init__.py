"""Attention in pure torch: heads, masks, probabilities, a module, processors for diffusers' layers.

    query [B, N, h*d]  --split_heads-->  [B, h, N, d]  --fold_heads-->  [B*h, N, d]
    attention_probs(query, key)        -> weights [..., N, T]
    scaled_dot_product_attention(...)  -> output [..., N, d_v], weights [..., N, T]
    MultiHeadAttention(64, heads=4)    -> a module, self or cross: output and weights
    TorchAttnProcessor(controller)     -> the same for layers of diffusers, open to a controller
    TorchJointProcessor(controller)    -> for joint attention, text and image in one softmax
    add_attention(total, query, key)   total [B, N, T] += weights, summed over heads

Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1 and section 3.2.2.
"""

from .core import (
    HALF_TYPES,
    attention_probs,
    causal_mask,
    fold_heads,
    level_grids,
    merge_heads,
    padding_mask,
    query_grid,
    scaled_dot_product_attention,
    split_heads,
    unfold_heads,
)
from .joint_processor import TorchJointProcessor
from .module import MultiHeadAttention
from .processor import TorchAttnProcessor
from .recording import add_attention

__all__ = [
    "HALF_TYPES",
    "MultiHeadAttention",
    "TorchAttnProcessor",
    "TorchJointProcessor",
    "add_attention",
    "attention_probs",
    "causal_mask",
    "fold_heads",
    "level_grids",
    "merge_heads",
    "padding_mask",
    "query_grid",
    "scaled_dot_product_attention",
    "split_heads",
    "unfold_heads",
]
