"""One layer that records what it attends to, in a graph and beside it, against float64."""

import copy
from threading import Thread, get_ident

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from helpers.sums import running_pass
from helpers.tiny_pipelines import make_small_unet

from sdattn import CaptureError, MapStore, TorchAttnProcessor
from sdattn.follow.installer import Installation
from sdattn.keep.keep import Keep
from sdattn.keep.recorders import Recorded, Recorder, Recorders, can_record
from sdattn.look.attended import Attended
from sdattn.models.denoiser import find_denoiser

HEADS, CELLS, KEYS, WIDTH = 2, 6, 5, 8
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(3, CELLS, WIDTH, generator=GENERATOR)
TEXT = torch.randn(3, KEYS, 12, generator=GENERATOR)
CROSS = ["mid_block.attentions.0.transformer_blocks.0.attn2"]
MASKS = {
    "all keys": None,
    "a row each": torch.arange(KEYS).expand(3, KEYS) < torch.tensor([[1], [3], [5]]),
}


def make_layer():
    torch.manual_seed(1)
    layer = Attention(WIDTH, 12, heads=HEADS, dim_head=4, processor=AttnProcessor2_0())
    return layer.requires_grad_(False)


def softmax(layer, mask=None):
    """Float64 ``[rows, heads, cells, keys]``."""
    split = [
        (x.double() @ to.weight.double().T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for x, to in ((HIDDEN, layer.to_q), (TEXT, layer.to_k))
    ]
    scores = split[0] @ split[1].mT / 4**0.5
    return (scores if mask is None else scores.where(mask[:, None, None], -torch.inf)).softmax(-1)


def added(mask):
    """As a UNet hands a mask to its layers: what is added to the scores."""
    return None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_rows_are_summed_over_heads_and_calls(compiled, mask):
    layer, mask = make_layer(), MASKS[mask]
    plain = layer(HIDDEN, encoder_hidden_states=TEXT, attention_mask=added(mask))
    recorder = Recorder(layer.processor)
    layer.set_processor(recorder)
    recorder.sums, recorder.rows = torch.zeros(2, CELLS, KEYS), torch.tensor([2, 0])
    run = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    for _ in range(2):
        output = run(HIDDEN, encoder_hidden_states=TEXT, attention_mask=added(mask))
        assert torch.equal(output, plain)
    expected = 2 * softmax(layer, mask)[[2, 0]].sum(1)
    torch.testing.assert_close(recorder.sums.double(), expected, atol=1e-5, rtol=0)
    torch._dynamo.reset()


@torch.no_grad()
def test_nothing_is_recorded_where_there_is_no_sum():
    layer = make_layer()
    plain = layer(HIDDEN, encoder_hidden_states=TEXT)
    layer.set_processor(Recorder(layer.processor))
    assert torch.equal(layer(HIDDEN, encoder_hidden_states=TEXT), plain)
    assert type(copy.deepcopy(layer).processor) is AttnProcessor2_0


@torch.no_grad()
def test_another_shape_than_was_expected_is_refused():
    unet = make_small_unet()
    layer = unet.get_submodule(CROSS[0])
    recorder = Recorder(layer.processor)
    recorder.sums, recorder.rows = torch.zeros(1, 16, 76), torch.tensor([1])
    layer.set_processor(recorder)
    with pytest.raises(RuntimeError, match="64 queries.*77 keys"):
        unet(torch.zeros(2, 4, 16, 16), 5, torch.zeros(2, 77, 32))


@torch.no_grad()
def recorded(calls=2, keep=None):
    """A store, what is recorded, and the UNet whose layers do."""
    unet = make_small_unet()
    layers = [layer for layer in find_denoiser(unet).layers if layer.name in CROSS]
    store = MapStore(layers, Keep.of() if keep is None else keep)
    main = get_ident()
    found, installed = Recorders(lambda: get_ident() == main), Installation()
    found.put(installed, unet, layers)
    for number in range(calls):
        now = running_pass(2, rows=(1,), size=(16, 16), n_text=77)
        store.begin_pass(now)
        found.begin(layers, now, torch.device("cpu"))
        unet(torch.zeros(2, 4, 16, 16), number, torch.ones(2, 77, 32))
        found.end(store)
        store.end_pass()
    return store, found, unet, installed


def test_what_was_recorded_goes_to_the_store_after_each_pass():
    store, found, unet, installed = recorded()
    held = store.sums[CROSS[0]]
    assert held.calls == 2 and found._of[CROSS[0]].sums.shape == (1, 64, 77)
    # all keys are one text state, so each is paid the same
    torch.testing.assert_close(held.map(), torch.full((1, 8, 8, 77), 1 / 77), atol=1e-6, rtol=0)
    installed.remove()
    assert not any(isinstance(one, Recorder) for one in unet.attn_processors.values())
    found.close()
    assert found._of[CROSS[0]].sums is None


@torch.no_grad()
def test_passes_may_run_in_inference_mode_and_without():
    store, found, unet, _ = recorded(calls=0)
    layers = store.layers
    for number, mode in enumerate((True, False, True)):
        now = running_pass(2, rows=(1,), size=(16, 16), n_text=77)
        with torch.inference_mode(mode):
            store.begin_pass(now)
            found.begin(layers, now, torch.device("cpu"))
            unet(torch.zeros(2, 4, 16, 16), number, torch.ones(2, 77, 32))
            found.end(store)
            store.end_pass()
    held = store.sums[CROSS[0]]
    assert held.calls == 3
    torch.testing.assert_close(held.map(), torch.full((1, 8, 8, 77), 1 / 77), atol=1e-6, rtol=0)


def test_passes_that_are_not_kept_are_not_handed_on():
    store, *_ = recorded(calls=3, keep=Keep.of(steps=[1]))
    assert store.sums[CROSS[0]].calls == 1 and len(store.passes) == 3


def test_a_layer_that_is_observed_now_is_forgotten():
    store, found, *_ = recorded(calls=1)
    found.forget(store.layers[0])
    found.begin(store.layers, store.passes[0], torch.device("cpu"))
    found.end(store)
    assert store.sums[CROSS[0]].calls == 1


def test_another_thread_is_refused_where_there_are_recorders():
    Recorders(
        lambda: False
    ).check()  # of a model that runs eagerly: its observers know their thread
    _, found, unet, _ = recorded()
    found.check()
    thread = Thread(target=unet, args=(torch.zeros(2, 4, 16, 16), 5, torch.ones(2, 77, 32)))
    thread.start()
    thread.join()
    with pytest.raises(CaptureError, match="thread.*compiled"):
        found.check()


@pytest.mark.parametrize(
    ("options", "processor", "expected"),
    [
        ({}, AttnProcessor2_0, True),
        ({"steps": "all", "tokens": [1], "device": "cpu"}, AttnProcessor2_0, True),
        ({"heads": "all"}, AttnProcessor2_0, False),
        ({"grad": True}, AttnProcessor2_0, False),
        ({"among": [[0]]}, AttnProcessor2_0, False),
        ({}, AttnProcessor, False),
        ({}, TorchAttnProcessor, False),
    ],
)
def test_what_can_be_recorded(options, processor, expected):
    unet = make_small_unet()
    unet.set_attn_processor(processor())
    layers = [layer for layer in find_denoiser(unet).layers if layer.kind == "cross"]
    assert can_record(unet, layers, Keep.of(**options)) is expected


def test_of_sums_columns_and_rows_can_be_had_and_no_heads():
    sums = torch.rand(2, CELLS, KEYS, generator=GENERATOR)
    attended = Recorded(sums, HEADS)
    assert torch.equal(attended.add_to(None, [3, 0]), sums[..., [3, 0]])
    total = torch.ones(2, CELLS, KEYS)
    assert torch.equal(attended.add_to(total, None), sums + 1) and attended.sums is sums
    assert torch.equal(next(attended.head_sums(None)), sums)
    video = attended.together(2)
    assert (video.batch, video.cells) == (1, 2 * CELLS)
    assert torch.equal(video.add_to(None, None), sums.flatten(0, 1)[None])
    assert not isinstance(attended, Attended)
