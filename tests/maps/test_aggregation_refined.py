"""Refined maps against ``affinity @ maps``, written out in float64 from every step and head."""

from functools import cache

import pytest
import torch
from diffusers import UNet2DConditionModel
from tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_unet
from torch.nn.functional import interpolate
from transformer_rows import sd3

from sdattn import capture, generate, heatmaps
from sdattn.hooks.keep import Keep
from sdattn.maps.aggregation import MOST_CELLS, refining, spread
from sdattn.maps.layermaps import LayerMaps
from sdattn.maps.presets import preset_of
from sdattn.models.layers import find_layers, select_layers

PROMPTS = ["a red cat", "dog dog and more"]
# 33x40 cells at level 0, then 17x20: the finest of at most 32 * 32
OPTIONS = {"height": 264, "width": 320, "num_inference_steps": 2, "guidance_scale": 5.0}


@pytest.fixture(scope="module")
def reference():
    """A pipeline, its runs, and every step and head of one of them in float64."""
    unet = make_unet()
    for layer in find_layers(unet):
        layer.module.to_q.weight.data *= 4
    pipe = make_pipeline(unet=unet)
    generators = [torch.Generator().manual_seed(3 + i) for i in range(2)]

    def wanted(layer):
        return layer.kind == "cross" or (layer.place == "up" and layer.level == 1)

    settings = {"kinds": ("cross", "self"), "layers": wanted, "steps": "all", "heads": "all"}
    with capture(pipe, **settings) as store:
        pipe(PROMPTS, generator=generators, **OPTIONS)
    runs = cache(lambda **changes: generate(pipe, PROMPTS, seed=3, **changes, **OPTIONS))
    return pipe, runs, {name: one.double() for name, one in store.maps.items()}


def at(maps, size):
    """``[images, rows, cols, tokens]`` at another size."""
    return interpolate(maps.permute(0, 3, 1, 2), size, mode="bilinear").permute(0, 2, 3, 1)


def pooled(maps, size):
    """The mean of all cells that a coarser one touches, ``[images, rows, cols, tokens]``."""
    (rows, cols), (r, c) = maps.shape[1:3], size
    means = [
        maps[:, i * rows // r : -(-(i + 1) * rows // r), j * cols // c : -(-(j + 1) * cols // c)]
        for i in range(r)
        for j in range(c)
    ]
    return torch.stack([one.mean((1, 2)) for one in means], dim=1)


def refined(maps, everything, steps):
    """``sum_j affinity[i, j] maps[j]``, at 17x20 and back."""
    layers = [one[:, steps].mean((1, 2)) for name, one in everything.items() if "attn1" in name]
    assert len(layers) == 3
    affinity = (sum(layers) / 3).flatten(1, 2)
    assert affinity.shape == (2, 340, 340)
    cells = pooled(maps, (17, 20))
    mixed = torch.einsum("bij,bjt->bit", affinity, cells)
    return at(mixed.unflatten(1, (17, 20)), tuple(maps.shape[1:3]))


@pytest.mark.parametrize("preset", ["default", "p2p", "sum"])
def test_each_cell_is_the_mean_of_what_it_attends_to(reference, preset):
    _, runs, everything = reference
    plain, sharper = runs(preset=preset), runs(preset=preset, refine="self")
    steps = [1] if preset == "default" else [0, 1]
    maps = torch.stack([one.maps for one in plain.heatmaps]).double()
    expected = refined(maps, everything, steps)
    for found, one, other in zip(sharper.heatmaps, expected, plain.heatmaps, strict=True):
        torch.testing.assert_close(found.maps.double(), one, atol=1e-6, rtol=0)
        assert (found.maps - other.maps).abs().max() > 1e-3
        assert found.preset == preset_of(preset, "self")
    for one, other in zip(plain.images, sharper.images, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_sum_over_steps_is_refined_too(reference):
    """DAAM's maps are sums over the calls; the affinity is a mean."""
    _, runs, everything = reference
    plain, sharper = runs(preset="daam"), runs(preset="daam", refine="self")
    maps = torch.stack([one.maps for one in plain.heatmaps]).double()
    expected = refined(maps, everything, [0, 1])
    for found, one in zip(sharper.heatmaps, expected, strict=True):
        torch.testing.assert_close(found.maps.double(), one, atol=1e-5, rtol=1e-5)


def test_a_cells_attention_still_sums_to_1(reference):
    _, runs, _ = reference
    run = runs(preset="default", refine="self")
    for one in run.heatmaps:
        torch.testing.assert_close(one.maps.sum(-1), torch.ones(33, 40))
    rows = run.layers.affinity.sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


def test_a_store_with_self_attention_is_refined_afterwards(reference):
    pipe, runs, _ = reference
    kinds = ("cross", "self")
    with capture(pipe, kinds=kinds, layers=refining(pipe), steps=(0.5, 1.0)) as store:
        generators = [torch.Generator().manual_seed(3 + i) for i in range(2)]
        pipe(PROMPTS, generator=generators, **OPTIONS)
    for refine in ("self", None):
        found = heatmaps(store, pipe, PROMPTS, refine=refine)
        run = runs(preset="default", refine="self") if refine else runs(preset="default")
        for one, other in zip(found, run.heatmaps, strict=True):
            torch.testing.assert_close(one.maps, other.maps)


def test_images_are_never_mixed(reference):
    pipe, runs, _ = reference
    together = runs(preset="default", refine="self")
    for i, prompt in enumerate(PROMPTS):
        [alone] = generate(pipe, prompt, seed=3 + i, refine="self", **OPTIONS).heatmaps
        torch.testing.assert_close(together.heatmaps[i].maps, alone.maps, atol=1e-5, rtol=0)


def test_an_affinity_by_hand():
    """Four cells: the first two stay, the others take the mean of both rows."""
    affinity = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]])
    maps = torch.tensor([[[8.0], [4.0]], [[2.0], [6.0]]])[None]  # [1, 2, 2, 1]
    found = spread(maps, LayerMaps({}, (0,), 1, affinity[None], (2, 2)))
    assert found.flatten().tolist() == [8.0, 4.0, 5.0, 5.0]


