"""Attention backends of diffusers' dispatcher, chosen before a capture or inside it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from helpers.joint_models import MODELS, inputs
from helpers.transformer_rows import flux
from torch.overrides import TorchFunctionMode

from sdattn import capture
from sdattn.look.dispatched import DISPATCH, _by_head, only_dispatches
from sdattn.look.observers import ObservingProcessor
from sdattn.look.sdpa import TORCHS
from sdattn.look.sources import see

BACKENDS = _AttentionBackendRegistry._backends
MATH = AttentionBackendName._NATIVE_MATH


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    monkeypatch.setattr(
        _AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend
    )


@pytest.fixture
def calls(monkeypatch):
    """The queries that reach a backend which differs from the native one in its images."""
    seen, attend = [], BACKENDS[MATH]

    def backend(query, key, value, attn_mask=None, **options):
        seen.append(query)
        return attend(query=query, key=key, value=value, attn_mask=attn_mask, scale=0.5)

    monkeypatch.setitem(BACKENDS, MATH, backend)
    given = {"query", "key", "value", "attn_mask"}
    monkeypatch.setitem(_AttentionBackendRegistry._supported_arg_names, MATH, given)
    return seen


@pytest.mark.parametrize("nested", [False, True])
@torch.no_grad()
def test_a_backend_that_is_set_inside_reaches_the_processors(nested, calls):
    model = flux().transformer
    given = inputs("FLUX.1", model)
    native = model(**given).sample
    with capture(model) as store:
        model(**given)
    plain = dict(store.maps)
    calls.clear()
    with capture(model) as store, capture(model) if nested else nullcontext():
        model.set_attention_backend("_native_math")
        during = model(**given).sample
    assert len(calls) == len(store.maps) == 4
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)  # the layers keep it
    assert torch.equal(during, model(**given).sample)
    assert len(calls) == 8
    assert not torch.equal(during, native)
    assert all((store.maps[name] - one).abs().max() > 1e-4 for name, one in plain.items())
    with capture(model):
        model.reset_attention_backend()
        assert torch.equal(model(**given).sample, native)
    assert torch.equal(model(**given).sample, native)


class Modes(torch.nn.Module):
    """A projection that notes how many modes of torch's its input came through."""

    def __init__(self, own, noted):
        super().__init__()
        self.own, self.noted = own, noted

    def forward(self, states):
        self.noted.append(torch._C._len_torch_function_stack())
        return self.own(states)


@pytest.mark.parametrize(("kind", "modes"), [("FLUX.1", 0), ("Qwen-Image", 0), ("SD3", 1)])
@torch.no_grad()
def test_only_the_dispatchers_kernel_is_a_detour_for_torchs_functions(kind, modes):
    """SD3's processor calls torch's attention itself, so all of it is one."""
    model = MODELS[kind]().transformer
    given = inputs(kind, model)
    native = BACKENDS[AttentionBackendName.NATIVE]
    plain = model(**given)[0]
    noted = []
    for block in model.transformer_blocks:
        block.attn.to_q = Modes(block.attn.to_q, noted)
    with capture(model) as store:
        for expected in ([modes] * len(model.transformer_blocks),) * 2:
            noted.clear()
            assert torch.equal(model(**given)[0], plain)
            assert noted == expected
    assert all(maps.std() > 0 for maps in store.maps.values())
    assert BACKENDS[AttentionBackendName.NATIVE] is native


def test_code_that_names_torchs_attention_may_call_it_beside_the_dispatcher():
    def dispatches(states):
        return dispatch_attention_fn(states, states, states)

    def calls_both(states):
        made = torch.nn.functional.scaled_dot_product_attention(states, states, states)
        return dispatch_attention_fn(made, made, made)

    found = [only_dispatches(one) for one in (dispatches, calls_both, print_state)]
    assert found == [True, False, False]


def print_state(states):
    print(states)


