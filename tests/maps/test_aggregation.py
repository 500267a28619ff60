"""Each preset against its formula, written out in float64 from every step and head of a run.

The formulas are those of the tools that the presets are named after; see sdattn/presets.py for
where they come from. The runs that they are held against keep no more than the preset reads.
"""

import math
from functools import cache

import pytest
import torch
from diffusers import UNet2DConditionModel
from helpers.presets import OF_UNETS
from helpers.smoothing import smooth_in_loops
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_unet
from helpers.transformer_rows import sana
from torch.nn.functional import interpolate

from sdattn import capture, generate, heatmaps
from sdattn.keep.keep import Keep
from sdattn.maps.aggregation import MOST_CELLS, aggregate, contrast, refining, spread
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import PRESETS, Preset, preset_of
from sdattn.models.denoiser import find_denoiser
from sdattn.models.layers import select_layers

PROMPTS = ["a red cat and a turquoise dog", "dog dog"]
# 32x48 cells at level 0, then 16x24, 8x12 and 4x6
OPTIONS = {"height": 256, "width": 384, "num_inference_steps": 4, "guidance_scale": 5.0}
SIDES = (32, 16, 8, 4)


def make_pipe():
    """Attention at all four levels, with 1, 2, 4 and 2 heads, and sharper than at random."""
    unet = make_unet(
        down_block_types=("CrossAttnDownBlock2D",) * 4,
        up_block_types=("CrossAttnUpBlock2D",) * 4,
        attention_head_dim=(1, 2, 4, 2),
    )
    for layer in find_denoiser(unet).layers:
        layer.module.to_q.weight.data *= 4
    return make_pipeline(unet=unet)


class Reference:
    """Every step and head of a run, and the formulas."""

    def __init__(self):
        self.pipe = make_pipe()
        generators = [torch.Generator().manual_seed(7 + i) for i in range(2)]
        with capture(self.pipe, steps="all", heads="all") as self.store:
            self.pipe(PROMPTS, generator=generators, negative_prompt=["red"] * 2, **OPTIONS)
        self.maps = {name: one.double() for name, one in self.store.maps.items()}
        self.found = {}

    def run(self, name):
        """The run of a preset, which captures what that preset reads and no more."""
        if name not in self.found:
            self.found[name] = generate(
                self.pipe, PROMPTS, seed=7, preset=name, negative_prompt="red", **OPTIONS
            )
        return self.found[name]

    def of(self, *places, sides=SIDES):
        """``[images, steps, heads, rows, cols, tokens]`` of the layers of some places."""
        found = [
            one
            for name, one in self.maps.items()
            if name.split("_")[0] in places and one.shape[3] in sides
        ]
        assert found
        return found


@pytest.fixture(scope="module")
def reference():
    return Reference()


def resized(maps, mode):
    """``[images, rows, cols, tokens]`` at 32x48."""
    larger = interpolate(maps.permute(0, 3, 1, 2), (32, 48), mode=mode, align_corners=False)
    return larger.permute(0, 2, 3, 1)


def n_read(pipe, image):
    """Columns of <sos>, the words and the first <eos>."""
    return len(pipe.tokenizer(PROMPTS[image]).input_ids)


def default(reference):
    """The mean over the second half of the steps, over heads, then over layers of the way up."""
    layers = reference.of("up", sides=(32, 16))
    assert len(layers) == 6
    parts = [resized(one[:, 2:].mean((1, 2)), "bilinear") for one in layers]
    return sum(parts) / 6


def daam(reference):
    """The sum over calls; each head enlarged and cut off at 0; the mean over all of them."""
    parts = []
    for one in reference.of("down", "up", sides=(32, 16, 8)):
        for head in range(one.shape[2]):
            parts.append(resized(one[:, :, head].sum(1), "bicubic").clamp(min=0))
    assert len(parts) == (2 + 3) * (1 + 2 + 4)
    return torch.stack(parts).mean(0)


def p2p(reference):
    """The mean over steps of 16x16 (in proportion), over all heads of all layers."""
    means = [one.mean(1) for one in reference.of("down", "up", sides=(16,))]
    heads = torch.cat(means, dim=1)
    assert heads.shape[1:4] == ((2 + 3) * 2, 16, 24)
    return heads.mean(1)


