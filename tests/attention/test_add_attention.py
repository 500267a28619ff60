"""`add_attention`, for hosts that hand over queries and keys."""

import math

import pytest
import torch

from sdattn.attention import add_attention


def explicit(query, key, mask=None):
    """The softmax written out in float64, summed over heads."""
    scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1).sum(1)


@pytest.mark.parametrize("keys", [20, 700], ids=["one softmax", "shares"])
@pytest.mark.parametrize("shown", [slice(None), slice(3, 17)])
def test_it_adds_the_softmax_over_all_keys(keys, shown):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 9, 8, generator=generator)
    key = torch.randn(2, 3, keys, 8, generator=generator)
    mask = torch.rand(2, 1, 1, keys, generator=generator) > 0.2
    total = torch.ones(2, 9, len(range(keys)[shown]))
    add_attention(total, query, key, mask=mask, keys=shown)
    assert (total - 1 - explicit(query, key, mask)[..., shown]).abs().max() < 1e-5


def test_a_mask_of_two_axes_and_a_scale_of_the_layer_s_own():
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 5, 8)
    mask = torch.ones(4, 5, dtype=torch.bool).tril()
    total = torch.zeros(1, 4, 5)
    add_attention(total, query, key, mask=mask, scale=2 / math.sqrt(8))
    assert (total - explicit(2 * query, key, mask)).abs().max() < 1e-5
