"""The core math of attention: heads, masks, probabilities and the query grid; torch only."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import InvalidTypeError, InvalidValueError

HALF_TYPES = (torch.float16, torch.bfloat16)


def rounding_error(*dtypes: torch.dtype) -> float:
    """Return the error, relative to the largest value, that rounding in these dtypes explains."""
    return 2e-2 if any(dtype in HALF_TYPES for dtype in dtypes) else 1e-3


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Separate the heads that share the last axis: ``[B, N, heads*d]`` to ``[B, heads, N, d]``.

    Raises:
        ValueError: ``x`` is not 3-D, or its width is not a multiple of ``heads``.
    """
    if x.ndim != 3:
        raise InvalidValueError(
            f"split_heads takes [batch, sequence, width], found {list(x.shape)}."
        )
    width = x.shape[-1]
    if heads < 1 or width % heads:
        raise InvalidValueError(
            f"A width of {width} does not divide into {heads} heads. "
            "Pass the number of heads of the layer that made this tensor."
        )
    return x.view(*x.shape[:2], heads, width // heads).transpose(1, 2)  # [B, heads, N, d]


def heads_of(x: Tensor, heads: int, norm: Any) -> Tensor:
    """Split ``[B, N, heads*d]`` to ``[B, heads, N, d]``, normed by head or, if wide, across."""
    if norm is None:
        return split_heads(x, heads)
    # diffusers' RMSNorm calls its width dim
    width = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
    if isinstance(width, tuple) and width[-1] == x.shape[-1]:
        return split_heads(norm(x), heads)
    return cast(Tensor, norm(split_heads(x, heads)))


def merge_heads(x: Tensor) -> Tensor:
    """Invert :func:`split_heads`: ``[B, heads, N, d]`` to ``[B, N, heads*d]``.

    Raises:
        ValueError: ``x`` is not 4-D (unfold folded heads first).
    """
    if x.ndim != 4:
        raise InvalidValueError(
            f"merge_heads takes [batch, heads, sequence, d], found {list(x.shape)}. "
            "For [batch*heads, sequence, d] call unfold_heads first."
        )
    return x.transpose(1, 2).flatten(2)  # [B, N, heads*d]


def fold_heads(x: Tensor) -> Tensor:
    """Fold ``[B, heads, N, d]`` to ``[B*heads, N, d]``: row ``b*heads + h`` is head ``h`` of b."""
    if x.ndim != 4:
        raise InvalidValueError(
            f"fold_heads takes [batch, heads, sequence, d], found {list(x.shape)}."
        )
    return x.flatten(0, 1)


def unfold_heads(x: Tensor, heads: int) -> Tensor:
    """Invert :func:`fold_heads`: ``[B*heads, N, d]`` to ``[B, heads, N, d]``.

    Raises:
        ValueError: the first axis is not a multiple of ``heads``.
    """
    if x.ndim != 3 or heads < 1 or x.shape[0] % heads:
        raise InvalidValueError(
            f"unfold_heads takes [batch*heads, sequence, d] and {heads} heads, found "
            f"{list(x.shape)}."
        )
    return x.unflatten(0, (-1, heads))


def causal_mask(n_queries: int, n_keys: int, device: torch.device | None = None) -> Tensor:
    """Return bool ``[n_queries, n_keys]``: query ``i`` attends to keys ``0..i`` (True)."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril()


def padding_mask(keep: Tensor) -> Tensor:
    """Convert a tokenizer's mask ``[B, T]`` (1 token, 0 padding) to bool ``[B, 1, T]``; add one
    more axis (``[:, None]``) if the queries have a head axis."""
    if keep.ndim != 2:
        raise InvalidValueError(f"padding_mask takes [batch, tokens], found {list(keep.shape)}.")
    return keep.bool().unsqueeze(1)


def attention_probs(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the attention probabilities ``softmax(scale * query @ key.T + mask)``.

    Args:
        query: ``[..., N, d]``.
        key: ``[..., T, d]``.
        mask: broadcastable to ``[..., N, T]``. Boolean: True takes part. Floating: added to the
            scores, ``-inf`` excludes a key.
        is_causal: query ``i`` sees keys ``0..i`` only; may be combined with ``mask``.
        scale: factor of the scores (default: ``1 / sqrt(d)``).

    Returns:
        ``[..., N, T]`` in the dtype of ``query``, in [0, 1]; half types are computed in float32,
        under autocast too.
        Every row sums to 1; a row that may attend to nothing is all zeros (never NaN).

    Raises:
        ValueError: widths differ, or the mask does not broadcast.
        TypeError: an integer mask (0/1 could mean either kind).
    """
    if query.shape[-1] != key.shape[-1]:
        raise InvalidValueError(
            f"query is {query.shape[-1]} wide and key is {key.shape[-1]} wide; the two must agree. "
            f"Found query {list(query.shape)}, key {list(key.shape)}."
        )
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):  # torch's compiler knows this one
            return attention_probs(query, key.to(query.dtype), mask, is_causal, scale)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    dtype = query.dtype
    if dtype in HALF_TYPES:
        query = query.float()
        key = key.float()
    if query.ndim == 3 == key.ndim and len(query) == len(key):
        nothing = query.new_empty(())
        scores = torch.baddbmm(nothing, query, key.mT, beta=0, alpha=scale)  # one operation
    else:  # the keys are scaled, not the scores: T*d products instead of N*T
        scores = query @ (key * scale).transpose(-1, -2)  # [..., N, T]
    if is_causal:
        allowed = causal_mask(scores.shape[-2], scores.shape[-1], scores.device)
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is None:
        return scores.softmax(-1).to(dtype)
    return _masked_softmax(_apply_mask(scores, mask)).to(dtype)


