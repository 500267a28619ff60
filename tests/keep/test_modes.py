"""Modes of torch's in which the model runs: our own arithmetic is the same in each.

What a layer's attention was given in such a mode, the float64 formula makes maps of.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from helpers.joint_models import COLS, ROWS, inputs
from helpers.joint_parity import spans_of
from helpers.matrix_oracle import recorded, softmax_in_float64
from helpers.tiny_pipelines import make_small_unet, make_unet
from helpers.transformer_rows import flux, sd3

from sdattn import TorchAttnProcessor, capture
from sdattn.attention import add_attention, attention_probs, recording
from sdattn.attention import scaled_dot_product_attention as attend
from sdattn.models.denoiser import find_denoiser

CELLS = [(0, 1), (2, 3)]
LARGE = "FLUX.1, 520 cells"  # of so many keys a row's logsumexp is made first


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def cross(**changes):
    """A UNet and what it is called with, twice."""
    unet = make_small_unet(**changes)
    make = torch.Generator().manual_seed(0)
    text = torch.randn(1, 77, 32, generator=make)
    given = [(torch.randn(1, 4, 16, 16, generator=make), time, text) for time in (900, 500)]
    return unet, lambda number: unet(*given[number])


def joint(kind, make, rows=ROWS, cols=COLS):
    model = make().transformer
    given = [inputs(kind, model, rows=rows, cols=cols) for _ in range(2)]
    given[1]["hidden_states"] = given[1]["hidden_states"].flip(-1)
    given[1]["timestep"] = torch.tensor([0.25])
    return model, lambda number: model(**given[number])


MODELS = {
    "UNet": cross,
    "SD3": lambda: joint("SD3", sd3),
    "FLUX.1": lambda: joint("FLUX.1", flux),
    LARGE: lambda: joint("FLUX.1", flux, 20, 26),
}


def calls_of(model, call, passes=2, kinds=("cross", "joint")):
    """The query and key of each layer's calls, ``[heads, N, d]`` and ``[heads, T, d]``, scaled, in
    float64, as the model made them."""

    def given(query, key, _value, mask, scale):
        assert mask is None
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return query[0].double() * scale, key[0].double()

    with recorded(model, kinds, given) as record:
        for number in range(passes):
            call(number)
    return record


def shares(name, query, key, sides=("image", "text")):
    """The softmax over all keys, float64 ``[heads, queries, keys]``."""
    probs = (query @ key.mT).softmax(-1)
    if name == "UNet":
        return probs
    cells = query.shape[1] - 7
    place = dict(zip(("image", "text"), spans_of(name, cells), strict=True))
    return probs[:, place[sides[0]], place[sides[1]]]


def mean(name, calls):
    return torch.stack([shares(name, *call).mean(0) for call in calls]).mean(0)


def some_columns(name, calls):
    return mean(name, calls)[:, [4, 0]]


def each_step(name, calls):
    return torch.stack([shares(name, *call).mean(0) for call in calls])


def each_head(name, calls):
    return torch.stack([shares(name, *call) for call in calls]).mean(0)


def last(name, calls):
    return shares(name, *calls[-1]).mean(0)


def among_two(name, calls):
    whole = torch.stack([shares(name, *call) for call in calls])[..., [1, 3]]
    found = torch.zeros(*whole.shape[:-1], 77 if name == "UNet" else 7, dtype=torch.float64)
    found[..., [1, 3]] = whole / whole.sum(-1, keepdim=True)
    return found.mean((0, 1))


def of_the_text(name, calls):
    found = [shares(name, *call, sides=("text", "image")).mean(0) for call in calls]
    return torch.stack(found).mean(0).mT


def spread_twice(name, calls):
    """In the first pass of all: the first layer spreads its own map."""
    own = shares(name, *calls[0])
    pairs = shares(name, *calls[0], sides=("image", "image"))
    pairs = pairs / pairs.sum(-1, keepdim=True)
    return (pairs @ (pairs.mean(0) @ own.mean(0))).mean(0)


WAYS = {
    "by default": ({}, mean),
    "columns": ({"tokens": [4, 0]}, some_columns),
    "steps": ({"steps": "all"}, each_step),
    "last step": ({"steps": "last"}, last),
    "heads": ({"heads": "all"}, each_head),
    "among": ({"among": [[1, 3]]}, among_two),
    "gradient": ({"grad": True}, mean),
    "float64": ({"dtype": torch.float64}, mean),
    "the text's": ({"queries": "text", "keys": "image"}, of_the_text),
    "refined": ({"refine": "self"}, spread_twice),
}
ONLY_JOINT = ("the text's", "refined")
OF_LARGE = ("by default", "gradient", *ONLY_JOINT)


def has_way(name, way):
    return way in OF_LARGE if name == LARGE else name != "UNet" or way not in ONLY_JOINT


CASES = [(name, way) for name in MODELS for way in WAYS if has_way(name, way)]
BOTH = [case for case in CASES if LARGE not in case and "refined" not in case]


def assert_right(store, name, record, way):
    for layer, maps in store.maps.items():
        found = maps.detach()[0].double()
        cells = (-3, -2) if found.ndim == 3 or way in ("steps", "heads") else (-2,)
        found = found.flatten(*cells) if len(cells) == 2 else found
        expected = WAYS[way][1](name, record[layer])
        torch.testing.assert_close(found, expected.expand_as(found), atol=2e-6, rtol=0)
        if way == "refined":  # later layers spread what all made
            return


@pytest.mark.parametrize(("name", "way"), CASES)
def test_under_autocast_maps_are_those_of_what_the_model_made(name, way):
    options = WAYS[way][0]
    model, call = MODELS[name]()
    passes = 1 if way == "refined" else 2
    with torch.set_grad_enabled(way == "gradient"), bfloat16():
        record = calls_of(model, call, passes)
        plain = call(0)[0]
        with capture(model, **options) as store:
            watched = [call(number)[0] for number in range(passes)]
    assert torch.equal(plain, watched[0])
    assert plain.dtype == torch.bfloat16 or name == "SD3"
    assert_right(store, name, record, way)


@torch.no_grad()
def test_under_autocast_cells_are_those_of_what_the_model_made():
    """In self-attention, and read inside of it."""
    unet, call = cross()
    with bfloat16():
        record = calls_of(unet, call, kinds=("self",))
        with capture(unet, queries=CELLS) as store:
            for number in range(2):
                call(number)
        maps = dict(store.maps)
    layer = next(one for one in find_denoiser(unet).layers if one.kind == "self")
    found = maps[layer.name][0].flatten(0, 1).double()
    probs = mean("UNet", record[layer.name])
    cells = [row * 16 + col for row, col in CELLS]
    torch.testing.assert_close(found, probs[cells].mT, atol=2e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "at once"])
def test_under_autocast_the_model_itself_projects_another_text(waits):
    """Its key is rounded as the model's own are; the products are not."""
    unet, call = cross()
    states = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(3))
    options = {} if waits else {"steps": "all"}
    with bfloat16():
        record = calls_of(unet, call, 1)
        with capture(unet, text_states=states, **options) as store:
            call(0)
        for name, [(query, _)] in record.items():
            layer = unet.get_submodule(name)
            key = layer.to_k(states.to(torch.bfloat16))
            assert key.dtype == torch.bfloat16
            key = key[0].double().unflatten(-1, (layer.heads, -1)).transpose(0, 1)
            expected = (query @ key.mT).softmax(-1).mean(0)
            found = store.maps[name].flatten(0, -2).double()
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def given_to_functions(keys):
    make = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 5, 8, generator=make) * 3
    key = torch.randn(2, 3, keys, 8, generator=make) * 3
    return query, key, softmax_in_float64(query, key, None, None)


