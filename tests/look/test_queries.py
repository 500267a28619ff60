"""Where chosen cells looked, and the text: options, what is kept, and spots, in float64."""

import math

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from helpers.bilinear import stretch
from helpers.capture_runs import assert_untouched, run
from helpers.joint_parity import sharp_inputs, sharp_model, spans_of
from helpers.matrix_oracle import recorded
from helpers.sums import probabilities, running_pass, running_sum
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import sd3

from sdattn import CaptureError, TorchAttnProcessor, capture
from sdattn.attention.calls import AttentionCall
from sdattn.look.queries import Queries
from sdattn.models.denoiser import find_denoiser
from sdattn.models.layers import AttentionLayer

SIZE, CELLS = (9, 15), [(5, 14), (8, 2)]  # halved three times, rounding up: 5x8, 3x4, 2x2
GRIDS = {135: (9, 15), 40: (5, 8), 12: (3, 4), 4: (2, 2)}
LAYER = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
NEAR = {"atol": 1e-5, "rtol": 0}


def inputs(size=SIZE, scale=3.0):
    generator = torch.Generator().manual_seed(3)
    return scale * torch.randn(1, 4, *size, generator=generator), 5, torch.ones(1, 77, 32)


def looks(probs):
    """Their maps, ``[..., heads, rows, cols, cells]``, out of ``[..., heads, N, N]``."""
    rows, cols = GRIDS[probs.shape[-1]]
    down, right = rows / SIZE[0], cols / SIZE[1]  # where a chosen cell has its centre
    chosen = [int((row + 0.5) * down) * cols + int((col + 0.5) * right) for row, col in CELLS]
    return probs[..., chosen, :].mT.unflatten(-2, (rows, cols))


