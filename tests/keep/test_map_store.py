"""What a store holds, how many bytes that is, and when it is freed."""

import gc
import weakref

import pytest
import torch
from helpers.capture_runs import run
from helpers.tiny_pipelines import make_pipeline

from sdattn import capture

MID = "mid_block.attentions.0.transformer_blocks.0.attn2"


def test_the_report_tells_what_was_seen(tiny_pipe):
    with capture(tiny_pipe) as store:
        run(tiny_pipe, num_images_per_prompt=3)
    text = store.report()
    for part in (
        "16 of 16 seen",
        "16x16, 8x8, 4x4, 2x2",
        "2, timesteps 501, 1",
        "unconditional | conditional in a batch of 6",
        "3, conditional",
    ):
        assert part in text


def test_much_memory_is_said_before_it_is_held(monkeypatch, caplog):
    monkeypatch.setattr("sdattn.keep.budget.MUCH", 1e6)
    pipe = make_pipeline()
    with capture(pipe) as store:
        run(pipe)
    assert not caplog.records
    pipe.unet.register_forward_hook(lambda *_: caplog.records.append(store.nbytes))
    with capture(pipe, steps="all", heads="all") as store:
        run(pipe)
    said, *held = caplog.records
    assert "will hold up to 2.6 MB by the end of this run of 2 model calls" in said.getMessage()
    assert held[1] == store.expected_nbytes


def test_self_attention_beside_chosen_tokens_keeps_every_cell():
    pipe = make_pipeline()
    with capture(pipe, kinds=("cross", "self"), layers="mid", tokens=[1, 2]) as store:
        run(pipe)
    shapes = {name[-5:]: tuple(one.shape) for name, one in store.maps.items()}
    assert shapes == {"attn1": (1, 2, 2, 4), "attn2": (1, 2, 2, 2)}
    assert store.n_keys == 77


@pytest.mark.slow
def test_maps_are_freed_with_their_store(tiny_pipe):
    """Not some time later: a long batch would hold the maps of many."""
    gc.collect()
    gc.disable()
    try:
        with capture(tiny_pipe) as store, capture(tiny_pipe, steps="all") as other:
            run(tiny_pipe)
        gone = [weakref.ref(one) for one in (store, other)]
        del store, other
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_a_store_is_one_line(tiny_pipe):
    with capture(tiny_pipe, steps=(0.5, 1.0)) as store:
        assert repr(store) == "MapStore(16 layers watched, nothing captured yet)"
        run(tiny_pipe)
    assert repr(store) == (
        "MapStore(16 of 16 layers, 1 image(s), 2 steps run, kept: steps (0.5, 1.0), heads mean, "
        f"{store.nbytes / 1e6:.2f} MB)"
    )


def test_a_layer_is_an_array_with_names_on_its_axes(tiny_pipe):
    options = {"steps": [0, 2], "heads": "all", "tokens": [1, 3]}
    with capture(tiny_pipe, layers="mid", **options) as store:
        run(tiny_pipe, num_inference_steps=3, num_images_per_prompt=2)
    found = store.to_xarray(MID)
    assert found.dims == ("image", "step", "head", "row", "col", "token")
    torch.testing.assert_close(torch.tensor(found.values), store.maps[MID], rtol=0, atol=0)
    assert [*found.step.values] == [0, 2] and [*found.token.values] == [1, 3]
    assert [*found.timestep.values] == [store.timesteps[0], store.timesteps[2]]
    assert [*found["head"].values] == [*range(store.maps[MID].shape[2])]
    assert [*found.row.values] == [0.25, 0.75]  # a grid of 2x2
    assert found.attrs == {"layer": MID, "place": "mid"}
    with pytest.raises(KeyError, match="layer.*'up'"):
        store.to_xarray("up")


def test_means_have_no_axis_of_steps_or_heads_and_keys_are_no_tokens(tiny_pipe):
    name = MID.replace("attn2", "attn1")
    with capture(tiny_pipe, layers="mid", kinds=("self",), dtype=torch.bfloat16) as store:
        run(tiny_pipe)
    found = store.to_xarray(name)
    assert found.dims == ("image", "row", "col", "key")
    assert found.shape == (1, 2, 2, 4) and found.dtype == "float32"