@pytest.mark.parametrize("keys", [7, 600])
def test_under_autocast_functions_of_ours_are_exact(keys):
    query, key, expected = given_to_functions(keys)
    total = torch.zeros(2, 5, keys)
    added = torch.zeros(2, 5, keys)
    shared = torch.zeros(2, 5, keys)
    scale = 1 / math.sqrt(8)
    with bfloat16(), torch.no_grad():
        probs = attention_probs(query, key)
        _, weights = attend(query, key, key)
        add_attention(total, query, key)
        recording.record_softmax(added, query, key, None, scale)
        of_rows = recording.logsumexp(query, key, None, scale)
        recording.add_share(shared, query, key, None, scale, of_rows)
    assert probs.dtype == torch.float32
    for found in (probs, weights):
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    for found in (total, added, shared):
        torch.testing.assert_close(found.double(), expected.sum(1), atol=1e-5, rtol=0)


def test_under_autocast_a_query_may_be_wider_than_its_key():
    """As where a model norms the query alone, in float32."""
    query, key, _ = given_to_functions(7)
    key = key.bfloat16()
    with bfloat16():
        probs = attention_probs(query, key)
    expected = softmax_in_float64(query, key, None, None)
    torch.testing.assert_close(probs.double(), expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_under_autocast_our_processor_shows_what_it_used():
    unet, call = cross()
    unet.set_attn_processor(TorchAttnProcessor())
    with bfloat16():
        plain = call(0)[0]
        with capture(unet) as store:
            assert torch.equal(call(0)[0], plain)
    for maps in store.maps.values():
        assert (maps.sum(-1) - 1).abs().max() < 4e-3  # probabilities in bfloat16


# -- inference mode: some passes run in it, others do not ------------------------------------------

MODES = {"inference": torch.inference_mode, "no grad": torch.no_grad, "grad": nullcontext}
ORDERS = [("inference", "no grad"), ("no grad", "inference"), ("inference", "grad")]


@pytest.mark.parametrize(("name", "way"), BOTH)
@pytest.mark.parametrize("order", ORDERS, ids=" then ".join)
def test_passes_may_run_in_inference_mode_and_without(name, way, order):
    model, call = MODELS[name]()
    with torch.no_grad():
        record = calls_of(model, call)
    with capture(model, **WAYS[way][0]) as store:
        for number, mode in enumerate(order):
            with MODES[mode]():
                call(number)
    assert_right(store, name, record, way)
    assert not any(maps.is_inference() for maps in store.maps.values())


@pytest.mark.parametrize("order", ORDERS, ids=" then ".join)
def test_layers_that_wait_may_begin_in_inference_mode(order):
    """Each then begins to wait when versions are counted, and some are joined."""
    unet = make_unet()
    make = torch.Generator().manual_seed(0)
    text = torch.randn(1, 77, 32, generator=make)
    samples = [torch.randn(1, 4, 16, 16, generator=make) for _ in range(4)]
    with torch.no_grad():
        record = calls_of(unet, lambda number: unet(samples[number], 500, text), 4)
    with capture(unet) as store:
        for number, sample in enumerate(samples):
            with MODES[order[number % 2]]():
                unet(sample, 500, text)
    assert_right(store, "UNet", record, "by default")


@pytest.mark.parametrize("order", ORDERS, ids=" then ".join)
def test_a_refined_run_may_begin_in_inference_mode(order):
    model, call = MODELS["SD3"]()
    with torch.no_grad(), capture(model, refine="self") as right:
        call(0), call(1)
    with capture(model, refine="self") as store:
        for number, mode in enumerate(order):
            with MODES[mode]():
                call(number)
    for name, maps in right.maps.items():
        assert maps.shape[1:3] == (ROWS, COLS)
        torch.testing.assert_close(store.maps[name], maps, atol=1e-6, rtol=0)
