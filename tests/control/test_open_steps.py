"""What a store says, when it is read, of calls that no step holds and of passes that share one.

The right answer is in each case a store that was told, or that counted, where its steps end.
"""

import pytest
import torch
from helpers.bridges import WORDS, cross, same
from helpers.chain_runs import make_pipe
from helpers.foreign_code import SeedProcessor, drawn

from sdattn import AttentionStore, CaptureError, TorchAttnProcessor

PASS = ["down"] * 6 + ["mid"] + ["up"] * 9  # where the cross-attention of make_unet() calls from


def shown(store, places, seed=0):
    """Call a store from these places, each with a map of its own, and return the maps."""
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.rand(2, 4, 3, generator=generator) for _ in places]
    for place, one in zip(places, maps, strict=True):
        store(one, True, place)
    return maps


def reads(store):
    return store.get_average_attention, store.heatmaps, lambda: store.last_step


def refused(store, message):
    for read in reads(store):
        with pytest.raises(CaptureError, match=message):
            read()


def test_a_store_that_is_alone_says_how_many_layers_called_how_often():
    store = AttentionStore()
    shown(store, PASS)
    refused(store, r"holds 16 calls, and was attached to no model.*store\.attach\(pipe\)")
    shown(store, 2 * PASS)
    refused(store, r"holds 48 calls for 16 layers.*attach it, or call between_steps\(\)")
    # and fills as the seed's store does
    assert {key: len(maps) for key, maps in store.step_store.items() if maps} == {
        "down_cross": 18, "mid_cross": 3, "up_cross": 27,
    }  # fmt: skip
    store.reset()
    shown(store, PASS)
    refused(store, "holds 16 calls, and")


@pytest.mark.parametrize("counted", [None, 32])
def test_a_loop_may_end_the_steps(counted):
    """Of a store that is alone, and of one that was told of twice the layers that call it."""
    store = AttentionStore(guidance=None)
    store.num_att_layers = counted or store.num_att_layers
    steps = []
    for number in range(3):
        steps.append(shown(store, PASS, seed=number))
        store.between_steps()
    assert (store.cur_step, store.cur_att_layer) == (3, 0)
    assert store.step_store == store.get_empty_store()
    mean = torch.stack([torch.stack(maps) for maps in steps]).mean(0)
    for held in (store.get_average_attention(), store.get_average_full_attention()):
        found = [m for place in ("down", "mid", "up") for m in held[f"{place}_cross"]]
        torch.testing.assert_close(torch.stack(found), mean)
    last = [m for maps in store.last_step.values() for m in maps]
    assert all(map(torch.equal, last, steps[-1]))
    shown(store, PASS[:4])
    refused(store, "holds 4 calls")


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (1, r"16 calls for 32 layers.*last step did not end.*between_steps\(\)"),
        (2, r"32 calls for 16 layers.*counted 32 calls as a step.*attach it.*between_steps\(\)"),
        (3, "48 calls for 16 layers"),
        (4, "64 calls for 16 layers"),
    ],
)
def test_a_store_that_was_told_of_more_layers_than_call(passes, message):
    store = AttentionStore(guidance=None)
    store.num_att_layers = 32
    shown(store, passes * PASS)
    assert store.cur_step == passes // 2
    refused(store, message)
    store.reset()
    shown(store, 2 * [place for place in PASS for _ in range(2)])
    assert store.cur_step == 2
    assert store.get_average_attention()


@pytest.mark.parametrize("way", ["passes", "set"])
def test_two_passes_a_step_are_told_apart(way):
    store = AttentionStore(guidance="passes" if way == "passes" else None)
    store.num_att_layers = 16
    if way == "set":
        store.num_uncond_att_layers = 16
    shown(store, 4 * PASS)
    assert store.cur_step == 2
    assert len(store.last_step["up_cross"]) == 9
    shown(store, PASS)
    refused(store, "16 calls for 32 layers")
    store.reset()
    store.num_att_layers, store.num_uncond_att_layers = 24, 24
    shown(store, 3 * PASS)
    refused(store, "for 16 layers")


def test_joint_layers_reach_their_places_in_order_too():
    store = AttentionStore()
    shown(store, (["double"] * 2 + ["single"] * 3) * 2)
    refused(store, "10 calls for 5 layers")


def test_a_place_that_no_model_has_is_told():
    store = AttentionStore()
    store.num_att_layers = 1
    shown(store, ["sideways"])
    refused(store, "from place 'sideways', not .*'down'")


def ending(store):
    def callback(_pipe, _step, _t, tensors):
        store.between_steps()
        return tensors

    return callback


@pytest.mark.slow
def test_heatmaps_of_a_store_whose_steps_a_callback_ends():
    """As those of an attached store, once the size and the images are told."""
    pipe = make_pipe()
    attached = AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(TorchAttnProcessor(attached))
    drawn(pipe, WORDS)
    expected = attached.heatmaps()[0]
    attached.remove()
    alone = AttentionStore(guidance="batch")
    names = pipe.unet.attn_processors
    pipe.unet.set_attn_processor({n: SeedProcessor(alone, n.split("_")[0]) for n in names})
    drawn(pipe, WORDS, callback_on_step_end=ending(alone))
    for maps in (alone.get_average_attention(), alone.get_average_full_attention()):
        means = {key: kept for key, kept in maps.items() if kept}
        same(means, cross(attached.get_average_full_attention()), exact=False)
    assert expected["cat"].values.shape == (16, 16)


def test_steps_of_other_shapes_are_forgotten_with_the_rest():
    store = AttentionStore(guidance=None)
    for cells in (4, 16):
        store(torch.rand(2, cells, 3), True, "down")
        store.between_steps()
    refused(store, r"different shapes. Call store.reset\(\)")
    store.reset()
    steps = []
    for number in range(2):
        steps += shown(store, ["down"], seed=number)
        store.between_steps()
    [mean] = store.get_average_attention()["down_cross"]
    torch.testing.assert_close(mean, (steps[0] + steps[1]) / 2)
