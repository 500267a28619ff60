"""The core math against float64 formulas, torch's own attention, and conservation laws."""

import math

import pytest
import torch
from torch.nn import functional

from sdattn import attention


def reference(query, key, value, mask=None, scale=None):
    """Softmax attention in float64, one query at a time; ``mask`` is boolean ``[B, N, T]``."""
    query, key, value = (x.detach().double() for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float64)
    weights = torch.zeros(*query.shape[:-1], key.shape[-2], dtype=torch.float64)
    for b in range(query.shape[0]):
        for i in range(query.shape[1]):
            terms = [
                0.0
                if mask is not None and not mask[b, i, j]
                else math.exp(scale * float(query[b, i] @ key[b, j]))
                for j in range(key.shape[1])
            ]
            if sum(terms):
                weights[b, i] = torch.tensor(terms, dtype=torch.float64) / sum(terms)
            output[b, i] = weights[b, i] @ value[b]
    return output, weights


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, 4), (2, 5, 4), (2, 5, 3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_output_and_weights_follow_the_formula(qkv):
    output, weights = attention.scaled_dot_product_attention(*qkv)
    expected_output, expected_weights = reference(*qkv)
    assert output.shape == (2, 6, 3)
    torch.testing.assert_close(output.double(), expected_output, atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=0)


def test_own_scale_follows_the_formula(qkv):
    _, weights = attention.scaled_dot_product_attention(*qkv, scale=0.3)
    torch.testing.assert_close(weights.double(), reference(*qkv, scale=0.3)[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["boolean", "additive", "causal", "per head"])
def test_masks_agree_with_torch(kind):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3))
    keep = torch.rand(2, 1, 5, 5, generator=generator) > 0.4
    keep[..., 0] = True  # torch's own kernel gives NaN for a row that sees nothing
    per_head = torch.randn(2, 3, 5, 5, generator=generator)
    ours, theirs = {
        "boolean": ({"mask": keep}, {"attn_mask": keep}),
        "additive": ({"mask": per_head[:, :1]}, {"attn_mask": per_head[:, :1]}),
        "per head": ({"mask": per_head}, {"attn_mask": per_head}),
        "causal": ({"is_causal": True}, {"is_causal": True}),
    }[kind]
    output, weights = attention.scaled_dot_product_attention(query, key, value, **ours)
    expected = functional.scaled_dot_product_attention(query, key, value, **theirs)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))


@pytest.mark.parametrize("mask", [None, torch.ones(5, 7, dtype=torch.bool), torch.zeros(5, 7)])
def test_is_causal_counts_beside_a_mask_that_lets_all_through(mask):
    query, key = torch.randn(2, 5, 8).double(), torch.randn(2, 7, 8).double()
    seen = torch.tensor([[column <= row for column in range(7)] for row in range(5)])
    scores = (query @ key.mT / 8**0.5).masked_fill(~seen, -torch.inf)
    found = attention.attention_probs(query, key, mask, is_causal=True)
    torch.testing.assert_close(found, scores.softmax(-1))


def test_a_padding_mask_shuts_padding_out(qkv):
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]])
    mask = attention.padding_mask(keep)
    _, weights = attention.scaled_dot_product_attention(*qkv, mask=mask)
    _, expected = reference(*qkv, mask=mask.expand(2, 6, 5))
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=0)
    assert weights[0, :, 3:].eq(0).all()


@pytest.mark.parametrize("additive", [False, True])
def test_a_row_that_sees_nothing_is_zero_with_zero_gradient(qkv, additive):
    query, key, value = (x.requires_grad_() for x in qkv)
    mask = torch.ones(2, 6, 5, dtype=torch.bool)
    mask[0, 2] = False
    given = torch.zeros(2, 6, 5).masked_fill(~mask, -math.inf) if additive else mask
    output, weights = attention.scaled_dot_product_attention(query, key, value, given)
    assert weights[0, 2].eq(0).all()
    assert output[0, 2].eq(0).all()
    output.sum().backward()
    assert query.grad.isfinite().all()
    assert query.grad[0, 2].eq(0).all()
    torch.testing.assert_close(
        weights.detach().double(), reference(*qkv, mask=mask)[1], atol=1e-6, rtol=0
    )


