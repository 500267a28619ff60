"""Triton's kernels run by its interpreter, against the formula in float64: the largest error of
each case, as JSON. A program of its own, begun with TRITON_INTERPRET=1, which Triton reads when it
is loaded."""

import json
import math
import sys

import torch

from sdattn.attention.cuda import launching as kernels

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def case(
    dtype="float32", width=40, batch=1, heads=2, n=20, keys=77, mask=None, shut_row=None,
    columns=None, large=1, heads_apart=False,
):  # fmt: skip
    """The largest errors of the three kernels, of sums over heads and of the logsumexp."""
    generator = torch.Generator().manual_seed(0)

    def given(length, gap):
        """[B, heads, length, d], not contiguous, the last of several in one tensor."""
        size = batch, length, heads * width + gap
        joined = large * torch.randn(size, generator=generator).to(DTYPES[dtype])
        return joined[..., gap:].unflatten(-1, (heads, width)).transpose(1, 2)

    query, key = given(n, 0), given(keys, heads * width)
    key = key.contiguous() if heads_apart else key
    scale = 1 / math.sqrt(width)
    scores = query.double() @ key.double().mT * scale
    if mask is not None:
        shape = [size if part else 1 for size, part in zip(scores.shape, mask, strict=True)]
        mask = torch.randn(shape, generator=generator)
        mask[..., 1:4] = -math.inf
        mask[..., shut_row or [], :] = -math.inf
        mask = mask.to(DTYPES[dtype])
        scores += mask.double()
    logsumexp = scores.logsumexp(-1)
    shut = scores.amax(-1, keepdim=True) == -math.inf
    expected = scores.softmax(-1).masked_fill(shut, 0).sum(1) + 1
    expected = expected if columns is None else expected[..., columns]

    def error(add, *more):
        total = torch.ones(expected.shape)
        add(total, query, key, mask, scale, *more, columns)
        return float((total - expected).abs().max())

    found = kernels.logsumexp(query, key, mask, scale)
    off = ((found - logsumexp).abs() / logsumexp.abs().clamp_min(1)).where(found != logsumexp, 0.0)
    errors = {"share": error(kernels.add_share, found), "logsumexp": float(off.max())}
    if columns is None or len(set(columns)) == len(columns):
        errors["softmax"] = error(kernels.add_softmax)
    return errors


CASES = {
    **{f"{dtype}, heads of {width}": {"dtype": dtype, "width": width} for dtype in DTYPES
       for width in (40, 64, 80, 128, 160)},
    "several rows": {"batch": 3},
    "more blocks of queries than one": {"n": 70},
    "more blocks of keys than one": {"keys": 150},
    "few keys": {"keys": 5},
    "chosen columns": {"columns": [70, 3, 0]},
    "chosen columns of several rows": {"columns": [70, 3, 0], "batch": 2, "mask": (1, 1, 1, 1)},
    "a column twice": {"columns": [5, 3, 5]},
    "mask of the keys": {"mask": (0, 0, 0, 1), "batch": 2},
    "mask of the rows": {"mask": (1, 0, 0, 1), "batch": 2},
    "mask of all": {"mask": (1, 1, 1, 1), "batch": 2},
    "mask in half": {"mask": (1, 0, 1, 1), "dtype": "float16"},
    "a row that sees no key": {"mask": (1, 1, 1, 1), "shut_row": [4]},
    "heads of query and key lie differently": {"heads_apart": True, "batch": 2},
    "large scores": {"large": 4},
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps({name: case(**CASES[name]) for name in sys.argv[1:] or CASES}))