def _apply_mask(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InvalidTypeError(
            f"The mask has dtype {mask.dtype}. Pass a boolean mask (True takes part; see "
            "padding_mask) or a floating one that is added to the scores."
        )
    try:
        fits = torch.broadcast_shapes(mask.shape, scores.shape) == scores.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InvalidValueError(
            f"A mask of shape {list(mask.shape)} does not broadcast to the scores "
            f"{list(scores.shape)} ([..., queries, keys])."
        )
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask.to(scores.dtype)


def _masked_softmax(scores: Tensor) -> Tensor:
    # A row of -inf gives 0/0. It is filled before and after the softmax, so that its gradient is
    # zero too, not NaN.
    shut = scores.amax(-1, keepdim=True) == -math.inf
    return scores.masked_fill(shut, 0.0).softmax(-1).masked_fill(shut, 0.0)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and weights of attention: ``softmax(query key^T / sqrt(d)) value``.

    Args:
        query: ``[..., N, d]``.
        key: ``[..., T, d]``.
        value: ``[..., T, d_v]``.
        mask, is_causal, scale: as in :func:`attention_probs`.
        dropout_p: share of the weights set to zero, the rest scaled by ``1 / (1 - dropout_p)``.
            It is applied whenever it is not 0: pass 0 in evaluation.

    Returns:
        ``(output [..., N, d_v], weights [..., N, T])``, always with ``output = weights @ value``:
        the weights are after dropout.

    Raises:
        ValueError: shapes disagree, or ``dropout_p`` is outside [0, 1].
    """
    if key.shape[-2] != value.shape[-2]:
        raise InvalidValueError(
            f"{key.shape[-2]} keys and {value.shape[-2]} values; every key needs its value. "
            f"Found key {list(key.shape)}, value {list(value.shape)}."
        )
    weights = attention_probs(query, key, mask, is_causal, scale)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    return weights @ value, weights


def level_grids(latent_size: tuple[int, ...], n_levels: int = 4) -> list[tuple[int, ...]]:
    """Return (rows, cols) at each level of a UNet, which halves its latent, rounding up; a video's
    number of frames stays the same.

    >>> level_grids((9, 17), 3)
    [(9, 17), (5, 9), (3, 5)]
    """
    grids = [latent_size]
    for _ in range(n_levels - 1):
        *frames, rows, cols = grids[-1]
        grids.append((*frames, (rows + 1) // 2, (cols + 1) // 2))
    return grids


def query_grid(n_queries: int, latent_size: tuple[int, ...], n_levels: int = 4) -> tuple[int, ...]:
    """Recover the (rows, cols) of a flattened query axis.

    The number of queries identifies the level of :func:`level_grids`.

    Args:
        n_queries: length of the query axis in one attention call.
        latent_size: (rows, cols) in latent cells, not pixels, or (frames, rows, cols) for a video.
        n_levels: resolutions in the UNet, ``len(config.block_out_channels)``.

    Returns:
        (rows, cols), row-major: query ``i`` is at ``divmod(i, cols)``. For a video (frames, rows,
        cols), frame by frame.

    Raises:
        ValueError: no level has that many queries.

    >>> query_grid(384, (64, 96))
    (16, 24)
    """
    grids = level_grids(latent_size, n_levels)
    for grid in grids:
        if math.prod(grid) == n_queries:
            return grid
    known = ", ".join(f"{grid_text(grid)}={math.prod(grid)}" for grid in grids)
    raise InvalidValueError(
        f"{n_queries} queries fit no level of a {grid_text(latent_size)} latent ({known}). "
        "Pass the latent size of this run: image height and width divided by the VAE scale factor."
    )


def grid_text(grid: Sequence[int]) -> str:
    """Return a grid as messages name it.

    >>> grid_text((21, 30, 52))
    '21x30x52'
    """
    return "x".join(map(str, grid))
