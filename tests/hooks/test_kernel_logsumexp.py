"""The logsumexp of the kernel that makes the output: taken where the output is the same."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sdattn.attention.cuda.choice import Choice
from sdattn.hooks import kernel_logsumexp
from sdattn.hooks.kernel_logsumexp import (
    CUDNN,
    EFFICIENT,
    FLASH,
    Operands,
    backend_with_logsumexp,
    used_if_equal,
)
from sdattn.hooks.sdpa import SdpaCall, SdpaWatch

QUERY, KEY, VALUE = torch.randn(3, 2, 3, 50, 8, generator=torch.Generator().manual_seed(0))
EXPECTED = (QUERY.double() @ KEY.double().mT / math.sqrt(8)).logsumexp(-1)


def attend():
    return scaled_dot_product_attention(QUERY, KEY, VALUE)


def right(call):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*call[:3], 0.0, False)


def another_output(call):
    output, logsumexp = right(call)
    return output * (1 + 1e-6), logsumexp


def another_logsumexp(call):
    output, logsumexp = right(call)
    return output, logsumexp + 0.01


def other_rows(call):
    output, logsumexp = right(call)
    return output, logsumexp.roll(1, -1)


def without(call):
    return right(call)[0], None


def failing(call):
    raise RuntimeError("no plan")


@pytest.fixture(autouse=True)
def choice(monkeypatch):
    monkeypatch.setattr(kernel_logsumexp, "CHOICE", choice := Choice())
    return choice


@torch.no_grad()
def test_what_the_kernel_tells_is_taken_where_its_output_is_the_same(choice):
    for _ in range(2):
        output, logsumexp = used_if_equal(right, attend, Operands(QUERY, KEY, VALUE, None))
        assert torch.equal(output, attend())
        torch.testing.assert_close(logsumexp.double(), EXPECTED, atol=1e-5, rtol=0)
    assert len(choice.verdicts) == 1


@pytest.mark.parametrize(
    "kernel", [another_output, another_logsumexp, other_rows, without, failing]
)
@torch.no_grad()
def test_else_the_output_is_plain_attentions(kernel, choice):
    for _ in range(2):
        output, logsumexp = used_if_equal(kernel, attend, Operands(QUERY, KEY, VALUE, None))
        assert torch.equal(output, attend())
        assert logsumexp is None
    assert [verdict.agrees for verdict in choice.verdicts.values()] == [False]


@torch.no_grad()
def test_each_layout_is_compared_by_itself(choice):
    turned = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (QUERY, KEY, VALUE)]
    for parts in ((QUERY, KEY, VALUE), turned, (QUERY[:1], KEY[:1], VALUE[:1])):
        used_if_equal(right, lambda parts=parts: right(parts)[0], Operands(*parts, None))
    assert len(choice.verdicts) == 3


def test_a_graph_and_autocast_are_left_alone():
    call = Operands(QUERY.clone().requires_grad_(), KEY, VALUE, None)
    assert not backend_with_logsumexp(call)
    with torch.no_grad():
        assert backend_with_logsumexp(call) == FLASH
        with torch.autocast("cpu", torch.bfloat16):
            assert not backend_with_logsumexp(call)


@pytest.mark.parametrize("among", [None, [3, 0]], ids=str)
@pytest.mark.parametrize("few", [1, 512], ids=["a logsumexp", "a softmax"])
@pytest.mark.parametrize("mask", ["none", "bool", "added"])
def test_sums_over_heads_are_those_of_the_probabilities(mask, few, among, monkeypatch):
    monkeypatch.setattr("sdattn.hooks.sdpa.FEW", few)
    keep = torch.rand(2, 1, 50, 50, generator=torch.Generator().manual_seed(1)) > 0.3
    given = {"none": None, "bool": keep, "added": keep.float()}[mask]
    attended = SdpaCall(QUERY, KEY, given).attended(slice(10, 50), slice(4, 11))
    total = attended.add_to(None, among)
    assert attended.add_to(total, among) is total
    scores = QUERY.double() @ KEY.double().mT / math.sqrt(8)
    if mask == "bool":
        scores = scores.masked_fill(~keep, -math.inf)
    elif mask == "added":
        scores = scores + given
    expected = 2 * scores.softmax(-1).sum(1)[:, 10:, 4:11]
    expected = expected if among is None else expected[..., among]
    torch.testing.assert_close(total.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", [FLASH, EFFICIENT, CUDNN])
@torch.no_grad()
def test_on_cuda_the_output_is_plain_attentions_bit_by_bit(backend, dtype):
    parts = [torch.randn(2, 4, 333, 64, device="cuda", dtype=dtype) for _ in range(3)]
    backends = {FLASH: "FLASH", EFFICIENT: "EFFICIENT", CUDNN: "CUDNN"}
    chosen = getattr(torch.nn.attention.SDPBackend, f"{backends[backend]}_ATTENTION")
    with torch.nn.attention.sdpa_kernel(chosen):
        expected = scaled_dot_product_attention(*parts)
        with SdpaWatch() as watch:
            for _ in range(2):
                assert torch.equal(scaled_dot_product_attention(*parts), expected)
    query, key, _ = (part.double() for part in parts)
    wanted = (query @ key.mT / 8).softmax(-1).sum(1)[..., :20]
    found = watch.calls[-1].attended(keys=slice(0, 20)).add_to(None, None)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", [77, 700])
@torch.no_grad()
def test_on_cuda_the_kernels_agree_with_float64(keys, dtype):
    query = torch.randn(2, 300, 8 * 40, device="cuda", dtype=dtype)
    key = torch.randn(2, keys, 8 * 40, device="cuda", dtype=dtype)
    query, key = (part.unflatten(-1, (8, 40)).transpose(1, 2) for part in (query, key))
    found = SdpaCall(query, key).attended().add_to(None, None)
    wanted = (query.double() @ key.double().mT / math.sqrt(40)).softmax(-1).sum(1)
    torch.testing.assert_close(found.double(), wanted, atol=8e-5, rtol=0)
