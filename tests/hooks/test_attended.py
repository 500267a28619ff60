"""What a call attended to, in every way of computing it, against the softmax in float64."""

from types import SimpleNamespace

import pytest
import torch

from sdattn.attention import merge_heads
from sdattn.hooks import attended as module
from sdattn.hooks.attended import AmongKeys, Attended, GivenProbs, QueryKey, SideBySide, row_index
from sdattn.hooks.held import Held
from sdattn.hooks.keep import Keep
from sdattn.hooks.sdpa import Seen

B, HEADS, N, T, WIDTH = 3, 2, 6, 5, 8
GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(B, HEADS, N, WIDTH, generator=GENERATOR)
KEY, OTHER = torch.randn(2, B, HEADS, T, WIDTH, generator=GENERATOR)
ATTN = SimpleNamespace(heads=HEADS)
KEPT = torch.tensor([[1, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)


def softmax(key):
    return (QUERY.double() @ key.double().mT / WIDTH**0.5).softmax(-1)


def query_key(key=KEY):
    return QueryKey(ATTN, merge_heads(QUERY), merge_heads(key))


def among():
    probs = softmax(KEY) * KEPT[:, None, None]
    return probs / probs.sum(-1, keepdim=True)


WAYS = {
    "given": (lambda: GivenProbs(softmax(KEY)), lambda: softmax(KEY)),
    "query and key": (query_key, lambda: softmax(KEY)),
    "handed": (lambda: Seen(QUERY, KEY).attended(), lambda: softmax(KEY)),
    "side by side": (
        lambda: SideBySide(query_key(), [3, query_key(OTHER)]),
        lambda: torch.cat([softmax(KEY), torch.zeros(B, HEADS, N, 3), softmax(OTHER)], dim=-1),
    ),
    "among": (lambda: AmongKeys(query_key(), KEPT[:, None, None]), among),
}


@pytest.mark.parametrize("part", [1, 1 << 23], ids=["a head at a time", "all heads"])
@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 2], [2, 0]], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_softmax(way, rows, part, monkeypatch):
    monkeypatch.setattr(module, "PART", part)
    make, expected = WAYS[way][0], WAYS[way][1]()[rows]
    attended = make()
    assert (attended.batch, attended.heads, attended.cells) == (B, HEADS, N)
    assert attended.keys == expected.shape[-1]
    some = attended.of(row_index(torch.tensor(rows)))
    for columns in (None, [3, 0]):
        wanted = expected if columns is None else expected[..., columns]
        for found in (some.every_head(columns), some.probs(slice(None), columns)):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=0)
        sums = list(some.head_sums(columns))
        assert len(sums) == (HEADS if part == 1 else 1)
        torch.testing.assert_close(sum(sums).double(), wanted.sum(1), atol=1e-6, rtol=0)


def test_rows_in_a_row_are_a_view():
    assert row_index(torch.tensor([1, 2])) == slice(1, 3)
    assert isinstance(row_index(torch.tensor([2, 1])), torch.Tensor)


class Kernel(Attended):
    """One that knows the sum over heads and no head."""

    def __init__(self, probs):
        super().__init__(*probs.shape)
        self.whole = probs

    def of(self, rows):
        return Kernel(self.whole[rows])

    def probs(self, heads, columns):
        raise AssertionError("the heads were made")

    def head_sums(self, columns):
        yield self.whole.sum(1).float()[..., slice(None) if columns is None else columns]


def test_a_kernel_need_not_make_the_heads_for_their_mean():
    held = Held("layer", Keep.of(), (2, 3), HEADS)
    for key in (KEY, OTHER):
        held.add(Kernel(softmax(key)).of(slice(1, 3)), [0, 4])
    expected = (softmax(KEY) + softmax(OTHER))[1:, ..., [0, 4]].mean(1) / 2
    torch.testing.assert_close(held.map().double(), expected.unflatten(1, (2, 3)))
