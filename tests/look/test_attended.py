"""What a call attended to, in every way of computing it, against the softmax in float64."""

from types import SimpleNamespace

import pytest
import torch
from helpers.capture_runs import run
from helpers.largest import Largest
from helpers.sums import running_pass, running_sum
from helpers.tiny_pipelines import small_pipeline

from sdattn import capture
from sdattn.attention import merge_heads, plain
from sdattn.attention.calls import AttentionCall, ProjectedCall, row_index
from sdattn.attention.device_copies import DeviceCopies
from sdattn.look.attended import AmongKeys, GivenProbs, Softmax, Turned, softmax_of
from sdattn.look.projections import projected_call
from sdattn.look.view import View

B, HEADS, N, T, WIDTH = 3, 2, 6, 5, 8
GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(B, HEADS, N, WIDTH, generator=GENERATOR)
KEY, OTHER = torch.randn(2, B, HEADS, T, WIDTH, generator=GENERATOR)
ATTN = SimpleNamespace(heads=HEADS)
KEPT = torch.tensor([[1, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)


def softmax(key):
    return (QUERY.double() @ key.double().mT / WIDTH**0.5).softmax(-1)


def query_key(key=KEY):
    return projected_call(ATTN, merge_heads(QUERY), merge_heads(key))


def beside():
    call = query_key()
    call.beside = [3, query_key(OTHER)]
    return call


def among():
    probs = softmax(KEY) * KEPT[:, None, None]
    return probs / probs.sum(-1, keepdim=True)


WAYS = {
    "query and key": (query_key, lambda: softmax(KEY)),
    "projected": (
        lambda: ProjectedCall(merge_heads(QUERY), merge_heads(KEY), HEADS),
        lambda: softmax(KEY),
    ),
    "handed": (lambda: AttentionCall(QUERY, KEY), lambda: softmax(KEY)),
    "made": (lambda: AttentionCall(probs=softmax(KEY)), lambda: softmax(KEY)),
    "with its logsumexp": (
        lambda: AttentionCall(QUERY, KEY, logsumexp=(QUERY @ KEY.mT / WIDTH**0.5).logsumexp(-1)),
        lambda: softmax(KEY),
    ),
    "side by side": (
        beside,
        lambda: torch.cat([softmax(KEY), torch.zeros(B, HEADS, N, 3), softmax(OTHER)], dim=-1),
    ),
    "among": (query_key, among),
}


@pytest.mark.parametrize("part", [1, 1 << 23], ids=["a head at a time", "all heads"])
@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 2], [2, 0]], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_softmax(way, rows, part, monkeypatch):
    monkeypatch.setattr(plain, "MAX_PROBS_AT_ONCE", part)
    make, expected = WAYS[way][0], WAYS[way][1]()[rows]
    call = make()
    assert call.batch == B
    some = View().of(call, row_index(tuple(rows)))
    if way == "among":
        some = AmongKeys(some, DeviceCopies(KEPT[rows][:, None, None]))
    assert (some.batch, some.heads, some.cells) == (len(rows), HEADS, N)
    assert some.keys == expected.shape[-1]
    for columns in (None, [3, 0]):
        wanted = expected if columns is None else expected[..., columns]
        for found in (some.every_head(columns), some.probs(slice(None), columns)):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=0)
        for heads in ([1], [1, 0]):
            found = some.some_heads(heads, columns)
            torch.testing.assert_close(found.double(), wanted[:, heads], atol=1e-6, rtol=0)
        sums = list(some.head_sums(columns))
        assert len(sums) == (HEADS if part == 1 and way != "made" else 1)
        for total in (sum(sums), some.add_to(None, columns)):
            torch.testing.assert_close(total.double(), wanted.sum(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("columns", [[T - 1], [T], [0, T + 3]])
def test_columns_of_the_first_alone_are_summed_without_the_others(columns):
    call, expected = (make() for make in WAYS["side by side"])
    attended = View().of(call)
    if max(columns) < T:
        attended.others[1].probs = lambda *_: pytest.fail("others are not even asked")
    total = attended.add_to(None, columns)
    torch.testing.assert_close(total.double(), expected[..., columns].sum(1), atol=1e-6, rtol=0)


def test_videos_have_their_own_frames():
    probs = torch.rand(6, HEADS, N, T, generator=GENERATOR)  # two videos of three frames
    expected = torch.stack([torch.cat([*probs[:3]], dim=1), torch.cat([*probs[3:]], dim=1)])
    assert GivenProbs(probs).together(3).every_head(None).equal(expected)
    call = AttentionCall(probs=probs, spans=(slice(1, 4), slice(2, 5)), frames=3)
    assert call.batch == 2
    found = View().of(call).every_head(None)
    assert found.equal(expected.unflatten(2, (3, N))[:, :, :, 1:4, 2:5].flatten(2, 3))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("way", ["handed", "made"])
def test_heads_are_chosen_before_they_are_made(way, frames, turned):
    looks = View().of(WAYS[way][0]())
    some = Turned(looks) if turned else looks
    some = some.together(frames) if frames > 1 else some
    wanted = softmax(KEY).mT if turned else softmax(KEY)
    wanted = torch.cat([*wanted], dim=1)[None] if frames > 1 else wanted
    with Largest() as largest:
        found = some.some_heads([1], None)
    torch.testing.assert_close(found.double(), wanted[:, [1]], atol=1e-6, rtol=0)
    assert largest.numel <= max(B * N * T, QUERY.numel())


def test_what_is_made_of_given_probabilities_stays_when_they_change():
    probs = softmax(KEY).float()
    looks = GivenProbs(probs[:, :1])
    made = [looks.every_head(None), looks.some_heads([0], None), *looks.head_sums(None)]
    made += [looks.add_to(None, None), looks.every_head([1, 0])]
    before = [one.clone() for one in made]
    probs.zero_()
    assert all(
        torch.equal(one, other) and one.any() for one, other in zip(made, before, strict=True)
    )


def test_rows_in_a_row_are_a_view():
    assert row_index((1, 2)) == slice(1, 3)
    assert row_index((2, 1)) == (2, 1)


def test_heads_are_not_made_for_their_mean(monkeypatch):
    monkeypatch.setattr(Softmax, "probs", lambda *_: pytest.fail("the heads were made"))
    rows = running_pass(B, rows=(1, 2), size=(2, 3))
    held = running_sum(running=rows, tokens=[0, 4])
    for key in (KEY, OTHER):
        held.take(query_key(key))
    expected = (softmax(KEY) + softmax(OTHER))[1:, ..., [0, 4]].mean(1) / 2
    torch.testing.assert_close(
        held.map().double(), expected.unflatten(1, (2, 3)), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("lists", [[[0, 1, 4]], [[0, 1, 4], [2, 76]]], ids=str)
@pytest.mark.parametrize("tokens", [None, [4, 1, 2]])
def test_the_softmax_over_some_keys_is_what_is_left_over_its_sum(lists, tokens):
    pipe = small_pipeline()
    options = {"num_images_per_prompt": 2, "guidance_scale": 5.0}
    full = {"steps": "all", "heads": "all", "kinds": ("cross", "self")}
    with (
        capture(pipe, **full) as every,
        capture(pipe, **full, among=lists, tokens=tokens) as some,
        capture(pipe, among=lists, tokens=tokens) as mean,
    ):
        run(pipe, **options)
    for name, maps in every.maps.items():
        if name.endswith("attn1"):
            assert torch.equal(some.maps[name], maps)
            continue
        expected = torch.zeros_like(maps, dtype=torch.float64)
        for image in range(2):
            columns = lists[image % len(lists)]
            kept = maps[image, ..., columns].double()
            expected[image, ..., columns] = kept / kept.sum(-1, keepdim=True)
        expected = expected[..., tokens or slice(None)]
        torch.testing.assert_close(some.maps[name].double(), expected, atol=1e-6, rtol=0)
        averaged = expected.mean((1, 2))  # of the softmaxes, not the softmax of an average
        torch.testing.assert_close(mean.maps[name].double(), averaged, atol=1e-6, rtol=0)


@pytest.mark.parametrize("among", [[], [[]], [[0], []], "words"])
def test_the_softmax_over_nothing_is_refused(tiny_pipe, among):
    with pytest.raises(ValueError, match="list of columns"):
        with capture(tiny_pipe, among=among):
            pass


@pytest.mark.parametrize("rows", [1, N])
@pytest.mark.parametrize("given", [False, True])
def test_some_queries_bring_their_mask_and_logsumexp(rows, given):
    mask = torch.randn(B, 1, rows, T, generator=GENERATOR)
    scores = QUERY @ KEY.mT / WIDTH**0.5 + mask
    call = AttentionCall(QUERY, KEY, mask=mask, logsumexp=scores.logsumexp(-1) if given else None)
    found = softmax_of(call).of_queries([4, 1]).probs(slice(None), None)
    torch.testing.assert_close(found, scores.softmax(-1)[:, :, [4, 1]])


def test_a_logsumexp_belongs_to_all_keys():
    """Some queries keep theirs; of some keys the softmax is another one."""
    call = AttentionCall(QUERY, KEY, logsumexp=(QUERY @ KEY.mT / WIDTH**0.5).logsumexp(-1))
    keys = slice(1, 4)
    part = softmax_of(call.between(slice(2, 5), keys)).probs(slice(HEADS), None)
    expected = (QUERY.double()[:, :, 2:5] @ KEY.double()[:, :, keys].mT / WIDTH**0.5).softmax(-1)
    torch.testing.assert_close(part.double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(call.between(slice(2, 5)).logsumexp, call.logsumexp[:, :, 2:5])