class SharperAfterAll:
    """One for single-stream blocks that asks the dispatcher, and then does it another way."""

    _attention_backend = _parallel_config = None

    def __call__(self, attn, hidden_states, _text, _mask, image_rotary_emb):
        projections = attn.to_q, attn.to_k, attn.to_v
        query, key, value = (
            one(hidden_states).unflatten(-1, (attn.heads, -1)) for one in projections
        )
        query, key = (
            apply_rotary_emb(one, image_rotary_emb, sequence_dim=1)
            for one in (attn.norm_q(query), attn.norm_k(key))
        )
        dispatch_attention_fn(query, key, value)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        self.probs = (3 * query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        return (self.probs @ value).transpose(1, 2).flatten(-2)


@torch.no_grad()
def test_a_processor_of_ones_own_may_go_on_after_the_dispatcher():
    model = flux().transformer
    given = inputs("FLUX.1", model)
    attn = model.single_transformer_blocks[-1].attn
    attn.set_processor(SharperAfterAll())
    with capture(model) as store:
        model(**given)
    n_text = given["encoder_hidden_states"].shape[1]
    expected = attn.processor.probs.mean(1)[:, n_text:, :n_text]
    name = f"single_transformer_blocks.{len(model.single_transformer_blocks) - 1}.attn"
    torch.testing.assert_close(store.maps[name].flatten(1, -2), expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_mode_of_the_users_still_counts_as_the_kernel_it_is():
    class Louder(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            return 1.1 * made if func is TORCHS else made

    model = flux().transformer
    with Louder(), pytest.raises(RuntimeError, match="Louder"), capture(model):
        model(**inputs("FLUX.1", model))


def test_an_observer_answers_for_what_it_wraps_and_for_no_more():
    inner = MODELS["FLUX.1"]().transformer.transformer_blocks[0].attn.processor
    watch = (print, see, lambda: True)
    twice = ObservingProcessor(ObservingProcessor(inner, *watch), *watch)
    twice._attention_backend, twice._parallel_config = MATH, "a config"
    assert inner._attention_backend == twice._attention_backend == MATH
    assert inner._parallel_config == twice._parallel_config == "a config"
    plain = ObservingProcessor(AttnProcessor2_0(), *watch)
    assert not hasattr(plain, "_attention_backend")
    assert not hasattr(plain, "_parallel_config")


def kernel(error):
    """A kernel that calls nothing of torch's attention, with an error of its own, relative."""

    def attend(query, key, value, attn_mask=None, scale=None, **_):
        q, k, v = (one.transpose(1, 2) for one in (query, key, value))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores if attn_mask is None else scores + attn_mask
        return ((scores.softmax(-1) @ v) * (1 + error)).transpose(1, 2)

    attend.__module__ = DISPATCH
    return attend


@pytest.mark.parametrize("when", ["before", "active", "inside"])
@torch.no_grad()
def test_a_kernel_of_the_dispatcher_is_seen_by_its_query_and_key(when, monkeypatch):
    model, attend = flux().transformer, kernel(1e-5)
    monkeypatch.setitem(BACKENDS, AttentionBackendName.SAGE, attend)
    monkeypatch.setattr(f"{DISPATCH}._check_attention_backend_requirements", print)
    model.set_attention_backend("native")
    with capture(model) as native:
        model(**inputs("FLUX.1", model))
    if when == "before":
        model.set_attention_backend("sage")
    elif when == "active":  # as by diffusers' attention_backend, or its environment variable
        model.reset_attention_backend()
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.SAGE)
    with capture(model) as store:
        if when == "inside":
            model.set_attention_backend("sage")
        watched = model(**inputs("FLUX.1", model)).sample
    assert BACKENDS[AttentionBackendName.SAGE] is attend
    assert torch.equal(model(**inputs("FLUX.1", model)).sample, watched)
    for name, maps in native.maps.items():
        assert (store.maps[name] - maps).abs().max() < 1e-4
    [(name, difference)] = store.kernels.items()
    assert name.endswith("kernel.<locals>.attend") and 0 < difference < 1e-3


@torch.no_grad()
def test_the_difference_of_a_kernel_is_the_largest_of_any_call(monkeypatch):
    """Whatever its values are, and whatever is allowed."""
    model, exact, calls = flux().transformer, kernel(0.0), []
    shifts = [1e-5, 3e-5, 7e-5, 2e-5, 1e-5, 1e-5, 1e-5, 1e-5]

    def shifted(query, key, value, **given):
        made = exact(query, key, value, **given)
        made[:, 0] += shifts[len(calls)]
        calls.append(1)
        return made

    shifted.__module__ = DISPATCH
    monkeypatch.setitem(BACKENDS, AttentionBackendName.SAGE, shifted)
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.SAGE)
    with capture(model) as store:
        for time in (0.5, 0.25):
            model(**{**inputs("FLUX.1", model), "timestep": torch.tensor([time])})
    assert len(calls) == 8
    assert list(store.kernels.values()) == pytest.approx([7e-5], abs=2e-6)


def test_a_kernel_that_makes_something_else_is_refused(monkeypatch):
    model = flux().transformer
    monkeypatch.setitem(BACKENDS, AttentionBackendName.SAGE, kernel(0.05))
    before = model.attn_processors
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.SAGE)
    with pytest.raises(RuntimeError, match=r"replaced by .*attend, .*backend\('native'"):
        with capture(model):
            model(**inputs("FLUX.1", model))
    assert all(model.attn_processors[name] is one for name, one in before.items())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_is_seen():
    model = flux().transformer
    model.set_attention_backend("flex")
    plain = model(**inputs("FLUX.1", model)).sample
    with capture(model) as store:
        watched = model(**inputs("FLUX.1", model)).sample
    assert torch.equal(plain, watched)
    name = "diffusers.models.attention_dispatch._native_flex_attention"
    assert len(store.maps) == 4 and list(store.kernels) == [name]
    assert store.kernels[name] < 1e-5


def test_attention_over_several_devices_is_refused_before_the_run():
    model, ran = flux().transformer, []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    config = SimpleNamespace(context_parallel_config=object())
    model.single_transformer_blocks[1].attn.processor._parallel_config = config
    with pytest.raises(RuntimeError, match="single_.*1.attn"):
        with capture(model):
            model(**inputs("FLUX.1", model))
    assert not ran


def test_all_that_a_kernel_was_given_is_handed_on():
    def see(attend, by, query, key, value, **options):
        seen.append((attend(), query.shape, options))

    seen, query = [], torch.ones(2, 5, 3, 4)  # [B, N, heads, d]
    made = query + 1, torch.zeros(2, 3, 5)  # with a logsumexp
    look = _by_head(see)
    assert look(lambda: made, print, query, query, query, is_causal=True, scale=0.3) is made
    [(output, shape, options)] = seen
    assert output.shape == shape == (2, 3, 5, 4) and output.eq(2).all()
    assert options["is_causal"] is True and options["scale"] == 0.3
