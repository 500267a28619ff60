"""The end of a block: what is left in the model, and what a store goes on to hold."""

import gc
import pickle
import weakref

import pytest
import torch
from helpers.foreign import WIDTH, VideoTransformer
from helpers.joint_models import inputs
from helpers.sums import probabilities, running_pass, running_sum
from helpers.tiny_pipelines import make_pipeline, make_small_unet, make_unet
from helpers.transformer_rows import flux, sd3

from sdattn import CaptureError, capture
from sdattn.attention import plain
from sdattn.attention.calls import AttentionCall
from sdattn.attention.device_copies import HostCopy
from sdattn.keep import sums as sums_module
from sdattn.keep.map_store import CapturedMaps
from sdattn.look.attended import Softmax
from sdattn.models.denoiser import find_denoiser

CLOSE = {"atol": 1e-6, "rtol": 0}


def unet(make=make_unet):
    model = make()
    text = torch.randn(1, 77, 32, generator=torch.Generator().manual_seed(1))
    times = iter(range(900, 0, -1))
    return model, lambda size=16, **_: model(torch.ones(1, 4, size, size), next(times), text)


def joint(kind, make):
    model = make().transformer
    given = inputs(kind, model)
    return model, lambda: model(**given)


def states():
    return torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))


# What is captured of which model; predicates and texts would hold the model, or tensors of the run.
KINDS = {
    "by default": (unet, {}),
    "steps": (unet, {"steps": "all", "heads": "all"}),
    "a predicate": (unet, {"layers": lambda layer: layer.place == "mid"}),
    "cells": (unet, {"queries": [(0, 1)]}),
    "another text": (unet, {"text_states": states()}),
    "among": (unet, {"among": [[1, 3]]}),
    "joint": (lambda: joint("FLUX.1", flux), {}),
    "the text's": (lambda: joint("SD3", sd3), {"queries": "text"}),
    "refined": (lambda: joint("FLUX.1", flux), {"refine": "self", "depth": (0.5, 1.0)}),
}


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_store_holds_names_and_shapes_and_no_module(name):
    make, options = KINDS[name]
    model, call = make()
    layers = find_denoiser(model).layers
    with capture(model, **options) as store:
        for _ in range(3):
            call()
    known = {layer.name: layer for layer in layers}
    for layer in store.layers:
        before = known[layer.name]
        assert layer.module is None
        assert (layer.place, layer.kind) == (before.place, before.kind)
        assert layer.grid((8, 8)) == before.grid((8, 8)) and layer.heads == before.heads
    written = pickle.dumps(store)
    assert len(written) < 1.2 * store.nbytes + 40_000
    read = pickle.loads(written)
    assert list(read.maps) == list(store.maps) and len(store.maps) > 0
    for one, maps in store.maps.items():
        assert torch.equal(read.maps[one], maps)
    assert read.report() == store.report()

    gone = weakref.ref(model)
    del model, call, layers, known, before
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_a_store_of_a_model_of_no_family_holds_no_module():
    """Its layers are found while it runs."""
    torch.manual_seed(0)
    model = VideoTransformer()
    given = torch.randn(1, 4, 3, 4, 6), torch.randn(1, 7, WIDTH)
    with capture(model, text="encoder_hidden_states", grid=(3, 4, 6)) as store:
        model(*given)
    assert store.maps and all(layer.module is None for layer in store.layers)
    assert len(pickle.dumps(store)) < 1.2 * store.nbytes + 40_000
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_store_of_a_run_can_be_read_where_its_pipeline_is_not():
    pipe = make_pipeline()
    options = {"num_inference_steps": 3, "height": 128, "width": 128, "output_type": "latent"}
    with capture(pipe) as store:
        pipe("a red cat", **options)
    read = pickle.loads(pickle.dumps(store))
    [found] = read.heatmaps(pipe.tokenizer, "a red cat")
    [right] = store.heatmaps()
    assert torch.equal(found["cat"].values, right["cat"].values)


