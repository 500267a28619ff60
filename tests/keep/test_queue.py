"""Calls of several layers computed together, when the model's pass ends, against float64."""

import gc
import re
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0, FusedAttnProcessor2_0
from helpers.capture_runs import oracle, record_inputs
from helpers.sums import running_pass, running_sum
from helpers.tiny_pipelines import make_unet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sdattn import CaptureWarning, capture
from sdattn.attention import MultiHeadAttention, plain
from sdattn.attention.calls import ProjectedCall
from sdattn.keep import queue
from sdattn.models.denoiser import find_denoiser

TIMES = 900, 500, 100
UP = "up_blocks.2.attentions.1.transformer_blocks.0.attn2"


@pytest.fixture
def unet():
    return make_unet()


def inputs(rows=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(rows, 4, 16, 24, generator=generator)
    return sample, torch.randn(rows, 77, 32, generator=generator)


@torch.no_grad()
def watched(unet, times=TIMES, rows=2, **options):
    """The store of a few calls, and what each layer was called with, by name."""
    hooks, record = record_inputs(unet)
    with capture(unet, **options) as store:
        for time in times:
            sample, text = inputs(rows, time)
            unet(sample, time, text)
    for hook in hooks:
        hook.remove()
    return store, record


def expected(unet, calls, name):
    """The mean over heads and calls, float64 ``[B, N, T]``."""
    layer = unet.get_submodule(name)
    return torch.stack([oracle(layer, *call) for call in calls]).mean((0, 2))


@pytest.fixture
def groups(monkeypatch):
    """How many layers were computed together, each time, where none is too large for that."""
    monkeypatch.setattr(plain, "MAX_PROBS_ON_CPU", plain.MAX_PROBS_AT_ONCE)
    found = []
    add = queue._Stack.add
    spy = lambda stack: found.append(len(stack.waiting)) or add(stack)  # noqa: E731
    monkeypatch.setattr(queue._Stack, "add", spy)
    return found


@pytest.mark.parametrize("bound", [0, 60_000, 1 << 30], ids=["at once", "in parts", "all"])
@pytest.mark.parametrize(
    "options", [{}, {"steps": "last"}, {"tokens": [4, 0, 9]}], ids=["all", "last", "tokens"]
)
def test_layers_that_are_computed_together_hold_their_own_maps(
    bound, options, unet, groups, monkeypatch
):
    monkeypatch.setitem(queue.MAX_QUEUED_BYTES, "cpu", bound)
    store, record = watched(unet, **options)
    for name, calls in record.items():
        calls = calls[-1:] if options.get("steps") == "last" else calls
        right = expected(unet, calls, name)[..., options.get("tokens", slice(None))]
        found = store.maps[name].flatten(1, 2).double()
        torch.testing.assert_close(found, right, atol=1e-6, rtol=0)
    # the first call of each layer is computed at once
    alone = [5, 5, 5, 1] * (len(TIMES) - 1)
    assert groups == alone if bound > 60_000 else groups != alone
    assert bool(groups) == bool(bound)


def test_layers_of_which_one_is_computed_at_a_time_are_not_copied_together(
    unet, groups, monkeypatch
):
    of_one = 2 * 4 * 96 * 77  # probabilities of a layer of the second resolution
    monkeypatch.setattr(plain, "MAX_PROBS_ON_CPU", 2 * of_one)
    store, record = watched(unet)
    assert groups == [5, 5, 1] * (len(TIMES) - 1)
    for name, calls in record.items():
        found = store.maps[name].flatten(1, 2).double()
        torch.testing.assert_close(found, expected(unet, calls, name), atol=1e-6, rtol=0)


def test_rows_of_one_branch_are_chosen_when_they_are_computed(unet, groups):
    store, record = watched(unet, rows=4, guidance="batch")
    assert groups and store.images == 2
    for name, calls in record.items():
        found = store.maps[name].flatten(1, 2).double()
        right = expected(unet, calls, name)[2:]
        torch.testing.assert_close(found, right, atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", ["mean", "last"])
@pytest.mark.parametrize("skipped", [1, 4])
def test_layers_that_a_cache_skips_are_left_out_of_their_group(unet, groups, steps, skipped):
    """Two groups of other layers than before share no sums, nor does one that was alone."""
    names = [layer.name for layer in find_denoiser(unet).layers if layer.kind == "cross"]
    names = [name for name in names if unet.get_submodule(name).inner_dim == 8]
    layers = [unet.get_submodule(name) for name in names[:skipped]]
    hooks, record = record_inputs(unet)
    warned = pytest.warns(CaptureWarning, match="did not run once in each of 4")
    with torch.no_grad(), warned, capture(unet, steps=steps) as store:
        for number in range(4):
            sample, text = inputs(seed=number)
            for layer in layers if number == 2 else ():
                layer.forward = lambda hidden, *_, **__: hidden
            unet(sample, 900 - number, text)
            for layer in layers:
                vars(layer).pop("forward", None)
    for hook in hooks:
        hook.remove()
    for name in names[:skipped]:
        record[name].pop(2)  # its hook saw a call that attended to nothing
    for name, calls in record.items():
        calls = calls[-1:] if steps == "last" else calls
        found = store.maps[name].flatten(1, 2).double()
        torch.testing.assert_close(found, expected(unet, calls, name), atol=1e-6, rtol=0)
    assert groups == [5, 5, 5, 1, 5 - skipped, 5, 5, 1, 5, 5, 5, 1]


def written(unet, names, after, projection="to_q"):
    """Have something write into the queries of these layers, or their keys, once they have run, as
    rotary embeddings in place would, from the ``after``-th call on."""
    for name in names:
        layer = unet.get_submodule(name)
        layer.numbers = []
        seen = []
        given = getattr(layer, projection)
        given.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out))

        def spoil(_module, _args, _out, seen=seen):
            if len(seen) > after:
                seen[-1].mul_(3)

        layer.register_forward_hook(spoil)


