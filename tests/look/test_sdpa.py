"""What is handed to torch's attention, and the probabilities that follow, against float64."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sdattn.attention.calls import AttentionCall
from sdattn.look.attended import softmax_of
from sdattn.look.sdpa import SdpaWatch

QUERY, KEY = torch.randn(2, 1, 2, 300, 40, generator=torch.Generator().manual_seed(0))
FAR = 2 + QUERY.abs()
SCORES = {
    "small": (QUERY, KEY),
    "large": (5 * QUERY, KEY),
    "larger": (20 * QUERY, KEY),
    "far below 0": (FAR, -FAR),  # float32 holds no more digits of -50 than of 50
}


@pytest.mark.parametrize("scores", SCORES)
@torch.no_grad()
def test_probabilities_of_large_scores(scores):
    query, key = SCORES[scores]
    with SdpaWatch() as watch:
        scaled_dot_product_attention(query, key, key)
    [seen] = watch.calls
    assert (seen.logsumexp is None) == (scores != "small")
    found = softmax_of(seen).every_head(None)
    expected = (query.double() @ key.double().mT / math.sqrt(40)).softmax(-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_cast_by_autocast_is_left_to_it():
    query, key, value = torch.randn(3, 1, 2, 33, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected = scaled_dot_product_attention(query, key, value)
        with SdpaWatch():
            found = scaled_dot_product_attention(query, key, value)
    assert expected.dtype == torch.bfloat16
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("few", [1, 512], ids=["a logsumexp", "a softmax"])
@pytest.mark.parametrize("slices", [1, 2**10, 2**30])
@pytest.mark.parametrize("mask", ["none", "keys", "keys and queries", "added"])
def test_probabilities_without_a_told_logsumexp(mask, slices, few, monkeypatch):
    monkeypatch.setattr("sdattn.look.attended.FEW_KEYS", few)
    monkeypatch.setattr("sdattn.attention.plain.SLICE", slices)
    monkeypatch.setattr(
        "sdattn.attention.plain.MAX_PROBS_AT_ONCE", slices
    )  # a head at a time, or all
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 2, 11, 8, generator=generator)  # [B, heads, N, d]
    keep = torch.rand(3, 1, 1 if mask == "keys" else 11, 11, generator=generator) > 0.3
    keep[..., 0] = True
    given = {"none": None, "added": torch.randn(11, 11, generator=generator)}.get(mask, keep)
    scores = query.double() @ key.double().mT / math.sqrt(8)
    if given is not None:
        hidden = given.dtype == torch.bool
        scores = scores.masked_fill(~given, -math.inf) if hidden else scores + given.double()
    expected = scores.softmax(-1)[[2, 0]][:, :, 4:, :4]
    call = AttentionCall(query, key, mask=given).of_rows((2, 0))
    for columns in (None, [3, 1]):
        rows = softmax_of(call, slice(4, 11), slice(0, 4))
        wanted = expected if columns is None else expected[..., columns]
        found = rows.every_head(columns)
        torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=0)
        total = rows.add_to(None, columns)
        assert rows.add_to(total, columns) is total
        torch.testing.assert_close(total.double(), 2 * wanted.sum(1), atol=2e-6, rtol=0)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def heads(*shape, keys=5, of_keys=None):
    """A query of 6 cells, a key and a value, with these axes before the last two."""
    of_keys = shape if of_keys is None else of_keys
    return normal(*shape, 6, 8), normal(*of_keys, keys, 8), 2 * normal(*of_keys, keys, 8)


CALLS = {
    "two axes": (heads(), {}),
    "three axes": (heads(4), {}),
    "four axes": (heads(2, 2), {}),
    "five axes": (heads(2, 1, 2), {}),
    "keys for all rows": (heads(2, 2, of_keys=(1, 2)), {}),
    "keys for all": (heads(2, 2, of_keys=()), {}),
    "queries for all rows": (heads(1, 2, of_keys=(2, 2)), {}),
    "no rows": (heads(0, 2), {}),
    "no heads": (heads(2, 0), {}),
    "no keys": (heads(2, 2, keys=0), {}),
    "no cells": ((normal(2, 2, 0, 8), *heads(2, 2)[1:]), {}),
    "no width": (tuple(part[..., :0] for part in heads(2, 2)), {}),
    "other values": ((*heads(2, 2)[:2], normal(2, 2, 5, 12)), {}),
    "grouped": (heads(2, 4, of_keys=(2, 2)), {"enable_gqa": True}),
    "grouped, three axes": (heads(4, of_keys=(2,)), {"enable_gqa": True}),
    "one head of keys": (heads(2, 4, of_keys=(2, 1)), {"enable_gqa": True}),
    "causal": (heads(2, 2), {"is_causal": True}),
    "causal, three axes": (heads(4), {"is_causal": True, "scale": 0.7}),
    "a mask of keys": (heads(2, 2), {"attn_mask": (torch.arange(5) > 1)[None]}),
    "a mask of two axes": (heads(2, 2), {"attn_mask": normal(6, 5)}),
    "a mask of three": (heads(2, 2), {"attn_mask": normal(2, 6, 5), "scale": 0.2}),
    "a mask of folded heads": (heads(4), {"attn_mask": normal(4, 1, 5)}),
    "a mask of folded rows": (heads(4), {"attn_mask": normal(1, 6, 5)}),
    "scale": (heads(4), {"scale": 0.3}),
    "scale, four axes": (heads(2, 2), {"scale": 0.1}),
    "float64": (tuple(part.double() for part in heads(4)), {}),
}


def written_out(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The probabilities and the output in float64, with torch's own broadcasting."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(times, -3) for part in (key, value))
    scores = query.double() @ key.double().mT * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:]).tril() > 0
    if attn_mask is not None:
        added = (
            torch.zeros(()).masked_fill(~attn_mask, -math.inf)
            if attn_mask.dtype == torch.bool
            else attn_mask
        )
        scores = scores + added
    return scores.softmax(-1), scores.softmax(-1) @ value.double()


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_whatever_torch_takes_runs_as_it_would(name):
    given, options = CALLS[name]
    expected = scaled_dot_product_attention(*given, **options)
    with SdpaWatch() as watch:
        found = scaled_dot_product_attention(*given, **options)
    assert torch.equal(found, expected)
    [seen] = watch.calls
    assert seen.output is found


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("no ")])
@torch.no_grad()
def test_what_it_attended_to_is_known_by_row_and_head(name):
    given, options = CALLS[name]
    with SdpaWatch() as watch:
        scaled_dot_product_attention(*given, **options)
    probs, output = written_out(*given, **options)
    probs = probs.expand(*output.shape[:-1], -1)
    count = output.shape[:-2].numel()
    batch = 2 if count > 1 else 1
    call = watch.calls[0].by_head(batch, count // batch)
    wanted = probs.reshape(batch, -1, *probs.shape[-2:])
    for rows in ((0,), tuple(range(batch))):
        found = softmax_of(call.of_rows(rows)).every_head(None).double()
        torch.testing.assert_close(found, wanted[list(rows)], atol=1e-6, rtol=0)
    summed = softmax_of(call).add_to(None, None).double()
    torch.testing.assert_close(summed, wanted.sum(1), atol=1e-6, rtol=0)
    output = output.reshape(batch, -1, *output.shape[-2:])
    torch.testing.assert_close(call.output.double(), output, atol=1e-5, rtol=0)
    assert watch.calls[0].by_head(count + 1, 1) is None


@pytest.mark.parametrize("shape", [(), (4,), (2, 1, 2)])
def test_the_kernel_of_four_axes_is_given_no_others(shape, monkeypatch):
    """Whatever torch says that it would choose: since 2.14 it says so of three axes."""
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 1)
    with SdpaWatch() as watch:
        found = scaled_dot_product_attention(*heads(*shape))
    assert torch.equal(found, scaled_dot_product_attention(*heads(*shape)))
    assert watch.calls[0].logsumexp is None


def test_what_torch_refuses_it_refuses_as_without():
    query, key, value = heads(2, 2)
    for given, options in (
        ((query, key), {}),
        ((query, key, value), {"tensor_layout": "HND"}),
        ((query, key[..., :4], value), {}),
        ((query, key, value), {"attn_mask": torch.ones(6, 5, dtype=torch.int64)}),
    ):
        with pytest.raises((TypeError, RuntimeError)) as plain:
            scaled_dot_product_attention(*given, **options)
        with SdpaWatch(), pytest.raises(plain.type):
            scaled_dot_product_attention(*given, **options)


@torch.no_grad()
def test_dropout_is_random_and_so_not_known():
    with SdpaWatch() as watch:
        torch.manual_seed(0)
        found = scaled_dot_product_attention(*heads(2, 2), dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(found, scaled_dot_product_attention(*heads(2, 2), dropout_p=0.5))
    assert watch.calls[0].by_head(2, 2) is None