def attend_and_excite(reference, sides=(16,)):
    """A list, of one image each: the words' columns only."""
    last = torch.cat([one[:, -1] for one in reference.of("down", "mid", "up", sides=sides)], dim=1)
    found = []
    for image, maps in enumerate(last.mean(1)):
        words = maps[..., 1 : n_read(reference.pipe, image) - 1]  # without <sos>, <eos>, padding
        sharper = (100 * words).softmax(-1).numpy()
        found.append(torch.from_numpy(smooth_in_loops(sharper, math.sqrt(0.5), 1)))
    return found


def ovam(reference):
    """The softmax over <sos>, the words and the first <eos>; sums over steps, heads and layers."""
    found = []
    for image in range(2):
        read = n_read(reference.pipe, image)
        total = torch.zeros(1, 32, 48, 77, dtype=torch.float64)
        for one in reference.of("down", "up"):
            kept = one[image : image + 1].clone()
            kept[..., read:] = 0
            kept /= kept.sum(-1, keepdim=True)
            total += resized(kept.sum((1, 2)), "bilinear")
        found.append(total[0])
    return found


def every_sum(reference):
    """The sum over heads, at the size of the first layer; the mean over steps and layers."""
    layers = reference.of("down", "mid", "up")
    assert len(layers) == len(reference.maps) == 8 + 1 + 12
    assert layers[0].shape[3:5] == (32, 48)
    return sum(resized(one.sum(2).mean(1), "bilinear") for one in layers) / len(layers)


FORMULAS = {
    "default": default,
    "daam": daam,
    "p2p": p2p,
    "attend-and-excite": attend_and_excite,
    "ovam": ovam,
    "sum": every_sum,
}


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=2e-5)


@pytest.mark.parametrize("name", tiered(OF_UNETS))
@pytest.mark.slow
def test_a_run_has_the_maps_of_the_formula(reference, name):
    run = reference.run(name)
    for found, expected in zip(run.heatmaps, FORMULAS[name](reference), strict=True):
        close(found.maps, expected)


@pytest.mark.parametrize("name", [name for name in OF_UNETS if name != "ovam"])
def test_a_store_of_everything_is_read_the_same(reference, name):
    found = heatmaps(reference.store, reference.pipe, PROMPTS, preset=name)
    for one, other in zip(found, reference.run(name).heatmaps, strict=True):
        assert one.columns == other.columns
        torch.testing.assert_close(one.maps, other.maps, atol=1e-6, rtol=2e-5)


def test_sums_over_the_columns(reference):
    """What a cell's attention comes to in each of the presets."""
    heads = (2 + 3) * (1 + 2 + 4 + 2)
    sums = {"default": 1, "p2p": 1, "attend-and-excite": 1, "ovam": 4 * heads}
    sums["sum"] = (heads + 2) / 21  # over the layers' mean number of heads
    for name, one in sums.items():
        for maps in reference.run(name).heatmaps:
            total = maps.maps.sum(-1)
            torch.testing.assert_close(total, torch.full_like(total, one))


# -- presets of one's own, and layers made by hand ------------------------------------------------


def test_the_middle_counts_where_its_grid_is_the_one(reference):
    """Attend-and-Excite at an image so small that 16 cells are those of the middle."""
    own = Preset(
        "own", ("down", "mid", "up"), cells=4, steps="last", heads="pool", contrast=100.0,
        sigma=math.sqrt(0.5),
    )  # fmt: skip
    found = heatmaps(reference.store, reference.pipe, PROMPTS, preset=own)
    assert found[0].preset is own
    expected = attend_and_excite(reference, sides=(4,))
    for one, other in zip(found, expected, strict=True):
        close(one.maps, other)


@pytest.mark.parametrize("steps", tiered([[0.2, 0.6], [0.0, 0.5], [0.0, 1.0]]))
@pytest.mark.slow
def test_a_part_of_the_schedule_is_the_mean_of_its_steps(reference, steps):
    own = Preset("own", ("up",), least_cells=32, steps=steps)
    kept = [i for i in range(4) if steps[0] <= (i + 0.5) / 4 <= steps[1]]
    [*found] = heatmaps(reference.store, reference.pipe, PROMPTS, preset=own)
    layers = [one[:, kept].mean((1, 2)) for one in reference.of("up", sides=(32,))]
    for one, other in zip(found, sum(layers) / 3, strict=True):
        close(one.maps, other)
    run = generate(reference.pipe, PROMPTS, seed=7, preset=own, negative_prompt="red", **OPTIONS)
    for one, other in zip(run.heatmaps, found, strict=True):
        torch.testing.assert_close(one.maps, other.maps, atol=1e-6, rtol=2e-5)