@pytest.mark.parametrize("after", [0, 1, 2], ids=["first", "second", "last"])  # of three passes
@pytest.mark.parametrize("projection", ["to_q", "to_k"])
def test_what_is_written_into_after_the_layer_ran_is_not_in_its_map(
    unet, groups, projection, after
):
    written(unet, [UP], after, projection)
    store, record = watched(unet)
    right = expected(unet, record[UP], UP)
    torch.testing.assert_close(store.maps[UP].flatten(1, 2).double(), right, atol=1e-6, rtol=0)
    assert groups == [5, 5, 5, 1] * (len(TIMES) - 1)


# -- memory that is used again ---------------------------------------------------------------------


class Workspaces:
    """Projections that answer in memory of their own, as CUDA graphs and custom kernels do.

    ``choose(name, kind, call)`` names the memory that a projection's answer is in, and where it
    begins there, by the layer's name, ``"q"`` or ``"k"``, and how often the layer has run.
    """

    def __init__(self, unet, choose, layers=None, first=0):
        self.memory = {}
        for layer in layers or find_denoiser(unet).layers:
            for kind in ("q", "k"):
                projection = getattr(layer.module, f"to_{kind}")
                projection.register_forward_hook(
                    partial(self.answer, partial(choose, layer.name, kind), first, [])
                )

    def answer(self, choose, first, calls, _module, _args, output):
        calls.append(1)
        if len(calls) <= first:
            return output
        name, start = choose(len(calls))
        held = self.memory.setdefault(name, np.full(1 << 15, np.nan, np.float32))
        place = held[start : start + output.numel()]
        place[:] = output.detach().numpy().ravel()
        return torch.from_numpy(place).view(output.shape)


def numbered(name):
    """A number for each layer, of those next to each other in the model."""
    return sum(map(int, re.findall(r"\d+", name)))


WORKSPACES = {
    "one for all": lambda name, kind, call: (kind, 0),
    "one for each layer": lambda name, kind, call: (name + kind, 0),
    "two in turn": lambda name, kind, call: (f"{kind}{numbered(name) % 2}", 0),
    "two, by the call": lambda name, kind, call: (f"{kind}{call % 2}", 0),
    "parts of one": lambda name, kind, call: (kind, 4096 * (numbered(name) % 3)),
    "one of both": lambda name, kind, call: (0, (kind == "k") << 14),
    "the queries'": lambda name, kind, call: ("q" if kind == "q" else f"{name} {call}", 0),
}