# -- which layers ---------------------------------------------------------------------------------


def chosen(pipe, size):
    """(self, cross) of a run whose latent has that size."""
    layers = select_layers(find_layers(pipe.unet), refining(pipe), ("cross", "self"), size)
    return [la for la in layers if la.kind == "self"], [la for la in layers if la.kind == "cross"]


@pytest.mark.parametrize(
    ("size", "level", "cells"),
    [((128, 128), 0, 256), ((256, 256), 0, 1024), ((264, 256), 1, 17 * 16), ((512, 512), 1, 1024),
     ((512, 768), 2, 384), ((768, 512), 2, 384), ((1024, 1024), 2, 1024), ((4096, 4096), 2, 16384)],
)  # fmt: skip
def test_the_finest_grid_of_at_most_1024_cells_is_chosen(size, level, cells):
    """Or the coarsest of the way up."""
    pipe = make_pipeline()
    ours, texts = chosen(pipe, (size[0] // 8, size[1] // 8))
    assert [(layer.place, layer.level) for layer in ours] == [("up", level)] * 3
    rows, cols = ours[0].grid((size[0] // 8, size[1] // 8))
    assert rows * cols == cells
    assert len(texts) == 16
    assert MOST_CELLS == 1024


def test_sd15_holds_the_bytes_that_are_told():
    """12.6 MB an image at 512x512: three layers of 1024 x 1024 numbers in float32."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    ours, texts = chosen(make_pipeline(unet=unet), (64, 64))
    assert Keep.of().nbytes(ours, (64, 64), 77) == 3 * 1024 * 1024 * 4 == 12_582_912
    assert Keep.of().nbytes(texts, (64, 64), 77) == 26_944 * 77 * 4


@pytest.mark.parametrize("steps", [1, 4])
def test_what_is_held_does_not_grow_with_the_steps(steps):
    pipe = make_pipeline()
    options = {"height": 128, "width": 192, "num_inference_steps": steps}
    with capture(pipe, kinds=("self",), layers=refining(pipe)) as store:
        pipe(PROMPTS, **options)
    assert store.nbytes == store.expected_nbytes == 2 * 3 * (16 * 24) ** 2 * 4


def test_the_heads_that_a_preset_reads_are_not_those_of_self_attention():
    run = generate(make_pipeline(), PROMPTS, preset="daam", refine="self", num_inference_steps=1)
    assert run.store.heads == "all"
    assert all(layer.kind == "cross" for layer in run.store.layers)
    assert run.layers.affinity.shape[0] == 2


def test_sdxl_is_refined_on_its_own_grid():
    pipe = make_sdxl_pipeline()
    options = {"height": 128, "width": 192, "num_inference_steps": 2}
    run = generate(pipe, PROMPTS, refine="self", **options)
    assert run.layers.affinity.shape == (2, 96, 96)
    assert run.layers.affinity_grid == (8, 12)
    for one in run.heatmaps:
        torch.testing.assert_close(one.maps.sum(-1), torch.ones(8, 12))


def test_a_transformer_has_nothing_to_refine_along():
    message = "self-attention of a UNet's way up, and a SD3Transformer2DModel has none"
    with pytest.raises(TypeError, match=message):
        generate(sd3(), "a cat", refine="self", num_inference_steps=1, max_sequence_length=16)