def by_hand(**grids):
    """LayerMaps of two images and 3 tokens; by name (place, level, heads, grid)."""
    layers = {
        name: LayerMap(place, level, heads, torch.rand(2, *grid, 3))
        for name, (place, level, heads, grid) in grids.items()
    }
    return LayerMaps(layers, (0, 1, 2), passes=5)


def test_layers_of_one_resolution_are_averaged_as_they_are():
    maps = by_hand(**{f"l{i}": ("up", 0, i + 1, (20, 18)) for i in range(3)})
    stacked = torch.stack([one.maps for one in maps.layers.values()])
    found = aggregate(maps, PRESETS["default"])
    torch.testing.assert_close(found, stacked.mean(0))
    weights = torch.tensor([1.0, 2.0, 3.0])[:, None, None, None, None]
    summed = (weights * stacked).sum(0)
    for changes, expected in (
        ({"heads": "sum"}, summed / 3),
        ({"heads": "sum", "layers": "sum"}, summed),
        ({"heads": "pool"}, summed / 6),
        ({"layers": "sum"}, stacked.sum(0)),
        ({"steps": "sum"}, 5 * stacked.mean(0)),
    ):
        torch.testing.assert_close(aggregate(maps, Preset("own", ("up",), **changes)), expected)


@pytest.mark.parametrize(
    ("cells", "chosen"), [(16, 16), (64, 32), (1, 2), (12, 16), (11, 8), (23, 32), (22, 16), (4, 8)]
)
def test_the_nearest_grid_is_nearest_in_proportion(cells, chosen):
    """Of two that are as near, the finer one: 2 and 8 for 4."""
    sides = {32: (32, 48), 16: (24, 16), 8: (8, 8), 2: (2, 9)}
    maps = by_hand(**{str(side): ("up", 0, 1, grid) for side, grid in sides.items()})
    found = aggregate(maps, Preset("own", ("up",), cells=cells))
    assert torch.equal(found, maps.layers[str(chosen)].maps)


@pytest.mark.parametrize(
    ("least", "kept"), [(0, "abcd"), (8, "abc"), (9, "ab"), (16, "ab"), (17, "a"), (99, "a")]
)
def test_coarse_grids_are_left_out_unless_there_are_no_others(least, kept):
    maps = by_hand(
        a=("up", 0, 1, (32, 48)), b=("up", 1, 1, (24, 16)), c=("up", 2, 1, (8, 80)),
        d=("up", 3, 1, (90, 6)), e=("down", 0, 1, (40, 40)),
    )  # fmt: skip
    found = aggregate(maps, Preset("own", ("up",), least_cells=least))
    size = maps.layers["a"].grid
    parts = [
        interpolate(maps.layers[name].maps.permute(0, 3, 1, 2), size, mode="bilinear")
        for name in kept
    ]
    expected = torch.stack(parts).mean(0).permute(0, 2, 3, 1)
    torch.testing.assert_close(found, expected)


def test_gradients_go_through():
    maps = by_hand(a=("up", 0, 1, (4, 6)), b=("up", 1, 2, (2, 3)))
    for one in maps.layers.values():
        one.maps.requires_grad_()
    aggregate(maps, Preset("own", ("up",)))[..., 1].sum().backward()
    for one in maps.layers.values():
        assert one.maps.grad[..., 1].gt(0).all()
        assert one.maps.grad[..., [0, 2]].eq(0).all()


def test_contrast_is_a_softmax_over_the_words():
    maps = torch.tensor([[[0.5, 0.1, 0.3, 0.1]]])
    found = contrast(maps, [1, 2], 10.0)
    weights = [math.exp(1.0), math.exp(3.0)]
    assert found.flatten().tolist() == pytest.approx([one / sum(weights) for one in weights])


