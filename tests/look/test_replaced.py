"""Another function in place of torch's ``scaled_dot_product_attention``, as SageAttention is used:
what it attended to is shown where it returns the softmax's output, and else it is refused by name.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from helpers.joint_models import MODELS, inputs
from helpers.reads import reads_by_call
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_small_unet
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sdattn import CaptureError, CaptureWarning, TorchAttnProcessor, capture
from sdattn.look.sdpa import SdpaWatch, spied

TORCHS = functional.scaled_dot_product_attention


# -- functions that are right --------------------------------------------------------------------


def timed(*args, **kwargs):
    """A wrapper, which torch's own makes the output of."""
    return TORCHS(*args, **kwargs)


def explicit(query, key, value, attn_mask=None, scale=None, **_):
    scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
    scores = scores if attn_mask is None else scores + attn_mask
    return scores.softmax(-1) @ value


# -- and others that are not ---------------------------------------------------------------------


def forgets(query, key, value, attn_mask=None, scale=None, **_):
    """Two columns get nothing."""
    probs = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1).clone()
    probs[..., 2:4] = 0
    return probs @ value


def sharper(query, key, value, **options):
    return TORCHS(3 * query, key, value, **{**options, "scale": None})


def louder(*args, **options):
    return 1.05 * TORCHS(*args, **options)


def one_head(*args, **options):
    made = TORCHS(*args, **options).clone()
    made[:, -1] = made[:, -1].flip(-2)
    return made


def nothing(*args, **options):
    return torch.zeros_like(TORCHS(*args, **options))


RIGHT, WRONG = (timed, explicit), (forgets, sharper, louder, one_head, nothing)


@pytest.fixture
def replaced(monkeypatch):
    def put(function):
        monkeypatch.setattr(functional, "scaled_dot_product_attention", function)

    return put


def unet_and_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, 4, 16, 16, generator=generator).to(dtype)
    text = torch.randn(2, 13, 32, generator=generator).to(dtype)
    given = {"sample": sample, "timestep": 5, "encoder_hidden_states": text}
    return make_small_unet().to(dtype), given


def flux_and_inputs(dtype=torch.float32):
    model = MODELS["FLUX.1"]().transformer.to(dtype)
    return model, inputs("FLUX.1", model, dtype)


KINDS = {"UNet": unet_and_inputs, "FLUX": flux_and_inputs}


def maps_of(model, given, **options):
    with capture(model, **options) as store:
        output = model(**given).sample
    return output, dict(store.maps)


