"""What is handed to torch's attention, and the probabilities that follow, against float64."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sdattn.attention.plain import logsumexp
from sdattn.hooks.sdpa import SdpaCall, SdpaWatch


@pytest.mark.parametrize("scale", [1, 5, 20])
@torch.no_grad()
def test_probabilities_of_large_scores(scale):
    query, key = torch.randn(2, 1, 2, 300, 40, generator=torch.Generator().manual_seed(0))
    with SdpaWatch() as watch:
        scaled_dot_product_attention(scale * query, key, key)
    [seen] = watch.calls
    assert (seen.logsumexp is None) == (scale >= 5)
    found = seen.attended().every_head(None)
    expected = (scale * query.double() @ key.double().mT / math.sqrt(40)).softmax(-1)
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


@torch.no_grad()
def test_the_logsumexp_of_large_negative_scores_is_as_little_exact():
    """float32 holds no more digits of -50 than of 50."""
    query = 2 + 2 * torch.rand(1, 1, 300, 40, generator=torch.Generator().manual_seed(0))
    key = -query
    with SdpaWatch() as watch:
        scaled_dot_product_attention(query, key, key)
    [seen] = watch.calls
    assert seen.logsumexp is None
    found = seen.attended().every_head(None)
    expected = (query.double() @ key.double().mT / math.sqrt(40)).softmax(-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("told", [True, False])
@torch.no_grad()
def test_the_scale_is_that_of_the_call(told, monkeypatch):
    if not told:
        monkeypatch.setattr("sdattn.hooks.sdpa.backend_with_logsumexp", lambda *_: False)
    query, key = torch.randn(2, 1, 2, 33, 8, generator=torch.Generator().manual_seed(0))
    with SdpaWatch() as watch:
        scaled_dot_product_attention(query, key, key, scale=0.1)
    [seen] = watch.calls
    assert (seen.logsumexp is not None) == told
    found = seen.attended().every_head(None)
    expected = (query.double() @ key.double().mT * 0.1).softmax(-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("slices", [1, 2**10, 2**30])
@pytest.mark.parametrize("mask", ["none", "keys", "keys and queries", "added"])
def test_probabilities_without_a_told_logsumexp(mask, slices, monkeypatch):
    monkeypatch.setattr("sdattn.attention.plain.SLICE", slices)
    monkeypatch.setattr("sdattn.hooks.attended.PART", slices)  # a head at a time, or all
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
    attended = SdpaCall(query, key, given).attended(slice(4, 11), slice(0, 4))
    for columns in (None, [3, 1]):
        found = attended.of((2, 0)).every_head(columns)
        wanted = expected if columns is None else expected[..., columns]
        torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=0)


def test_the_logsumexp_in_slices(monkeypatch):
    monkeypatch.setattr("sdattn.attention.plain.SLICE", 100)
    query, key = torch.randn(2, 1, 2, 33, 8, generator=torch.Generator().manual_seed(0))
    expected = (0.5 * query.double() @ key.double().mT).logsumexp(-1)
    torch.testing.assert_close(logsumexp(query, key, None, 0.5).double(), expected)