# -- refined along self-attention: ``affinity @ maps``, in float64 from every step and head --------
REFINED_PROMPTS = ["a red cat", "dog dog and more"]
# 33x40 cells at level 0, then 17x20: the finest of at most 32 * 32
REFINED_OPTIONS = {"height": 264, "width": 320, "num_inference_steps": 2, "guidance_scale": 5.0}


@pytest.fixture(scope="module")
def refined_runs():
    """A pipeline, its runs, and every step and head of one of them in float64."""
    unet = make_unet()
    for layer in find_denoiser(unet).layers:
        layer.module.to_q.weight.data *= 4
    pipe = make_pipeline(unet=unet)
    generators = [torch.Generator().manual_seed(3 + i) for i in range(2)]

    def wanted(layer):
        return layer.kind == "cross" or (layer.place == "up" and layer.level == 1)

    settings = {"kinds": ("cross", "self"), "layers": wanted, "steps": "all", "heads": "all"}
    with capture(pipe, **settings) as store:
        pipe(REFINED_PROMPTS, generator=generators, **REFINED_OPTIONS)
    runs = cache(
        lambda **changes: generate(pipe, REFINED_PROMPTS, seed=3, **changes, **REFINED_OPTIONS)
    )
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


@pytest.mark.parametrize("preset", tiered(["default", "p2p", "sum", "daam"]))
@pytest.mark.slow
def test_each_cell_is_the_mean_of_what_it_attends_to(refined_runs, preset):
    """DAAM's maps are sums over the calls; the affinity is a mean."""
    _, runs, everything = refined_runs
    plain, sharper = runs(preset=preset), runs(preset=preset, refine="self")
    steps = [1] if preset == "default" else [0, 1]
    maps = torch.stack([one.maps for one in plain.heatmaps]).double()
    expected = refined(maps, everything, steps)
    for found, one, other in zip(sharper.heatmaps, expected, plain.heatmaps, strict=True):
        largest = float(one.max())
        torch.testing.assert_close(found.maps.double(), one, atol=1e-6 * max(1, largest), rtol=0)
        assert (found.maps - other.maps).abs().max() > 1e-3
        assert found.preset == preset_of(preset, "self")
    for one, other in zip(plain.images, sharper.images, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_cells_attention_still_sums_to_1(refined_runs):
    _, runs, _ = refined_runs
    run = runs(preset="default", refine="self")
    for one in run.heatmaps:
        torch.testing.assert_close(one.maps.sum(-1), torch.ones(33, 40))
    rows = run.layers.affinity.sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
def test_an_affinity_by_hand(cast):
    """Four cells: the first two stay, the others take the mean of both rows."""
    affinity = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]])
    maps = torch.tensor([[[8.0], [4.0]], [[2.0], [6.01]]])[None]  # [1, 2, 2, 1]
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        found = spread(maps, LayerMaps({}, (0,), 1, affinity[None], (2, 2)))
    assert found.flatten().tolist() == pytest.approx([8.0, 4.0, 5.0, 5.005], rel=1e-6)


def chosen(pipe, size):
    """(self, cross) of a run whose latent has that size."""
    layers = select_layers(find_denoiser(pipe.unet).layers, refining(pipe), ("cross", "self"), size)
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


def test_the_heads_that_a_preset_reads_are_not_those_of_self_attention():
    run = generate(
        make_pipeline(), REFINED_PROMPTS, preset="daam", refine="self", num_inference_steps=1
    )
    assert run.store.heads == "all"
    assert all(layer.kind == "cross" for layer in run.store.layers)
    assert run.layers.affinity.shape[0] == 2


def test_sdxl_is_refined_on_its_own_grid():
    pipe = make_sdxl_pipeline()
    options = {"height": 128, "width": 192, "num_inference_steps": 2}
    run = generate(pipe, REFINED_PROMPTS, refine="self", **options)
    assert run.layers.affinity.shape == (2, 96, 96)
    assert run.layers.affinity_grid == (8, 12)
    for one in run.heatmaps:
        torch.testing.assert_close(one.maps.sum(-1), torch.ones(8, 12))


def test_a_transformer_has_nothing_to_refine_along():
    message = "a UNet's way up or of joint attention, and a SanaTransformer2DModel has neither"
    with pytest.raises(TypeError, match=message):
        generate(sana(), "a cat", refine="self", num_inference_steps=1)
