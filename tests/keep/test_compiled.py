"""A compiled UNet under capture(): in its graphs, or eagerly, and as it was after it.

Where no graph is at stake, torch is told to run eagerly what is compiled.
"""

import copy
import shutil
import threading

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from helpers.capture_runs import run
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_small_unet
from torch._dynamo.utils import counters

from sdattn import CaptureError, CaptureWarning, capture
from sdattn.keep.recorders import Recorder

GENERATOR = torch.Generator().manual_seed(0)
SAMPLE = torch.randn(2, 4, 16, 16, generator=GENERATOR)
TEXT = torch.randn(2, 77, 32, generator=GENERATOR)
MASK = torch.arange(77).expand(2, 77) < torch.tensor([[5], [9]])
MID = "mid_block.attentions.0.transformer_blocks.0.attn2"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def called(model, **options):
    """The outputs of two calls, and the maps of a capture of them."""
    with capture(model, **options) as store:
        outputs = [model(SAMPLE * scale, 5, TEXT).sample.detach() for scale in (1, 2)]
    return outputs, dict(store.maps)


def assert_same_maps(found, expected):
    assert list(found) == list(expected)
    for name, maps in expected.items():
        assert found[name].dtype == maps.dtype
        torch.testing.assert_close(found[name], maps, atol=1e-6, rtol=0)


# -- what is recorded ------------------------------------------------------------------------------

KEPT = {
    "mean": {},
    "columns": {"tokens": [5, 2]},
    "all steps": {"steps": "all"},
    "one step": {"steps": [1]},
    "the last": {"steps": "last", "dtype": torch.float16},
    "self": {"kinds": ("cross", "self")},
    "some layers": {"layers": (8, "mid")},
}


@torch.no_grad()
@pytest.mark.parametrize("kept", tiered(KEPT, quick=3))
def test_what_is_recorded_is_what_an_observer_sees(kept, eagerly):
    unet = make_small_unet()
    outputs, expected = called(unet, **KEPT[kept])
    unet.compile()
    found, maps = called(unet, **KEPT[kept])
    assert all(map(torch.equal, found, outputs))
    assert_same_maps(maps, expected)


@pytest.mark.parametrize("branch", ["conditional", "both"])
def test_rows_of_a_pipeline_and_a_part_of_its_run(branch, eagerly):
    pipe = make_pipeline(unet=make_small_unet())
    stores = []
    for _ in range(2):
        with capture(pipe, branch=branch, steps=(0.5, 1.0)) as store:
            run(pipe, num_inference_steps=4)
        stores.append(store)
        pipe.unet.compile()
    assert_same_maps(stores[1].maps, stores[0].maps)
    assert stores[1].images == (2 if branch == "both" else 1)


@torch.no_grad()
def test_keys_that_a_mask_shuts_out(eagerly):
    """Others in each row, of which the guided second is kept."""
    pipe, found = make_pipeline(unet=make_small_unet()), []
    for _ in range(2):
        with capture(pipe, guidance="batch") as store:
            pipe.unet(SAMPLE, 5, TEXT, encoder_attention_mask=MASK)
        found.append(store.maps)
        pipe.unet.compile()
    assert_same_maps(found[1], found[0])
    assert found[1][MID][..., :9].all() and not found[1][MID][..., 9:].any()


@torch.no_grad()
def test_captures_of_a_compiled_model_nest_and_end_in_any_order(eagerly):
    unet = make_small_unet()
    before = unet.attn_processors
    _, expected = called(unet)
    unet.compile()
    first, second = capture(unet), capture(unet, kinds=("cross", "self"))
    stores = [first.__enter__(), second.__enter__()]
    for scale in (1, 2):
        unet(SAMPLE * scale, 5, TEXT)
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    for store in stores:
        assert_same_maps({name: store.maps[name] for name in expected}, expected)
    after = unet.attn_processors
    assert all(after[name] is before[name] for name in before)


@torch.no_grad()
def test_a_copy_of_the_model_is_not_watched(eagerly):
    unet = make_small_unet()
    unet.compile()
    with capture(unet) as store:
        unet(SAMPLE, 5, TEXT)
        other = copy.deepcopy(unet)
    assert len(store.maps) == 4
    assert not any(isinstance(one, Recorder) for one in other.attn_processors.values())


@torch.no_grad()
def test_a_layer_that_does_not_run_has_no_map(eagerly):
    unet = make_small_unet()
    unet.compile()
    unet.mid_block.forward = lambda sample, *_, **__: sample
    with pytest.warns(CaptureWarning, match="1 of 4.*layers"):
        _, maps = called(unet)
    assert len(maps) == 3 and MID not in maps