def assert_same(found, expected, rtol=0):
    assert list(found) == list(expected)
    for name, maps in expected.items():
        torch.testing.assert_close(found[name], maps, atol=1e-5, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", RIGHT)
@pytest.mark.parametrize("kind", tiered(KINDS, quick=2))
@torch.no_grad()
def test_one_that_makes_the_softmax_is_captured_and_changes_no_bit(kind, function, dtype, replaced):
    model, given = KINDS[kind](dtype)
    _, expected = maps_of(model, given)
    replaced(function)
    before = model(**given).sample
    output, found = maps_of(model, given)
    assert torch.equal(output, before)
    assert functional.scaled_dot_product_attention is function
    # what the function made of the layers before is rounded
    assert_same(found, expected, rtol=4e-2 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("function", WRONG)
@pytest.mark.parametrize("kind", tiered(KINDS, quick=2))
@torch.no_grad()
def test_one_that_makes_something_else_is_refused_by_name(kind, function, when, replaced):
    model, given = KINDS[kind]()
    before = dict(model.attn_processors)
    if when == "before":
        replaced(function)
    with pytest.raises(RuntimeError, match=rf"{__name__}\.{function.__name__}, whose"):
        with capture(model):
            replaced(function)
            model(**given)
    assert functional.scaled_dot_product_attention is function
    assert all(model.attn_processors[name] is one for name, one in before.items())
    replaced(TORCHS)  # as the message says
    assert maps_of(model, given)[1]


@torch.no_grad()
def test_a_processor_that_does_not_call_it_is_captured(replaced):
    unet, given = unet_and_inputs()
    _, expected = maps_of(unet, given)
    unet.set_attn_processor(TorchAttnProcessor())
    replaced(forgets)
    _, found = maps_of(unet, given)
    assert_same(found, expected)


@pytest.mark.parametrize("wrong", [(1,), (2,)], ids=["middle", "last"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_that_is_wrong_in_a_later_pass_is_refused_at_the_end(kind, wrong, replaced):
    model, given = KINDS[kind]()
    passes = []

    def later(*args, **options):
        return (forgets if len(passes) in wrong else explicit)(*args, **options)

    replaced(later)
    with pytest.raises(CaptureError, match=r"\.later, whose"), capture(model):
        for _ in range(3):
            passes.append(model(**given))
    assert len(passes) == 3


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_nothing_is_read_back_after_the_first_pass(kind, replaced):
    model, given = KINDS[kind]()
    replaced(explicit)
    with reads_by_call(model) as plain:
        for _ in range(3):
            model(**given)
    with capture(model), reads_by_call(model) as watched:
        for _ in range(3):
            model(**given)
    assert watched[1:] == plain[1:]
    assert watched[0] > plain[0]


@pytest.mark.parametrize("options", [{}, {"refine": "self"}], ids=str)
@torch.no_grad()
def test_captures_in_each_other_call_it_as_often_as_none(options, replaced):
    model, given = flux_and_inputs()
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return TORCHS(*args, **kwargs)

    replaced(counted)
    model(**given)
    plain = len(calls)
    with capture(model, **options) as outer, capture(model) as inner:
        model(**given)
    assert len(calls) == 2 * plain
    assert len(outer.maps) == len(inner.maps) == 4
    assert functional.scaled_dot_product_attention is counted


@torch.no_grad()
def test_calls_of_other_threads_go_straight_to_it(replaced):
    unet, given = unet_and_inputs()
    query, found = torch.randn(1, 1, 4, 8), []

    def elsewhere():
        found.append(functional.scaled_dot_product_attention(query, query, query, loud=True))

    def threaded(*args, loud=False, **options):
        if not loud:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        return (2 if loud else 1) * TORCHS(*args, **options)

    replaced(threaded)
    maps_of(unet, given)
    assert len(found) > 3 and all(torch.equal(one, 2 * TORCHS(*[query] * 3)) for one in found)


def test_two_threads_that_capture_leave_it_as_it_was(replaced):
    barrier = threading.Barrier(2, timeout=60)

    def together(*args, **options):
        barrier.wait()
        return TORCHS(*args, **options)

    def captured(_number):
        unet, given = unet_and_inputs()
        with torch.no_grad():
            return len(maps_of(unet, given)[1])

    replaced(together)
    with ThreadPoolExecutor(2) as threads:
        assert all(number > 2 for number in threads.map(captured, range(2)))
    assert functional.scaled_dot_product_attention is together


@torch.no_grad()
def test_one_that_raises_is_left_in_its_place(replaced):
    def breaks(*_, **__):
        raise ZeroDivisionError

    unet, given = unet_and_inputs()
    replaced(breaks)
    with pytest.raises(ZeroDivisionError), capture(unet):
        unet(**given)
    assert functional.scaled_dot_product_attention is breaks


def test_dropout_draws_no_more_random_numbers_than_without(replaced):
    query = torch.randn(1, 2, 6, 8)
    replaced(timed)
    torch.manual_seed(0)
    expected = timed(query, query, query, dropout_p=0.5), torch.rand(1)
    torch.manual_seed(0)
    with SdpaWatch() as watch, spied(watch.attend, lambda: True):
        found = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert torch.equal(found, expected[0]) and torch.equal(torch.rand(1), expected[1])
    assert watch.unlike[0][1] > 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_arguments_that_torchs_does_not_take(device, replaced):
    """As SageAttention's own."""
    query = torch.randn(1, 2, 6, 8, device=device)
    replaced(lambda *given, tensor_layout="HND": TORCHS(*given))
    with SdpaWatch() as watch, spied(watch.attend, lambda: True):
        functional.scaled_dot_product_attention(query, query, query)
        functional.scaled_dot_product_attention(query, query, query, tensor_layout="NHD")
    assert [call.shape for call in watch.calls] == [(1, 2, 6, 6)] * 2
    assert watch.unlike[1][1] > 1
    assert device == "meta" or watch.unlike[0][1] < 1


def test_of_several_watches_the_last_begun_of_an_open_run_sees_a_call(replaced):
    replaced(explicit)
    query = torch.randn(1, 2, 6, 8)
    seen, is_open = [], {"first": True, "second": True}

    def watch(name):
        def see(call, by, *args, **kwargs):
            seen.append(name)
            return call()

        return spied(see, lambda: is_open[name])

    first, second = watch("first"), watch("second")
    with first:
        second.__enter__()
        functional.scaled_dot_product_attention(query, query, query)
        is_open["second"] = False  # another run's, in a thread of its own
        functional.scaled_dot_product_attention(query, query, query)
        is_open["first"] = False
        functional.scaled_dot_product_attention(query, query, query)
    assert seen == ["second", "first"]
    assert functional.scaled_dot_product_attention is not explicit  # the other still watches
    second.__exit__(None, None, None)
    assert functional.scaled_dot_product_attention is explicit


@torch.no_grad()
def test_under_autocast_a_function_may_round_as_torchs(replaced):
    query, key, value = torch.randn(3, 1, 2, 33, 8, generator=torch.Generator().manual_seed(0))
    for function, unlike in ((explicit, False), (louder, True)):
        replaced(function)
        with (
            torch.autocast("cpu", torch.bfloat16),
            SdpaWatch() as watch,
            spied(watch.attend, lambda: True),
        ):
            functional.scaled_dot_product_attention(query, key, value)
        assert (watch.unlike[0][1] > 1) == unlike


# -- by other ways ---------------------------------------------------------------------------------


class Mode(TorchFunctionMode):
    """Torch's own way to replace a function, around everything."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (self.function if func is TORCHS else func)(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_mode_of_torchs_is_judged_alike(kind):
    model, given = KINDS[kind]()
    _, expected = maps_of(model, given)
    with Mode(explicit):
        before = model(**given).sample
        output, found = maps_of(model, given)
    assert torch.equal(output, before)
    assert_same(found, expected)
    with Mode(forgets), pytest.raises(RuntimeError, match=r"\.Mode, whose"), capture(model):
        model(**given)


@torch.no_grad()
def test_a_mode_makes_the_output_that_it_would():
    query = torch.randn(1, 2, 6, 8)
    with Mode(louder), SdpaWatch() as watch:
        found = functional.scaled_dot_product_attention(query, query, query)
    assert torch.equal(found, 1.05 * TORCHS(query, query, query))
    [(by, multiple, _)] = watch.unlike
    assert type(by) is Mode and multiple > 1
    with torch.device("cpu"), SdpaWatch() as watch:  # a mode too, which answers nothing
        functional.scaled_dot_product_attention(query, query, query)
    assert not watch.unlike and watch.calls[0].logsumexp is not None


def another(module, function):
    """A module with all that one has, but for torch's attention."""
    copy = ModuleType("another")
    vars(copy).update(vars(module), scaled_dot_product_attention=function)
    return copy


@torch.no_grad()
def test_one_that_diffusers_alone_finds(monkeypatch):
    unet, given = unet_and_inputs()
    _, expected = maps_of(unet, given)
    monkeypatch.setattr(attention_processor, "F", another(functional, timed))
    _, found = maps_of(unet, given)
    assert_same(found, expected)
    monkeypatch.setattr(attention_processor, "F", another(functional, louder))
    with pytest.raises(RuntimeError, match="AttnProcessor2_0 is not what"), capture(unet):
        unet(**given)


@pytest.mark.parametrize("way", ["backend", "dispatcher"])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "SD3"])  # calls torch's itself
@torch.no_grad()
def test_a_backend_of_ones_own_that_changes_what_torchs_attention_made(kind, way, monkeypatch):
    model = MODELS[kind]().transformer
    given = inputs(kind, model)
    _, expected = maps_of(model, given)
    module = __import__(type(model).__module__, fromlist=["dispatch_attention_fn"])
    native = AttentionBackendName.NATIVE
    if way == "backend":
        entries, name = _AttentionBackendRegistry._backends, native
    else:
        entries, name = vars(module), "dispatch_attention_fn"
    own, times = entries[name], [1.0]
    monkeypatch.setitem(entries, name, lambda *args, **options: times[-1] * own(*args, **options))
    _, found = maps_of(model, given)
    assert_same(found, expected)
    times.append(1.05)
    with pytest.raises(RuntimeError, match="any attention"), capture(model):
        model(**given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_a_compiled_model_runs_eagerly_with_it(eagerly, replaced):
    unet, given = unet_and_inputs()
    _, expected = maps_of(unet, given)
    unet.compile()
    replaced(explicit)
    with pytest.warns(CaptureWarning, match="eagerly"):
        _, found = maps_of(unet, given)
    assert_same(found, expected)
    replaced(TORCHS)
    with pytest.raises(CaptureError, match=r"a compiled model, .*\.explicit, whose"), capture(unet):
        replaced(explicit)
        unet(**given)