NO_CELLS = ([], 3, "cells", [3], [(1, 2, 3, 4)], [(1,)], [(1, 2), (0, 1, 2)], [(1, 2), (1, 2)])
NO_CELLS += ([(-1, 2)], [(True, 2)], [(1.5, 2)], [("1", 2)], (1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({"queries": given}, "queries") for given in NO_CELLS],
        ({"keys": "image"}, "cells"),
        ({"keys": "self"}, "keys"),
        ({"queries": CELLS, "keys": "text"}, "keys"),
        ({"queries": CELLS, "tokens": [1]}, "tokens"),
        ({"queries": "text", "keys": "text", "frames": [0]}, "frames"),
        ({"queries": [(3.0, 4.0)]}, "fraction of the image's side"),
        ({"queries": torch.tensor([[3.0, 4.0]])}, "fraction of the image's side"),
        ({"queries": torch.ones(1, 2, 2)}, "list of different cells"),
        ({"queries": CELLS, "kinds": ("cross",)}, "cross"),
        ({"queries": "text", "kinds": ("self",)}, "self"),
    ]
    + [
        ({"queries": queries, **more}, next(iter(more)))
        for queries in (CELLS, "text")
        for more in (
            {"refine": "self"},
            {"among": [[1]]},
            {"space": "output"},
            {"text_states": torch.ones(1, 3, 64)},
        )
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_refused(options, message):
    model = sharp_model("SD3")
    before = dict(model.attn_processors)
    with pytest.raises((ValueError, TypeError), match=message), capture(model, **options):
        pass
    assert all(model.attn_processors[name] is one for name, one in before.items())


def test_the_text_of_a_unet_does_not_attend(tiny_unet):
    with pytest.raises(ValueError, match="queries='text'.*UNet2DConditionModel.*joint"):
        capture(tiny_unet, queries="text").__enter__()


@pytest.mark.parametrize("cell", [(9, 2), (2, 15), (0, 1, 2)])
def test_cells_outside_the_latent_are_refused(tiny_unet, cell):
    before = tiny_unet.attn_processors
    with pytest.raises(ValueError, match="9x15"), capture(tiny_unet, queries=[cell]):
        tiny_unet(*inputs())
    assert_untouched(tiny_unet, before)


def test_a_latent_that_nobody_knows_is_asked_for():
    held = running_sum(kind="self", running=running_pass(size=None), queries=[(0, 1)])
    with pytest.raises(ValueError, match="latent_size"):
        held.take(AttentionCall(probs=probabilities(0, keys=4)))


@torch.no_grad()
def test_cells_of_grids_that_do_not_divide_and_their_spots(tiny_unet):
    with recorded(tiny_unet, ("self",)) as record, capture(tiny_unet, queries=CELLS) as store:
        tiny_unet(*inputs())
    layers, spots = [], store.spots()
    for name, calls in record.items():
        maps = looks(calls[0]).mean(1)
        torch.testing.assert_close(store.maps[name].double(), maps, **NEAR)
        layers.append([maps[0, ..., i] * maps.shape[1] * maps.shape[2] for i in range(2)])
    assert {layer[0].shape for layer in layers} == {*GRIDS.values()}
    assert [len(image) for image in spots] == [2]
    for i, (cell, spot) in enumerate(zip(CELLS, spots[0], strict=True)):
        fine = [torch.tensor(stretch(layer[i].numpy(), SIZE)) for layer in layers]
        expected = torch.stack(fine).mean(0) / math.prod(SIZE)
        torch.testing.assert_close(spot.values.double(), expected, atol=1e-6, rtol=0)
        assert spot.label == str(cell) and spot.columns == (i,)
    with capture(tiny_unet, queries=CELLS) as store:
        tiny_unet(*inputs((16, 16)))
    assert all(float(spot.values.sum()) == pytest.approx(1, abs=1e-5) for spot in store.spots()[0])


@pytest.mark.parametrize("branch", ["conditional", "unconditional", "both"])
@pytest.mark.slow
def test_steps_heads_and_branches_are_slices_of_everything(branch):
    pipe, names = make_pipeline(), []
    options = {"queries": CELLS, "branch": branch}
    with (
        recorded(pipe.unet, ("self",)) as record,
        capture(pipe, steps="all", heads="all", **options) as every,
        capture(pipe, steps=[1], heads=[1], dtype=torch.float64, device="cpu", **options) as some,
        capture(pipe, dtype=torch.float16, **options) as half,
    ):
        run(pipe, ["a red cat", "a dog"], height=72, width=120, num_inference_steps=3)
    wanted = {"conditional": [2, 3], "unconditional": [0, 1], "both": [0, 1, 2, 3]}[branch]
    for name, calls in record.items():
        maps = looks(torch.stack(calls, 1)[wanted])
        names.append(name)
        torch.testing.assert_close(every.maps[name].double(), maps, **NEAR)
        torch.testing.assert_close(some.maps[name], maps[:, [1]][:, :, [1]], **NEAR)
        assert half.maps[name].dtype == torch.float16
        found = half.maps[name].double()
        torch.testing.assert_close(found, maps.mean((1, 2)), atol=1e-3, rtol=0)
    assert set(names) == set(every.maps) and len(names) == 16
    means = zip(every.spots(), half.spots(), strict=True)
    for one, other in ((a, b) for image in means for a, b in zip(*image, strict=True)):
        torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=0)


def test_a_loss_on_a_spot_reaches_the_latents(tiny_unet):
    """As through a softmax that is written out, in a processor that makes probabilities."""
    tiny_unet.get_submodule(LAYER).set_processor(TorchAttnProcessor())
    made, grads = [], []
    tiny_unet.get_submodule(LAYER).processor.watchers.append(lambda call: made.append(call.probs))
    for explicit in (True, False):
        latents, *rest = inputs()
        latents.requires_grad_()
        if not explicit:
            tiny_unet.get_submodule(LAYER).set_processor(AttnProcessor2_0())
        with capture(tiny_unet, queries=CELLS, grad=True) as store:
            tiny_unet(latents, *rest)
        maps = looks(made[0]).mean(1) if explicit else store.maps[LAYER]
        (maps[..., 1] ** 2).sum().backward()
        grads.append(latents.grad)
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(*grads, atol=1e-4 * float(grads[0].abs().max()), rtol=0)


@torch.no_grad()
def test_what_a_controller_left_of_self_attention_is_shown(tiny_unet):
    used = {}

    def edit(probs, is_cross, _place):
        if not is_cross:
            probs[:, 0] = 0.25
            probs[..., 1] = 0

    for layer in find_denoiser(tiny_unet).layers:
        made = TorchAttnProcessor(edit, layer.place)
        made.watchers.append(lambda call, name=layer.name: used.update({name: call.probs}))
        layer.module.set_processor(made)
    with capture(tiny_unet, queries=CELLS, heads="all") as store:
        tiny_unet(*inputs())
    for name, maps in store.maps.items():
        assert torch.equal(maps, looks(used[name]))