@torch.no_grad()
def test_a_processor_that_is_set_inside_is_watched(eagerly):
    unet = make_small_unet()
    _, expected = called(unet)
    unet.compile()
    with capture(unet) as store:
        unet(SAMPLE, 5, TEXT)
        unet.set_attn_processor(AttnProcessor2_0())
        with pytest.warns(CaptureWarning, match="were replaced inside"):
            unet(SAMPLE * 2, 5, TEXT)
    assert_same_maps(store.maps, expected)


@torch.no_grad()
def test_two_threads_are_not_mixed(eagerly):
    unet = make_small_unet()
    unet.compile()
    other = threading.Thread(target=lambda: unet(SAMPLE, 5, TEXT))
    with pytest.raises(CaptureError, match="thread.*compiled"):
        with capture(unet):
            unet(SAMPLE, 5, TEXT)
            other.start()
            other.join()


# -- what cannot be -------------------------------------------------------------------------------

EAGER = {
    "heads": {"heads": "all"},
    "a graph": {"grad": True},
    "chosen cells": {"queries": [(3, 12)]},
    "some columns": {"among": [[1, 2]]},
    "another text": {"text_states": TEXT[:1]},
    "a processor": {},
}


@pytest.mark.parametrize("kept", EAGER)
def test_what_cannot_be_recorded_is_observed_eagerly(kept):
    """torch compiles nothing here, since nothing compiled is called."""
    unet = make_small_unet()
    if kept == "a processor":
        unet.set_attn_processor(AttnProcessor())
    _, expected = called(unet, **EAGER[kept])
    unet.compile(fullgraph=True)
    with pytest.warns(CaptureWarning, match="UNet2DConditionModel.*compiled"):
        _, maps = called(unet, **EAGER[kept])
    assert_same_maps(maps, expected)


def test_what_is_compiled_anew_inside_stays(eagerly):
    unet = make_small_unet()
    unet.compile()
    with pytest.warns(CaptureWarning, match="is compiled"), capture(unet, heads="all"):
        unet.compile(backend="eager")
        anew = unet._compiled_call_impl
        unet(SAMPLE, 5, TEXT)
    assert unet._compiled_call_impl is anew


# -- graphs ---------------------------------------------------------------------------------------


def compiled(how, unet, **options):
    if how == "torch.compile(model)":
        return torch.compile(unet, **options)
    unet.compile_repeated_blocks(**options)
    return unet


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("how", tiered(["repeated blocks", "torch.compile(model)"], quick=0))
def test_a_compiled_model_stays_in_one_graph(how):
    torch._dynamo.reset()
    unet = make_small_unet()
    _, expected = called(unet)
    model = compiled(how, unet, backend="aot_eager", fullgraph=True)
    plain = [model(SAMPLE * scale, 5, TEXT).sample for scale in (1, 2)]
    counters.clear()
    outputs, maps = called(model)
    assert all(map(torch.equal, outputs, plain))
    assert_same_maps(maps, expected)
    made = counters["stats"]["unique_graphs"]
    assert made >= 1
    again, maps = called(model, tokens=[5, 2])  # other columns need no other graph
    assert all(map(torch.equal, again, plain))
    assert_same_maps(maps, {name: one[..., [5, 2]] for name, one in expected.items()})
    assert torch.equal(model(SAMPLE, 5, TEXT).sample, plain[0])
    assert counters["stats"]["unique_graphs"] == made
    assert not counters["graph_break"]


def make_unet_of_one_block():
    """Attention in the middle alone."""
    plain_blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return make_small_unet(attention_head_dim=4, **plain_blocks)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++ on a CPU")
def test_the_output_is_that_of_the_compiled_blocks():
    """By torch's own compiler, which takes seconds for each block: one, in the middle."""
    torch._dynamo.reset()
    unet = make_unet_of_one_block()
    _, expected = called(unet)
    unet.compile_repeated_blocks(fullgraph=True)
    plain = unet(SAMPLE, 5, TEXT).sample
    outputs, maps = called(unet)
    assert torch.equal(outputs[0], plain)
    assert torch.equal(unet(SAMPLE, 5, TEXT).sample, plain)
    assert list(maps) == [MID]
    for name, one in expected.items():
        torch.testing.assert_close(maps[name], one, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_model_that_is_compiled_inside_stays_compiled():
    torch._dynamo.reset()
    pipe = make_pipeline(unet=make_unet_of_one_block())
    with capture(pipe) as store:
        run(pipe)
    expected = dict(store.maps)
    counters.clear()
    with capture(pipe) as store:
        pipe.unet.compile(backend="eager")
        run(pipe)
    for name, one in expected.items():
        torch.testing.assert_close(store.maps[name], one, atol=1e-5, rtol=0)
    ours = ("PassHooks._begin", "PassHooks._end", "ObservingProcessor")
    breaks = counters["graph_break"]  # around the model, in watched layers
    assert all(any(name in reason for name in ours) for reason in breaks)
    assert any(ours[-1] in reason for reason in breaks)