def test_multihead_attention_agrees_with_torch():
    torch.manual_seed(3)
    layer = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    query, text = torch.randn(2, 7, 12), torch.randn(2, 5, 12)
    expected, expected_weights = layer(query, text, text, average_attn_weights=False)
    w_q, w_k, w_v = layer.in_proj_weight.chunk(3)
    b_q, b_k, b_v = layer.in_proj_bias.chunk(3)
    q = attention.split_heads(query @ w_q.T + b_q, 3)
    k = attention.split_heads(text @ w_k.T + b_k, 3)
    v = attention.split_heads(text @ w_v.T + b_v, 3)
    output, weights = attention.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(layer.out_proj(attention.merge_heads(output)), expected)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_lose_nothing_but_the_last_rounding(dtype):
    # Scores near 30 would be off by up to 0.06 in bfloat16, and the weights by 6 %.
    generator = torch.Generator().manual_seed(0)
    query, key = (8 * torch.randn(1, 7, 8, generator=generator).to(dtype) for _ in range(2))
    weights = attention.attention_probs(query, key)
    _, expected = reference(query, key, key)
    assert weights.dtype == dtype
    tiny = torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(weights.double(), expected, rtol=torch.finfo(dtype).eps, atol=tiny)


def test_dropout_scales_what_it_keeps():
    torch.manual_seed(0)
    query, key = torch.zeros(1, 400, 2), torch.zeros(1, 50, 2)
    value = torch.randn(1, 50, 3)
    output, weights = attention.scaled_dot_product_attention(query, key, value, dropout_p=0.25)
    kept = weights[weights > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 50 / 0.75))
    share = len(kept) / weights.numel()
    assert abs(share - 0.75) < 5 * math.sqrt(0.25 * 0.75 / weights.numel())
    torch.testing.assert_close(output, weights @ value)


def test_heads_go_batch_first_and_come_back():
    x = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    split = attention.split_heads(x, 4)
    assert split.shape == (2, 4, 3, 2)
    folded = attention.fold_heads(split)
    for batch in range(2):
        for head in range(4):
            expected = x[batch, :, 2 * head : 2 * head + 2]
            assert torch.equal(folded[batch * 4 + head], expected)
    assert torch.equal(attention.merge_heads(attention.unfold_heads(folded, 4)), x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention.split_heads(torch.zeros(1, 2, 10), 3), "10 does not divide into 3"),
        (lambda: attention.split_heads(torch.zeros(2, 10), 2), r"found \[2, 10\]"),
        (lambda: attention.merge_heads(torch.zeros(4, 2, 5)), "unfold_heads first"),
        (lambda: attention.fold_heads(torch.zeros(4, 2, 5)), r"found \[4, 2, 5\]"),
        (lambda: attention.unfold_heads(torch.zeros(4, 2, 5), 3), "3 heads"),
        (lambda: attention.attention_probs(torch.zeros(1, 2, 4), torch.zeros(1, 2, 5)), "4 wide"),
        (lambda: attention.padding_mask(torch.zeros(3)), r"found \[3\]"),
        (
            lambda: attention.scaled_dot_product_attention(
                torch.zeros(1, 2, 4), torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)
            ),
            "3 keys and 2 values",
        ),
        (
            lambda: attention.attention_probs(
                torch.zeros(1, 2, 4), torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)
            ),
            r"mask of shape \[1, 2, 4\]",
        ),
    ],
)
def test_shapes_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_integer_mask_is_refused():
    with pytest.raises(TypeError, match="boolean mask"):
        attention.attention_probs(
            torch.zeros(1, 2, 4), torch.zeros(1, 3, 4), torch.ones(1, 2, 3, dtype=torch.int64)
        )


@pytest.mark.parametrize("latent", [(64, 64), (64, 96), (9, 17), (72, 40), (1, 5)])
def test_query_grid_finds_every_level(latent):
    rows, cols = latent
    for level in range(4):
        expected = math.ceil(rows / 2**level), math.ceil(cols / 2**level)
        assert attention.query_grid(expected[0] * expected[1], latent) == expected


def test_query_grid_names_the_levels_it_knows():
    with pytest.raises(ValueError, match=r"385 queries .*64x96=6144, 32x48=1536, 16x24=384"):
        attention.query_grid(385, (64, 96))