@pytest.mark.parametrize("choose", WORKSPACES.values(), ids=WORKSPACES)
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_layers_that_answer_in_one_memory_hold_their_own_maps(unet, choose, first):
    """The first calls, which warm up, answer in new memory."""
    Workspaces(unet, choose, first=first)
    store, record = watched(unet, (900, 700, 500, 300))
    for name, calls in record.items():
        found = store.maps[name].flatten(1, 2).double()
        torch.testing.assert_close(found, expected(unet, calls, name), atol=1e-6, rtol=0)


def test_query_and_key_may_be_parts_of_one_tensor(unet, groups):
    """As fused projections make them."""
    unet.fuse_qkv_projections()
    unet.set_attn_processor(FusedAttnProcessor2_0())
    fused = make_unet()
    fused.load_state_dict(unet.state_dict(), strict=False)
    store, _ = watched(unet, kinds=("cross", "self"))
    assert sorted(groups) == sorted([5, 5, 5, 1] * 2 * (len(TIMES) - 1))
    right, _ = watched(fused, kinds=("cross", "self"), steps="all")
    for name, maps in right.maps.items():
        torch.testing.assert_close(store.maps[name], maps.mean(1), atol=1e-6, rtol=0)


class Other(torch.Tensor):
    """A tensor that may have no memory of its own."""


def test_tensors_of_another_class_do_not_wait(unet, groups):
    for layer in find_denoiser(unet).layers:
        layer.module.to_k.register_forward_hook(lambda _m, _a, out: out.as_subclass(Other))
    store, record = watched(unet)
    for name, calls in record.items():
        found = store.maps[name].flatten(1, 2).double().as_subclass(torch.Tensor)
        torch.testing.assert_close(found, expected(unet, calls, name), atol=1e-6, rtol=0)
    assert not groups


def test_after_the_block_no_query_and_no_key_is_held(unet):
    seen = []
    for layer in find_denoiser(unet).layers:
        layer.module.to_q.register_forward_hook(lambda _m, _a, out: seen.append(weakref.ref(out)))
    store, _ = watched(unet)
    gc.collect()
    assert len(seen) == 32 * len(TIMES) and store.maps
    assert not any(one() is not None for one in seen)


# -- what waits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", [False, True])
def test_maps_read_while_the_model_runs_have_all_that_ran(unet, groups, inference):
    """A hook behind the last layer reads the first one's map."""
    first, *_, last = [layer for layer in find_denoiser(unet).layers if layer.kind == "cross"]
    read = []

    def reads(*_):
        with torch.inference_mode() if inference else torch.no_grad():
            read.append(store.maps[first.name])

    with torch.no_grad(), capture(unet) as store:
        last.module.register_forward_hook(reads)
        for number, time in enumerate(TIMES):
            unet(*(inputs(seed=number)[0], time, inputs(seed=number)[1]))
    torch.testing.assert_close(read[-1], store.maps[first.name], atol=0, rtol=0)
    assert not any(one.total.is_inference() for one in store.sums.values())


@pytest.mark.parametrize("inference", [(True,) * 3, (True, False, True), (False, True, False)])
def test_calls_in_inference_mode_wait_too(unet, groups, inference):
    hooks, record = record_inputs(unet)
    with torch.no_grad(), capture(unet) as store:
        for time, mode in zip(TIMES, inference, strict=True):
            sample, text = inputs(seed=time)
            with torch.inference_mode(mode):
                unet(sample, time, text)
    for hook in hooks:
        hook.remove()
    for name, calls in record.items():
        with torch.no_grad():
            right = expected(unet, calls, name)
        found = store.maps[name].flatten(1, 2).double()
        torch.testing.assert_close(found, right, atol=1e-6, rtol=0)
    assert groups == [5, 5, 5, 1] * (len(TIMES) - 1)


@pytest.mark.parametrize("bound", [60_000, 100_000, 300_000])
def test_memory_for_what_waits_is_bounded(unet, groups, monkeypatch, bound):
    monkeypatch.setitem(queue.MAX_QUEUED_BYTES, "cpu", bound)
    held = []
    make = queue._Stack.__init__

    def noted(stack, *given):
        make(stack, *given)
        held.append(stack.query.nbytes + stack.key.nbytes)

    monkeypatch.setattr(queue._Stack, "__init__", noted)
    watched(unet)
    assert bound / 4 < sum(held) <= bound
    assert max(groups) < 5 or bound == 300_000