def test_frames_of_a_video_are_kept_for_the_cells_that_are_looked_at():
    """All frames as one row of the batch; and each frame as a row of its own."""
    probs = probabilities(1, cells=8, keys=8)
    options = {"kind": "self", "frames": [1]}
    held = running_sum(running=running_pass(size=(2, 2, 2)), queries=[(0, 1, 0)], **options)
    held.take(AttentionCall(probs=probs))
    expected = probs.mean(1)[:, 2].unflatten(-1, (2, 2, 2))[:, [1], ..., None]
    torch.testing.assert_close(held.map().double(), expected, **NEAR)


@torch.no_grad()
def test_the_text_looks_at_the_image_and_at_itself():
    model = sharp_model("SD3")
    image, text = spans_of("SD3")
    options = {"steps": "all", "heads": "all", "queries": "text"}
    with (
        recorded(model, ("joint",)) as record,
        capture(model, **options, tokens=[5, 0]) as store,
        capture(model, **options, keys="text") as inside,
        capture(model, queries=[(2, 4)]) as spots,
    ):
        model(**sharp_inputs("SD3", model))
    for name, [probs] in record.items():
        probs = probs[:, None]
        seen = probs[..., text, image][..., [5, 0], :].mT.unflatten(-2, (3, 5))
        torch.testing.assert_close(store.maps[name].double(), seen, **NEAR)
        torch.testing.assert_close(inside.maps[name].double(), probs[..., text, text], **NEAR)
    name = next(iter(store.maps))
    assert store.to_xarray(name).dims == ("image", "step", "head", "row", "col", "token")
    assert [*store.to_xarray(name).token.values] == [5, 0]
    assert inside.to_xarray(name).dims == ("image", "step", "head", "query", "token")
    assert spots.to_xarray(name).dims == ("image", "row", "col", "query")
    assert "3x5" in spots.report() and "grids      7\n" in inside.report()
    for other in (store, inside):
        with pytest.raises(ValueError, match="queries="):
            other.spots()


def test_heatmaps_are_of_words_alone():
    pipe, size = sd3(), {"height": 128, "width": 192}
    with capture(pipe, queries="text") as store, capture(pipe, queries="text", keys="text") as text:
        with capture(pipe, queries=[(2, 4)]) as cells:
            run(pipe, **size)
    for other in (text, cells):
        with pytest.raises(CaptureError, match="queries="):
            other.heatmaps()
    [found] = store.heatmaps()
    assert found["cat"].values.shape == (8, 12)
    assert cells.spots()[0][0].values.shape == (8, 12)
    assert 0 < float(cells.spots()[0][0].values.sum()) < 1


def test_fractions_of_the_image_are_the_cells_that_hold_them():
    layer = AttentionLayer("a", "up", "self", 1, 2, None)  # a latent of 8x12 is 4x6 there
    cells = [(0.0, 0.0), (0.49, 0.5), (0.999, 0.999), (3, 0.25)]
    assert layer.grid((8, 12)) == (4, 6)
    assert Queries.of(cells, None).numbers(layer, (8, 12), 1) == [0, 9, 23, 7]
    for read in (torch.tensor, np.array):  # binary fractions, which float32 holds
        assert Queries.of(read([[0.5, 0.25]]), None).cells == ((0.5, 0.25),)
    with pytest.raises(ValueError, match="cells"):
        Queries.of([(1.0, 0.5)], None)


def test_a_store_that_saw_nothing_has_no_spots():
    with pytest.raises(CaptureError, match="never called"):  # on leaving
        with capture(make_pipeline(), queries=[(0, 1)]) as store:
            with pytest.raises(CaptureError, match="no maps"):
                store.spots()


def test_keys_that_are_merged_later_in_the_run_are_refused():
    held = running_sum(kind="self", queries=[(0, 1)])
    held.take(AttentionCall(probs=probabilities(0, keys=4)))
    held.running = running_pass()
    with pytest.raises(CaptureError, match="layer ran on 2 keys, and its grid is 2x2"):
        held.take(AttentionCall(probs=probabilities(1, keys=2)))
