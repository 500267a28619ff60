"""Attention summed over heads, on the CPU, against the softmax in float64; and what torch's
compiler makes of the operation."""

import math
import subprocess
import sys

import pytest
import torch

from sdattn.attention import plain
from sdattn.attention.recording import add_share, logsumexp, record_softmax

B, HEADS, N, T, WIDTH = 2, 3, 20, 7, 8
SCALE = 0.3
PLACES = {"all in one": {}, "a head at a time": {"MAX_PROBS_AT_ONCE": 1}}
MASKS = {
    "no mask": None,
    "keys": (1, 1, 1, T),
    "rows": (B, 1, 1, T),
    "heads and queries": (1, HEADS, N, T),
    "all": (B, HEADS, N, T),
}


def inputs(dtype=torch.float32, mask=None, large=1):
    """Query and key as views of [B, N, heads*d], as a layer's projections give them."""
    generator = torch.Generator().manual_seed(0)
    query, key = (
        (large * torch.randn(B, length, HEADS * WIDTH, generator=generator))
        .to(dtype)
        .unflatten(-1, (HEADS, WIDTH))
        .transpose(1, 2)
        for length in (N, T)
    )
    if mask is not None:
        mask = torch.randn(mask, generator=generator).to(dtype)
        mask[..., 1:3] = -math.inf
    scores = SCALE * query.double() @ key.double().mT
    return query, key, mask, scores if mask is None else scores + mask.double()


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    for name, value in PLACES[request.param].items():
        monkeypatch.setattr(plain, name, value)


@pytest.mark.parametrize("columns", [None, [5, 0], [4, 4]], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_softmax_and_a_share_of_it(dtype, mask, columns, place):
    query, key, mask, scores = inputs(dtype, MASKS[mask])
    expected = scores.softmax(-1).sum(1)[..., columns or slice(None)] + 2
    total = torch.full(expected.shape, 2.0)
    record_softmax(total, query, key, mask, SCALE, columns)
    torch.testing.assert_close(total.double(), expected, atol=1e-6, rtol=0)

    of_rows = logsumexp(query, key, mask, SCALE)
    assert of_rows.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(of_rows.double(), scores.logsumexp(-1), atol=1e-6, rtol=0)
    total = torch.full(expected.shape, 2.0)
    add_share(total, query, key, mask, SCALE, of_rows, columns)
    torch.testing.assert_close(total.double(), expected, atol=1e-6, rtol=0)


def test_a_share_is_of_some_of_the_keys(place):
    query, key, mask, scores = inputs(mask=MASKS["all"])
    total = torch.zeros(B, N, 3)
    given = query, key[:, :, 2:5], mask[..., 2:5], SCALE, scores.logsumexp(-1).float()
    add_share(total, *given)
    expected = scores.softmax(-1).sum(1)[..., 2:5]
    torch.testing.assert_close(total.double(), expected, atol=1e-6, rtol=0)


def test_a_row_that_may_attend_to_nothing_adds_nothing(place):
    query, key, mask, scores = inputs(mask=MASKS["heads and queries"])
    mask[0, 1, 4] = scores[:, 1, 4] = -math.inf
    total = torch.zeros(B, N, T)
    record_softmax(total, query, key, mask, SCALE)
    expected = scores.softmax(-1)
    expected[:, 1, 4] = 0
    torch.testing.assert_close(total.double(), expected.sum(1), atol=1e-6, rtol=0)
    total = torch.zeros(B, N, T)
    add_share(total, query, key, mask, SCALE, scores.logsumexp(-1).float())
    torch.testing.assert_close(total.double(), expected.sum(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("part", [1, 1 << 23], ids=["by heads", "at once"])
def test_large_scores_are_as_exact(part, monkeypatch):
    monkeypatch.setattr(plain, "MAX_PROBS_AT_ONCE", part)
    query, key, _, scores = inputs(large=15)
    assert scores.abs().max() > 100
    total = torch.zeros(B, N, T)
    record_softmax(total, query, key, None, SCALE)
    torch.testing.assert_close(total.double(), scores.softmax(-1).sum(1), atol=3e-5, rtol=0)


@pytest.mark.parametrize("columns", [None, [5, 0]], ids=str)
@pytest.mark.slow
def test_torch_finds_the_operation_well_made(columns):
    query, key, mask, _ = inputs(mask=MASKS["rows"])
    total = torch.zeros(B, N, T if columns is None else len(columns))
    given = total, query, key, mask, SCALE, columns
    torch.library.opcheck(torch.ops.sdattn.record_softmax.default, given)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_stays_in_one_graph(backend):
    query, key, mask, scores = inputs(mask=MASKS["rows"])

    def layer(total, query, key):
        record_softmax(total, query * 1, key, mask, SCALE, [5, 0])
        return query + 1

    torch._dynamo.reset()
    total = torch.zeros(B, N, 2)
    output = torch.compile(layer, fullgraph=True, backend=backend)(total, query, key)
    assert torch.equal(output, query + 1)
    expected = scores.softmax(-1).sum(1)[..., [5, 0]]
    torch.testing.assert_close(total.double(), expected, atol=1e-6, rtol=0)


def test_they_run_on_torchs_meta_device():
    query, key, mask, _ = (part.to("meta") for part in inputs(mask=MASKS["rows"]))
    total = torch.zeros(B, N, T, device="meta")
    of_rows = logsumexp(query, key, mask, SCALE)
    assert (of_rows.shape, of_rows.dtype) == ((B, HEADS, N), torch.float32)
    record_softmax(total, query, key, mask, SCALE)
    add_share(total, query, key, mask, SCALE, of_rows)


def test_they_have_no_gradient():
    query, key, _, _ = inputs()
    query = query.detach().requires_grad_()
    total = torch.zeros(B, N, T)
    of_rows = logsumexp(query, key, None, SCALE)
    record_softmax(total, query, key, None, SCALE)
    add_share(total, query, key, None, SCALE, of_rows)
    assert not (total.requires_grad or of_rows.requires_grad)


@pytest.mark.slow
def test_a_call_does_not_wait_for_torchs_compiler():
    code = (
        "import sys, torch; from sdattn.attention.recording import record_softmax; "
        "x = torch.ones(1, 1, 2, 4); record_softmax(torch.zeros(1, 2, 2), x, x, None, 1.0); "
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