def test_kinds_have_equal_shares_of_the_memory_that_is_left(monkeypatch):
    calls = {
        heads: ProjectedCall(torch.ones(2, 4, 8), torch.ones(2, 5, 8), heads) for heads in (1, 2, 4)
    }
    monkeypatch.setitem(queue.MAX_QUEUED_BYTES, "cpu", 4 * (2 * 4 * 8 + 2 * 5 * 8) * 4)
    waiting = queue.Queue()
    for kinds in ((1, 2), (1, 2, 4)):
        for heads in kinds:
            for number in range(4):
                held = running_sum()
                held.layer = replace(held.layer, name=f"layer {heads}.{number}")
                held.queue = waiting
                held.take(calls[heads])
        waiting.end_pass()
    stacks = {kind.heads: stack for kind, stack in waiting._stacks.items()}
    assert [len(stacks[heads].places) for heads in (1, 2)] == [2, 2]
    assert stacks[4] is None  # nothing is left


@pytest.mark.parametrize(
    ("heads", "dtypes"),
    [((2, 4), (torch.float32, torch.float32)), ((2, 2), (torch.float32, torch.bfloat16))],
    ids=["other heads", "another dtype"],
)
def test_layers_that_differ_are_computed_apart(heads, dtypes, groups):
    waiting = queue.Queue()
    sums = []
    for number, (of_layer, dtype) in enumerate(zip(heads, dtypes, strict=True)):
        held = running_sum()
        held.layer = replace(held.layer, name=f"layer {number}")
        held.queue = waiting
        sums.append((held, of_layer, dtype))
    generator = torch.Generator().manual_seed(0)
    right = [0, 0]
    for _ in range(3):
        for number, (held, of_layer, dtype) in enumerate(sums):
            query, key = (torch.randn(2, n, 8, generator=generator).to(dtype) for n in (4, 5))
            held.running = replace(held.running)
            held.take(ProjectedCall(query, key, of_layer))
            of_heads = (
                x.double().unflatten(-1, (of_layer, -1)).transpose(1, 2) for x in (query, key)
            )
            query, key = of_heads
            scores = query @ key.mT / query.shape[-1] ** 0.5
            right[number] += scores.softmax(-1).mean(1) / 3
        waiting.end_pass()
    for (held, _, _), one in zip(sums, right, strict=True):
        torch.testing.assert_close(held.map().flatten(1, 2).double(), one, atol=1e-6, rtol=0)
    assert groups == [1, 1] * 2


def wider(query, key, rows):
    return query.repeat(1, 1, 2), key.repeat(1, 1, 2), rows


def of_more_keys(query, key, rows):
    return query, key.repeat(1, 2, 1), rows


def of_half_type(query, key, rows):
    return query.bfloat16(), key.bfloat16(), rows


def with_a_key_of_half_type(query, key, rows):
    return query, key.bfloat16(), rows


def with_a_query_of_half_type(query, key, rows):
    return query.bfloat16(), key, rows


def in_a_larger_batch(query, key, rows):
    return query.repeat(2, 1, 1), key.repeat(2, 1, 1), rows


def of_later_rows(query, key, rows):
    return query.repeat(2, 1, 1) * 2, key.repeat(2, 1, 1), tuple(row + 2 for row in rows)


def of_rows_apart(query, key, rows):
    return query.repeat(2, 1, 1), key.repeat(2, 1, 1), (0, 3)


def not_contiguous(query, key, rows):
    return query.mT.contiguous().mT, key.flip(1), rows


def of_another_class(query, key, rows):
    return query.as_subclass(Other), key.as_subclass(Other), rows


def with_a_graph(query, key, rows):
    return query.requires_grad_(), key, rows


def skipped(query, key, rows):
    return None


CHANGES = [
    wider,
    of_more_keys,
    of_half_type,
    with_a_key_of_half_type,
    with_a_query_of_half_type,
    in_a_larger_batch,
    of_later_rows,
    of_rows_apart,
    not_contiguous,
    of_another_class,
    with_a_graph,
    skipped,
]