def left_in(model):
    """Hooks, and what each layer holds."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return hooks, [m.processor for m in model.modules() if hasattr(m, "processor")]


class OutOfMemory(torch.OutOfMemoryError):
    """Simulated."""


def fail(*_given, **_options):
    raise OutOfMemory("the maps'")


ENDS = {
    "a pass": lambda model: model.up_blocks[1],
    "its last layer": lambda model: find_denoiser(model).layers[-1].module,
    "its end": lambda model: model.conv_out,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("options", [{}, {"steps": "all"}, {"heads": "all"}], ids=str)
@torch.no_grad()
def test_where_memory_ends_the_models_own_error_is_raised_and_nothing_stays(
    end, options, monkeypatch
):
    """From there on there is none for maps either."""
    model, call = unet()
    before = left_in(model)

    def full(*_):
        monkeypatch.setattr(Softmax, "add_to", fail)
        monkeypatch.setattr(Softmax, "probs", fail)
        raise OutOfMemory("the model's")

    with pytest.raises(OutOfMemory, match="the model's"):
        with capture(model, **options) as store:
            call()
            hook = ENDS[end](model).register_forward_pre_hook(full)
            call()
    hook.remove()
    assert left_in(model) == before
    assert len(store.passes) == 1 and all(layer.module is None for layer in store.layers)
    monkeypatch.undo()
    with capture(model, **options) as again:
        call()
    assert list(again.maps) == list(store.maps)


@torch.no_grad()
def test_where_memory_ends_in_what_waited_the_store_says_so(monkeypatch):
    """The hook behind the model is where layers are added up together."""
    model, call = unet()
    before = left_in(model)
    with capture(model) as right:
        call()
    with pytest.raises(OutOfMemory, match="the maps'"):
        with capture(model) as store:
            call()
            monkeypatch.setattr(plain, "add_softmax", fail)
            call()
    assert left_in(model) == before and len(store.passes) == 1
    for name in right.maps:
        with pytest.raises(CaptureError, match=f"{name}.*Enter capture"):
            store.maps[name]


@pytest.mark.parametrize("options", [{"dtype": torch.float64}, {"queries": [(0, 1)]}], ids=str)
@torch.no_grad()
def test_a_map_that_was_added_in_part_does_not_count(options, monkeypatch):
    """Layers that do not wait; the model's call is made again when there is memory."""
    model, call = unet()
    add_now = sums_module.Sum.add_now

    def add_and_fail(self, part, attended):
        add_now(self, part, attended)
        fail()

    with capture(model, **options) as store:
        call()
        with monkeypatch.context() as patch, pytest.raises(OutOfMemory):
            patch.setattr(sums_module.Sum, "add_now", add_and_fail)
            call()
        call()
    first, *others = store.maps
    with pytest.raises(CaptureError, match=f"error after {first} had run"):
        store.maps[first]
    assert all(store.maps[name] is not None for name in others)


@torch.no_grad()
def test_maps_that_could_not_be_added_when_they_were_read_are_said(monkeypatch):
    model, call = unet()
    read = []

    def reads(*_):
        if len(store.passes) == 2:
            with monkeypatch.context() as patch, pytest.raises(OutOfMemory):
                patch.setattr(plain, "add_softmax", fail)
                read.append(store.maps[name])

    last = find_denoiser(model).layers[-1].module
    with capture(model) as store:
        name = store.layers[0].name
        last.register_forward_hook(reads)
        call()
        call()
    assert not read
    with pytest.raises(CaptureError, match=f"{name} could not be added up.*Enter capture"):
        store.maps[name]


@pytest.mark.parametrize("step", ["drop_pass", "close"])
@torch.no_grad()
def test_nothing_stays_where_a_step_of_the_end_fails(step, monkeypatch):
    model, call = unet(make_small_unet)
    before = left_in(model)
    monkeypatch.setattr(CapturedMaps, step, fail)
    with pytest.raises(OutOfMemory, match="the maps'"):
        with capture(model):
            monkeypatch.undo()
            call()
            monkeypatch.setattr(CapturedMaps, step, fail)
    assert left_in(model) == before


@torch.no_grad()
def test_nothing_stays_where_the_end_refuses_the_run():
    model, _ = unet(make_small_unet)
    before = left_in(model)
    with pytest.raises(CaptureError, match="never called"):
        with capture(model) as store:
            pass
    assert left_in(model) == before and all(layer.module is None for layer in store.layers)


