"""Which of two ways is taken on CUDA: a kernel once it was found to agree. The logic needs no GPU,
so that torch's own operations stand for the kernels here, right and wrong ones."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from sdattn.attention import plain
from sdattn.attention.cuda import dispatch as gpu
from sdattn.attention.cuda.choice import Case, Choice, KernelWarning

B, HEADS, N, T = 2, 3, 200, 7
GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(B, HEADS, N, 8, generator=GENERATOR)
KEY = torch.randn(B, HEADS, T, 8, generator=GENERATOR)
MASK = torch.randn(B, 1, N, T, generator=GENERATOR)
SCALE = 0.3
SCORES = SCALE * QUERY.double() @ KEY.double().mT + MASK
CASE = Case("a kernel", "a device", "a shape")


class Kernels(SimpleNamespace):
    """Three kernels, and how often each ran."""

    def __init__(self, **others):
        ways = {name: getattr(plain, name) for name in ("add_softmax", "add_share", "logsumexp")}
        self.ran = []
        super().__init__(**{name: self.counted(name, way) for name, way in (ways | others).items()})

    def counted(self, name, way):
        def run(*args):
            self.ran.append(name)
            return way(*args)

        return run


@pytest.fixture
def use(monkeypatch):
    monkeypatch.setattr(gpu, "CHOICE", Choice())

    def use(kernels):
        monkeypatch.setattr(gpu, "_kernels", lambda: kernels)
        return kernels

    return use


def softmax_sums(query=QUERY, key=KEY, mask=MASK, columns=None):
    total = torch.ones(B, N, T if columns is None else len(columns))
    gpu.add_softmax(total, query, key, mask, SCALE, columns)
    return total - 1


def share_sums(columns=None):
    total = torch.ones(B, N, T if columns is None else len(columns))
    of_rows = SCORES.logsumexp(-1).float()
    gpu.add_share(total, QUERY, KEY, MASK, SCALE, of_rows, columns)
    return total - 1


EXPECTED = SCORES.softmax(-1).sum(1).float()


@pytest.mark.parametrize("columns", [None, [4, 1]], ids=str)
@pytest.mark.parametrize(("name", "sums"), [("softmax", softmax_sums), ("share", share_sums)])
def test_a_kernel_that_agrees_is_compared_once_and_used(name, sums, columns, use):
    kernels = use(Kernels())
    expected = EXPECTED[..., columns or slice(None)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for calls in (2, 3, 4):
            torch.testing.assert_close(sums(columns=columns), expected, atol=1e-6, rtol=0)
            assert kernels.ran == [f"add_{name}"] * calls
    [line] = gpu.kernels_in_use()
    assert line.startswith(f"record_{name} on cpu for dtype float32, head size 8, keys up to 8")
    assert line.endswith("mask float32: kernel")


def off_by_little(total, *given):
    plain.add_softmax(total, *given)
    total[-1, -1, -1] += 4e-5 * HEADS


def off_at_first(total, *given):
    plain.add_softmax(total, *given)
    total[0, 0, 0] += 4e-5 * HEADS


def not_a_number(total, *given):
    total.fill_(torch.nan)


def failing(*_):
    raise RuntimeError("out of resources")


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (off_by_little, "off by"),
        (off_at_first, "off by"),
        (not_a_number, "off by nan"),
        (failing, "RuntimeError: out of resources"),
    ],
)
def test_a_kernel_that_differs_is_warned_of_once_and_not_used(kernel, why, use):
    kernels = use(Kernels(add_softmax=kernel))
    with pytest.warns(KernelWarning, match=why) as caught:
        for _ in range(3):
            torch.testing.assert_close(softmax_sums(), EXPECTED, atol=1e-6, rtol=0)
    assert (len(caught), len(kernels.ran)) == (1, 1)
    [line] = gpu.kernels_in_use()
    assert ": torch (" in line


def test_cases_are_compared_by_themselves(use):
    kernels = use(Kernels())
    for given in (
        {},
        {"query": QUERY.half(), "key": KEY.half()},
        {"mask": None},
        {"mask": MASK.half()},
        {"columns": [1, 0]},
        {"columns": [0]},
        {"query": QUERY[..., :4], "key": KEY[..., :4]},
    ):
        before = len(kernels.ran)
        softmax_sums(**given)
        softmax_sums(**given)
        assert len(kernels.ran) == before + 3
    assert len(gpu.kernels_in_use()) == 7


def test_what_the_kernel_cannot_do_is_left_to_torch(use):
    kernels = use(Kernels())
    found = softmax_sums(columns=[2, 2])
    torch.testing.assert_close(found, EXPECTED[..., [2, 2]], atol=1e-6, rtol=0)
    many = torch.randn(B, HEADS, gpu.MOST_KEYS + 1, 8, generator=GENERATOR)
    total = torch.zeros(B, N, gpu.MOST_KEYS + 1)
    gpu.add_softmax(total, QUERY, many, None, SCALE)
    torch.testing.assert_close(total.sum(-1), torch.full((B, N), float(HEADS)))
    assert not kernels.ran


def test_half_types_may_differ_by_more(use):
    def rounded(total, *given):
        plain.add_softmax(total, *given)
        total *= 1.001

    use(Kernels(add_softmax=rounded))
    softmax_sums(query=QUERY.half(), key=KEY.half(), mask=None)
    with pytest.warns(KernelWarning):
        softmax_sums(mask=None)
    assert [line.split(": ")[-1][:5] for line in gpu.kernels_in_use()] == ["kerne", "torch"]


def test_the_logsumexp(use, monkeypatch):
    expected = SCORES.logsumexp(-1).float()
    kernels = use(Kernels())
    for calls in (2, 3):
        found = gpu.logsumexp(QUERY, KEY, MASK, SCALE)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert len(kernels.ran) == calls

    def absent():
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(gpu, "CHOICE", Choice())
    monkeypatch.setattr(gpu, "_kernels", absent)
    monkeypatch.setattr(gpu, "COSTLY", 1)
    with pytest.warns(KernelWarning) as caught:
        found = gpu.logsumexp(QUERY, KEY, MASK, SCALE)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert any("GFLOP more in each such layer" in str(one.message) for one in caught)
    assert "not installed" in gpu.kernels_in_use()[0]


def test_a_wrong_logsumexp_is_not_used(use):
    use(Kernels(logsumexp=lambda *given: plain.logsumexp(*given) + 1e-3))
    with pytest.warns(KernelWarning, match="off by"):
        found = gpu.logsumexp(QUERY, KEY, MASK, SCALE)
    torch.testing.assert_close(found, SCORES.logsumexp(-1).float(), atol=1e-5, rtol=0)


def test_rows_that_attend_to_nothing_do_agree(use):
    kernels = use(Kernels())
    mask = torch.full((B, 1, N, T), -torch.inf)
    assert torch.equal(
        gpu.logsumexp(QUERY, KEY, mask, SCALE), torch.full((B, HEADS, N), -torch.inf)
    )
    assert len(kernels.ran) == 2


@pytest.mark.parametrize(("error", "agrees"), [(0.0, True), (1.0, True), (1.1, False)])
def test_a_verdict_holds(error, agrees):
    choice, asked = Choice(), []

    def compare():
        asked.append(1)
        return error

    assert [choice.agrees(CASE, compare, quiet=True) for _ in range(2)] == [agrees] * 2
    assert len(asked) == 1
    assert choice.verdicts[CASE].agrees is agrees
