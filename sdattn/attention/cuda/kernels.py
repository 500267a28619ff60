"""Triton's kernels behind :mod:`sdattn.attention.recording`; nothing loads them where there is no
CUDA.

A program has a block of queries, goes through the heads in turn and keeps their sum in registers,
so nothing of ``[heads, N, T]`` is written. Scores are sums in float32 of exact products: no TF32.

Sources: Tillet et al. 2019, "Triton"; Milakov and Gimelshein 2018, "Online normalizer calculation
for softmax", for the logsumexp.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads an annotation of a kernel as its own: only constexpr is one.

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _scores(
    query,
    key,
    mask,
    rows,
    keys,
    n_queries,
    in_keys,
    query_n,
    query_d,
    key_t,
    key_d,
    mask_n,
    mask_t,
    scale,
    masked: tl.constexpr,
    widened: tl.constexpr,
    width,
    chunk: tl.constexpr,
):
    """Of some queries and keys of one head, ``[rows, keys]``; -inf outside of them."""
    in_rows = rows < n_queries
    scores = tl.zeros((rows.shape[0], keys.shape[0]), tl.float32)
    for start in range(0, width, chunk):
        part = start + tl.arange(0, chunk)
        q = tl.load(
            query + rows[:, None] * query_n + part[None, :] * query_d,
            mask=in_rows[:, None] & (part[None, :] < width),
            other=0.0,
        )
        k = tl.load(
            key + part[:, None] * key_d + keys[None, :] * key_t,
            mask=(part[:, None] < width) & in_keys[None, :],
            other=0.0,
        )
        if widened:
            q, k = q.to(tl.float32), k.to(tl.float32)
        scores = tl.dot(q, k, scores, input_precision="ieee")
    scores *= scale
    if masked:
        scores += tl.load(
            mask + rows[:, None].to(tl.int64) * mask_n + keys[None, :] * mask_t,
            mask=in_rows[:, None] & in_keys[None, :],
            other=0.0,
        ).to(tl.float32)
    return tl.where(in_keys[None, :], scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def softmax_sums(
    total,
    query,
    key,
    mask,
    columns,
    scale,
    heads,
    n_queries,
    n_keys,
    total_b,
    total_n,
    total_t,
    query_b,
    query_h,
    query_n,
    query_d,
    key_b,
    key_h,
    key_t,
    key_d,
    mask_b,
    mask_h,
    mask_n,
    mask_t,
    masked: tl.constexpr,
    chosen: tl.constexpr,
    widened: tl.constexpr,
    width,
    chunk: tl.constexpr,
    block_n: tl.constexpr,
    block_t: tl.constexpr,
):
    """Add the softmax of a block of queries over all keys, summed over heads, to ``total``."""
    image = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * block_n + tl.arange(0, block_n)
    keys = tl.arange(0, block_t)
    sums = tl.zeros((block_n, block_t), tl.float32)
    for head in range(heads):
        scores = _scores(
            query + image * query_b + head * query_h,
            key + image * key_b + head * key_h,
            mask + image * mask_b + head * mask_h,
            rows,
            keys,
            n_queries,
            keys < n_keys,
            query_n,
            query_d,
            key_t,
            key_d,
            mask_n,
            mask_t,
            scale,
            masked,
            widened,
            width,
            chunk,
        )
        most = tl.max(scores, 1)
        most = tl.where(most == float("-inf"), 0.0, most)  # where all keys are shut out
        exps = tl.exp(scores - most[:, None])
        row_sums = tl.sum(exps, 1)
        sums += exps / tl.where(row_sums == 0.0, 1.0, row_sums)[:, None]
    at = keys
    kept = keys < n_keys
    if chosen:
        at = tl.load(columns + keys, mask=kept, other=-1)
        kept = kept & (at >= 0)
    pointers = total + image * total_b + rows[:, None] * total_n + at[None, :] * total_t
    inside = (rows < n_queries)[:, None] & kept[None, :]
    tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def share_sums(
    total,
    query,
    key,
    mask,
    columns,
    logsumexp,
    scale,
    heads,
    n_queries,
    n_keys,
    total_b,
    total_n,
    total_t,
    query_b,
    query_h,
    query_n,
    query_d,
    key_b,
    key_h,
    key_t,
    key_d,
    mask_b,
    mask_h,
    mask_n,
    mask_t,
    lse_b,
    lse_h,
    lse_n,
    masked: tl.constexpr,
    chosen: tl.constexpr,
    widened: tl.constexpr,
    width,
    chunk: tl.constexpr,
    block_n: tl.constexpr,
    block_t: tl.constexpr,
):
    """Add ``exp(scores - logsumexp)`` of a block of queries and of keys, summed over heads."""
    image = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * block_n + tl.arange(0, block_n)
    slots = tl.program_id(1) * block_t + tl.arange(0, block_t)
    kept = slots < n_keys
    keys = slots
    if chosen:
        keys = tl.load(columns + slots, mask=kept, other=0)
    sums = tl.zeros((block_n, block_t), tl.float32)
    for head in range(heads):
        scores = _scores(
            query + image * query_b + head * query_h,
            key + image * key_b + head * key_h,
            mask + image * mask_b + head * mask_h,
            rows,
            keys,
            n_queries,
            kept,
            query_n,
            query_d,
            key_t,
            key_d,
            mask_n,
            mask_t,
            scale,
            masked,
            widened,
            width,
            chunk,
        )
        of_rows = tl.load(
            logsumexp + image * lse_b + head * lse_h + rows * lse_n,
            mask=rows < n_queries,
            other=0.0,
        )
        of_rows = tl.where(of_rows == float("-inf"), 0.0, of_rows)  # where all keys are shut out
        sums += tl.exp(scores - of_rows[:, None])
    pointers = total + image * total_b + rows[:, None] * total_n + slots[None, :] * total_t
    inside = (rows < n_queries)[:, None] & kept[None, :]
    tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def row_logsumexp(
    out,
    query,
    key,
    mask,
    scale,
    n_queries,
    n_keys,
    out_b,
    out_h,
    query_b,
    query_h,
    query_n,
    query_d,
    key_b,
    key_h,
    key_t,
    key_d,
    mask_b,
    mask_h,
    mask_n,
    mask_t,
    masked: tl.constexpr,
    widened: tl.constexpr,
    width,
    chunk: tl.constexpr,
    block_n: tl.constexpr,
    block_t: tl.constexpr,
):
    """The logsumexp of a block of queries of one head over all keys, a block of them at a time."""
    image = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.program_id(0) * block_n + tl.arange(0, block_n)
    most = tl.full((block_n,), float("-inf"), tl.float32)
    sums = tl.zeros((block_n,), tl.float32)
    for start in range(0, n_keys, block_t):
        keys = start + tl.arange(0, block_t)
        scores = _scores(
            query + image * query_b + head * query_h,
            key + image * key_b + head * key_h,
            mask + image * mask_b + head * mask_h,
            rows,
            keys,
            n_queries,
            keys < n_keys,
            query_n,
            query_d,
            key_t,
            key_d,
            mask_n,
            mask_t,
            scale,
            masked,
            widened,
            width,
            chunk,
        )
        # The largest score so far; what was summed up under a smaller one is scaled down to it.
        more = tl.maximum(most, tl.max(scores, 1))
        finite = tl.where(more == float("-inf"), 0.0, more)
        sums = sums * tl.exp(most - finite) + tl.sum(tl.exp(scores - finite[:, None]), 1)
        most = more
    pointers = out + image * out_b + head * out_h + rows
    tl.store(pointers, tl.where(sums == 0.0, most, most + tl.log(sums)), mask=rows < n_queries)