@pytest.mark.pairs
@pytest.mark.parametrize("steps", ["mean", "last"])
@pytest.mark.parametrize("all_of_them", [False, True], ids=["one layer", "all layers"])
@pytest.mark.parametrize("changed", ["first", "second", "third", "last", "each"])
@pytest.mark.parametrize("change", CHANGES)
def test_calls_that_change(change, changed, all_of_them, steps):
    """In one pass of four, or in each, the calls of one of three layers, or of all, are others."""
    generator = torch.Generator().manual_seed(0)
    waiting = queue.Queue()
    every = []
    for number in range(3):
        held = running_sum(tokens=[4, 0], steps=steps)
        held.layer = replace(held.layer, name=f"layer {number}")
        held.queue = waiting
        every.append((held, []))
    for time in ("first", "second", "third", "last"):
        for number, (held, right) in enumerate(every):
            given = *(torch.randn(2, n, 8, generator=generator) for n in (4, 5)), (0, 1)
            if changed in (time, "each") and (all_of_them or number == 1):
                given = change(*given)
                if given is None:
                    continue
            query, key, rows = given
            held.running = running_pass(len(query), rows)
            held.take(ProjectedCall(query, key, 2))
            query, key = (
                x[list(rows)].detach().as_subclass(torch.Tensor).double() for x in (query, key)
            )
            query, key = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (query, key))
            scores = query @ key.mT / query.shape[-1] ** 0.5
            right.append(scores.softmax(-1).mean(1)[..., [4, 0]])
        waiting.end_pass()
    for held, right in every:
        if not right:
            continue  # it never ran
        mean = right[-1] if steps == "last" else torch.stack(right).mean(0)
        found = held.map().as_subclass(torch.Tensor)
        assert not found.requires_grad
        torch.testing.assert_close(found.flatten(1, 2).double(), mean, atol=1e-6, rtol=0)


class Count(TorchDispatchMode):
    """Operations, views included."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_watched_layer_dispatches_at_most_five_operations_more(unet, monkeypatch):
    """In a pass that is not a run's first nor second, as on a GPU, where no part is small."""
    monkeypatch.setattr(plain, "MAX_PROBS_ON_CPU", plain.MAX_PROBS_AT_ONCE)
    given = inputs(4)

    def operations():
        with Count() as count:
            unet(given[0], 100, given[1])
        return count.number

    unwatched = operations()
    with capture(unet, guidance="batch") as store:
        for time in TIMES[:2]:
            unet(given[0], time, given[1])
        more = operations() - unwatched
    assert len(store.maps) == 16
    assert 0 < more <= 5 * 16


class CalledTwice(nn.Module):
    """Self-attention whose first module runs twice in each pass."""

    def __init__(self):
        super().__init__()
        self.first = MultiHeadAttention(8, heads=2, dim_head=4)
        self.second = MultiHeadAttention(8, heads=2, dim_head=4)
        for layer in (self.first, self.second):
            layer.processor = AttnProcessor2_0()
        self.inputs = []

    def forward(self, sample, timestep):
        for layer in (self.first, self.first, self.second):
            self.inputs.append((layer, sample))
            sample = sample + layer(sample)[0]
        return sample


@torch.no_grad()
def test_a_module_that_runs_twice_in_a_pass_adds_both_calls():
    torch.manual_seed(0)
    model = CalledTwice()
    with pytest.warns(CaptureWarning, match="did not run once"):
        with capture(model, kinds=("self",), latent_size=(4, 4)) as store:
            for time in TIMES:
                model(torch.randn(1, 16, 8), time)
    for name in ("first", "second"):
        maps = []
        for layer, states in model.inputs:
            if layer is getattr(model, name):
                query = layer.to_q(states).double().unflatten(-1, (2, 4)).transpose(1, 2)
                key = layer.to_k(states).double().unflatten(-1, (2, 4)).transpose(1, 2)
                maps.append((query @ key.mT / 2).softmax(-1).mean(1))
        found = store.maps[name].flatten(1, 2).double()
        torch.testing.assert_close(found, torch.stack(maps).mean(0), atol=1e-6, rtol=0)