# -- a pass that did not end, and then one of other shapes -----------------------------------------


def sized(rows, cols, batch=1, columns=77):
    """A UNet's call."""
    make = torch.Generator().manual_seed(rows)
    text = torch.randn(batch, columns, 32, generator=make)
    return lambda model, time: model(torch.ones(batch, 4, rows, cols), time, text)


def flux_sized(rows, cols):
    def call(model, time):
        given = inputs("FLUX.1", model, rows=rows, cols=cols)
        return model(**{**given, "timestep": torch.tensor([time / 1000])})

    return call


SHAPES = {
    "smaller": (sized(32, 48), sized(16, 24)),
    "larger": (sized(16, 16), sized(24, 16)),
    "fewer images": (sized(16, 16, batch=3), sized(16, 16)),
    "a shorter text": (sized(16, 16), sized(16, 16, columns=20)),
}
OPTIONS = ({}, {"steps": "all"}, {"layers": 8}, {"heads": [1], "tokens": [3, 1]})
OF_JOINT = ({}, {"refine": "self"}, {"refine": "self", "depth": (0.5, 1.0)}, {"queries": "text"})
BLOCKS = ("transformer_blocks.1", "single_transformer_blocks.1")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES)
def test_a_run_may_begin_again_with_other_shapes(shapes, options):
    assert_begins_again(make_unet(), "up_blocks.2", *SHAPES[shapes], options)


@pytest.mark.parametrize("options", OF_JOINT, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_joint_run_may_begin_again_with_other_shapes(block, options):
    calls = flux_sized(4, 6), flux_sized(3, 5)
    assert_begins_again(flux().transformer, block, *calls, options)


@torch.no_grad()
def assert_begins_again(model, place, first, second, options):
    """Its first call dies in the middle layers, of too large an image perhaps."""
    with capture(model, **options) as right:
        second(model, 900)
        second(model, 500)
    with capture(model, **options) as store:
        hook = model.get_submodule(place).register_forward_pre_hook(fail)
        with pytest.raises(OutOfMemory):
            first(model, 950)
        hook.remove()
        second(model, 900)
        second(model, 500)
    assert store.timesteps == right.timesteps and store.seen == right.seen
    assert len(store.maps) > 1 and store.nbytes == right.nbytes
    for name, maps in right.maps.items():
        torch.testing.assert_close(store.maps[name], maps, **CLOSE)


# -- maps on their way from a GPU ------------------------------------------------------------------


def test_a_map_on_its_way_may_be_read_in_inference_mode(monkeypatch):
    monkeypatch.setattr(sums_module, "is_gpu_to_cpu", lambda *_: True)
    held = running_sum(device="cpu")
    given = [probabilities(seed) for seed in range(3)]
    for one in given:
        held.running = running_pass()
        held.take(AttentionCall(probs=one))
        if one is given[0]:
            with torch.inference_mode():
                held.map()
    right = torch.stack(given).mean((0, 2))
    torch.testing.assert_close(held.map().flatten(1, 2).double(), right, **CLOSE)


class OnItsWay(HostCopy):
    """A copy to the host, which would be waited for."""

    def take(self):
        assert not self.is_broken
        return super().take()


@pytest.mark.parametrize("steps", ["mean", "last", "all"])
def test_a_map_on_its_way_in_a_pass_that_did_not_end_is_dropped(steps, monkeypatch):
    monkeypatch.setattr(sums_module, "is_gpu_to_cpu", lambda *_: True)
    held = running_sum(steps=steps, device="cpu")
    held.copy = OnItsWay()
    held.copy.is_broken = False
    first, second = (probabilities(seed) for seed in (0, 1))
    held.take(AttentionCall(probs=first))
    broken = held.running = running_pass()
    held.take(AttentionCall(probs=second))
    held.copy.is_broken = True  # the device answers no more
    held.drop(broken)
    held.copy.is_broken = False
    assert held.calls == 1
    found = held.map().flatten(-3, -2).double()
    torch.testing.assert_close(found, first.mean(1).view_as(found), **CLOSE)
