"""The logsumexp of the kernel that makes the output: taken where the output is the same."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sdattn.attention.calls import AttentionCall
from sdattn.look import kernel_logsumexp
from sdattn.look.attended import softmax_of
from sdattn.look.kernel_logsumexp import (
    CUDNN,
    EFFICIENT,
    EXACT,
    FLASH,
    attend_with_logsumexp,
    backend_with_logsumexp,
    logsumexp_error,
    used_if_equal,
)
from sdattn.look.sdpa import SdpaWatch

QUERY, KEY, VALUE = torch.randn(3, 2, 3, 50, 8, generator=torch.Generator().manual_seed(0))
ROW = torch.tensor([3])
EXPECTED = (QUERY.double() @ KEY.double().mT / math.sqrt(8)).logsumexp(-1)


def attend():
    return scaled_dot_product_attention(QUERY, KEY, VALUE)


class Kernel:
    """The CPU's flash kernel, whose results a ``fault`` may change, and how often it ran."""

    __name__ = "flash"

    def __init__(self, fault=lambda *results: results):
        self.fault, self.ran = fault, 0

    def __call__(self, call):
        self.ran += 1
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return self.fault(*flash(*call.inputs, 0.0, False))


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setattr(kernel_logsumexp, "CHECKED", checked := {})
    return checked


@torch.no_grad()
def test_what_the_kernel_tells_is_taken_where_its_output_is_the_same(checked):
    kernel = Kernel()
    for calls in (2, 3):
        output, logsumexp = used_if_equal(kernel, attend, AttentionCall(QUERY, KEY, VALUE))
        assert torch.equal(output, attend())
        torch.testing.assert_close(logsumexp.double(), EXPECTED, atol=1e-5, rtol=0)
        assert kernel.ran == calls  # compared once
    [(case, why)] = checked.items()
    assert case.startswith("flash on cpu: float32, [2, 3, 50, 8] by [1200, 400, 8, 1], ")
    assert not why


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda output, logsumexp: (output * (1 + 1e-6), logsumexp), "its output"),
        (lambda output, logsumexp: (output, logsumexp + 0.01), "its logsumexp is off by 2"),
        (lambda output, logsumexp: (output, logsumexp.roll(1, -1)), "its logsumexp is off by"),
        (
            lambda output, logsumexp: (output, logsumexp.index_fill(-1, ROW, math.nan)),
            "its logsumexp is off by nan",
        ),
        (lambda output, _: (output, None), "it gave no logsumexp"),
        (lambda *_: 1 / 0, "it failed (ZeroDivisionError"),
    ],
)
@torch.no_grad()
def test_else_the_output_is_plain_attentions(fault, why, checked):
    kernel = Kernel(fault)
    for _ in range(2):
        output, logsumexp = used_if_equal(kernel, attend, AttentionCall(QUERY, KEY, VALUE))
        assert torch.equal(output, attend())
        assert logsumexp is None
    [found] = checked.values()
    assert found.startswith(why)
    assert kernel.ran == 1


@torch.no_grad()
def test_each_layout_is_compared_by_itself(checked):
    turned = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (QUERY, KEY, VALUE)]
    halves = [part.bfloat16() for part in (QUERY, KEY, VALUE)]
    first = [part[:1] for part in (QUERY, KEY, VALUE)]
    kernel, other = Kernel(), Kernel()
    other.__name__ = "another kernel"
    for parts in ((QUERY, KEY, VALUE), turned, first, halves):
        call = AttentionCall(*parts)
        used_if_equal(kernel, lambda call=call: kernel(call)[0], call)
    used_if_equal(kernel, attend, AttentionCall(QUERY, KEY, VALUE, scale=0.5))
    used_if_equal(other, attend, AttentionCall(QUERY, KEY, VALUE))
    assert len(checked) == 6


@pytest.mark.parametrize("row", [0, 63, 64, 127, 128, 199])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_error_of_a_logsumexp_is_that_of_its_first_and_last_rows(row, scale):
    query, key = torch.randn(2, 2, 3, 200, 8, generator=torch.Generator().manual_seed(0))
    call = AttentionCall(query, key, key, scale=scale)
    scores = query.double() @ key.double().mT * (scale or 1 / math.sqrt(8))
    found = scores.logsumexp(-1)
    assert logsumexp_error(found, call) < 1e-9
    found[1, 2, row] += 0.01  # twice what is allowed
    error = logsumexp_error(found, call)
    assert error == (pytest.approx(2, rel=0.01) if row < 64 or row >= 136 else pytest.approx(0))


def test_a_large_logsumexp_may_be_off_by_the_digits_of_float32():
    query, key = 300 * torch.randn(2, 1, 2, 70, 8, generator=torch.Generator().manual_seed(0))
    expected = (query.double() @ key.double().mT / math.sqrt(8)).logsumexp(-1)
    call = AttentionCall(query, key, key)
    assert expected.max() > 1e5
    assert logsumexp_error(expected.float(), call) < 1 < logsumexp_error(expected * 1.00001, call)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_graph_through_any_of_the_three_and_autocast_are_left_alone(which):
    """The kernel's logsumexp has no gradient, and under autocast it would not run."""
    given = [QUERY, KEY, VALUE]
    assert backend_with_logsumexp(AttentionCall(*given)) == FLASH
    given[which] = given[which].clone().requires_grad_()
    assert backend_with_logsumexp(AttentionCall(*given)) == 0
    with torch.no_grad():
        assert backend_with_logsumexp(AttentionCall(*given)) == FLASH
        with torch.autocast("cpu", torch.bfloat16):
            assert backend_with_logsumexp(AttentionCall(*given)) == 0


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
    found = softmax_of(watch.calls[-1], keys=slice(0, 20)).add_to(None, None)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", [77, 700])
@torch.no_grad()
def test_on_cuda_the_sums_agree_with_float64(keys, dtype):
    query = torch.randn(2, 300, 8 * 40, device="cuda", dtype=dtype)
    key = torch.randn(2, keys, 8 * 40, device="cuda", dtype=dtype)
    query, key = (part.unflatten(-1, (8, 40)).transpose(1, 2) for part in (query, key))
    found = softmax_of(AttentionCall(query, key)).add_to(None, None)
    wanted = (query.double() @ key.double().mT / math.sqrt(40)).softmax(-1).sum(1)
    torch.testing.assert_close(found.double(), wanted, atol=8e-5, rtol=0)


@pytest.mark.parametrize("sharpness", [1, 40])
def test_a_logsumexp_that_float32_holds_too_coarsely_is_not_taken(sharpness):
    call = AttentionCall(sharpness * QUERY, KEY, VALUE)
    exact = (call.query.double() @ KEY.double().mT / math.sqrt(8)).logsumexp(-1)
    output, logsumexp = attend_with_logsumexp(None, FLASH, call)
    expected = scaled_dot_product_attention(call.query, KEY, VALUE)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    if sharpness == 1:
        torch.testing.assert_close(logsumexp.double(), exact, atol=1e-5, rtol=0)
    else:
        assert exact.abs().max() > EXACT
        assert logsumexp is None
