"""Single steps, heads and groups of layers: what they must add up to, and back from a folder."""

from dataclasses import replace

import pytest
import torch
from helpers.small_runs import small_run
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline

from sdattn import generate, load_run
from sdattn.maps.arrival import calibration_of
from sdattn.maps.details import Details
from sdattn.maps.heatmaps import Heatmaps
from sdattn.maps.presets import PRESETS
from sdattn.runs.imagerun import group_heatmaps, head_heatmaps, step_groups, step_heatmaps

PROMPT = "a red cat and a turquoise dog"
OPTIONS = {"height": 128, "width": 192, "num_inference_steps": 4}
ALL = {"steps": "all", "heads": "all"}


@pytest.fixture(scope="module")
def pipe():
    return make_pipeline()


@pytest.fixture(scope="module")
def runs(pipe):
    found = {}

    def run(preset="default", refine=None):
        if (preset, refine) not in found:
            found[preset, refine] = generate(
                pipe, PROMPT, preset=preset, refine=refine, capture_options=ALL, **OPTIONS
            )
        return found[preset, refine]

    return run


def values(heatmaps):
    return torch.stack([one.values for one in heatmaps.occurrences()])


@pytest.mark.slow
@pytest.mark.parametrize("refine", [None, "self"])
def test_the_steps_that_a_preset_reads_average_to_its_heatmap(runs, refine):
    run = runs(refine=refine).image_run(0)
    steps = step_heatmaps(run)
    assert run.details.calls == (0, 1, 2, 3)
    read = torch.stack([values(one) for one in steps[2:]]).double().mean(0)  # the second half
    torch.testing.assert_close(read.float(), values(run.heatmaps), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(values(steps[0]), values(run.heatmaps), atol=1e-6)


@pytest.mark.parametrize("preset", tiered(["default", "daam", "p2p", "sum"], quick=2))
@pytest.mark.slow
def test_a_step_alone_is_the_heatmap_of_a_run_that_kept_it_alone(pipe, runs, preset):
    some = step_heatmaps(runs(preset).image_run(0))[1]
    kept = {"steps": [1]}
    alone = generate(pipe, PROMPT, preset=preset, capture_options=kept, **OPTIONS).heatmaps[0]
    # bicubic overshoots are cut off of each head in the run, of their mean in the step
    tolerance = 0.02 * values(alone).max().item() if PRESETS[preset].each_head else 1e-6
    torch.testing.assert_close(values(some), values(alone), atol=tolerance, rtol=1e-5)


def test_groups_are_the_layers_of_a_place_and_grid(runs):
    run = runs()
    found = group_heatmaps(run.image_run(0))
    assert list(found) == [
        "down 16x24", "down 8x12", "down 4x6", "mid 2x3", "up 4x6", "up 8x12", "up 16x24",
    ]  # fmt: skip
    columns = run.heatmaps[0]["turquoise"].columns
    assert len(columns) > 1
    for name, heatmaps in found.items():
        place, grid = name.split()
        maps = [
            one.maps[0].double()
            for one in run.layers.layers.values()
            if one.place == place and f"{one.grid[0]}x{one.grid[1]}" == grid
        ]
        expected = (sum(maps) / len(maps))[..., list(columns)].sum(-1)
        torch.testing.assert_close(heatmaps["turquoise"].values.double(), expected)


def test_the_steps_of_a_group_average_to_the_group(runs):
    run = runs().image_run(0)
    whole = group_heatmaps(run)
    for name, steps in step_groups(run).items():
        read = torch.stack([values(one) for one in steps[2:]]).double().mean(0).float()
        torch.testing.assert_close(read, values(whole[name]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("preset", ["default", "daam"])
def test_heads_average_to_their_layers(runs, preset):
    run = runs(preset)
    found = head_heatmaps(run.image_run(0))
    finest = [
        name for name, one in run.layers.layers.items()
        if one.grid == (16, 24) and PRESETS[preset].reads(one.place, one.level)
    ]  # fmt: skip
    assert list(found) == finest
    for name, heads in found.items():
        layer = run.store.maps[name]  # [images, steps, heads, rows, cols, tokens]
        kept = layer[0] if preset == "daam" else layer[0, 2:]
        assert len(heads) == kept.shape[1]
        for head, one in heads.items():
            expected = kept[:, head, :, :, 3].double().mean(0)  # column 3 is "cat"
            torch.testing.assert_close(one["cat"].values.double(), expected, atol=1e-6, rtol=1e-5)


def test_chosen_steps_and_heads_keep_their_numbers(pipe):
    kept = {"steps": [0, 3], "heads": [1]}
    run = generate(pipe, PROMPT, words=["cat"], capture_options=kept, **OPTIONS).image_run(0)
    assert run.details.calls == (0, 3)
    assert run.details.head_numbers == (1,)
    assert [one.words for one in step_heatmaps(run)] == [("cat",), ("cat",)]
    assert {tuple(heads) for heads in head_heatmaps(run).values()} == {(1,)}


@pytest.mark.slow
def test_a_run_that_kept_means_has_groups_only(pipe):
    means = {"steps": "mean"}  # a small run keeps each step
    run = generate(pipe, PROMPT, capture_options=means, **OPTIONS).image_run(0)
    assert run.details.steps is None
    assert run.details.heads is None
    assert (step_heatmaps(run), step_groups(run), head_heatmaps(run)) == ([], {}, {})
    assert group_heatmaps(run)


@pytest.mark.parametrize(
    ("preset", "refine"), [("default", None), ("daam", "self"), ("attend-and-excite", None)]
)
@pytest.mark.slow
def test_details_come_back_from_a_folder(runs, tmp_path, preset, refine):
    run = runs(preset, refine)
    before, back = run.image_run(0), load_run(run.save(tmp_path / "run")[0])
    assert back.details.calls == before.details.calls
    of_run, of_folder = step_heatmaps(before), step_heatmaps(back)
    assert len(of_run) == len(of_folder) == 4
    for one, other in zip(of_run, of_folder, strict=True):
        scale = values(one).max().item()  # float16, of which a softmax takes a hundredfold
        torch.testing.assert_close(values(other), values(one), atol=6e-3 * scale, rtol=0)
    heads, again = head_heatmaps(before), head_heatmaps(back)
    assert list(again) == list(heads)
    for name in heads:
        assert list(again[name]) == list(heads[name])
        for one, other in zip(heads[name].values(), again[name].values(), strict=True):
            torch.testing.assert_close(values(other), values(one), atol=1e-4, rtol=2e-3)


def test_kept_steps_and_heads_are_axes_of_an_array():
    run = small_run(prompt="a cat a dog")  # the default preset reads up.b, of 2x3 cells
    whole = run.to_xarray()
    assert whole.dims == ("word", "row", "col") and [*whole.word.values] == ["a", "cat", "a", "dog"]
    steps = run.to_xarray("steps")
    assert steps.dims == ("word", "row", "col", "step")
    assert ([*steps.step.values], [*steps.timestep.values]) == ([0, 1], [900.0, 100.0])
    heads = run.to_xarray("heads")
    assert heads.dims == ("word", "row", "col", "head", "layer")
    assert ([*heads["head"].values], [*heads.layer.values]) == ([0, 1], ["up.b"])
    kept = run.details.steps.layers["up.b"].maps, run.details.heads.layers["up.b"].maps[0]
    for found, maps in zip((steps, heads.sel(layer="up.b")), kept, strict=True):
        for word, heatmap in enumerate(run.heatmaps.occurrences()):
            expected = maps[..., list(heatmap.columns)].sum(-1).movedim(0, -1)
            torch.testing.assert_close(torch.tensor(found.values[word]), expected)


def test_numbers_of_steps_and_heads_are_the_models_own():
    run = small_run()
    chosen = replace(run, details=replace(run.details, calls=(1, 4), head_numbers=(3, 5)))
    assert [*chosen.to_xarray("heads")["head"].values] == [3, 5]
    steps = chosen.to_xarray("steps")
    assert [*steps.step.values] == [1, 4] and "timestep" not in steps.coords  # of the fifth call


def test_what_was_not_kept_is_refused_by_name():
    run = replace(small_run(), details=Details())
    for each in ("steps", "heads"):
        with pytest.raises(ValueError, match=f"single {each}"):
            run.to_xarray(each)
    with pytest.raises(ValueError, match="each='layers'"):
        run.to_xarray("layers")


@pytest.mark.parametrize(
    ("model", "preset", "is_calibrated"),
    [("demo", "default", True), ("demo", "daam", False), ("tiny", "default", False)],
)
def test_only_maps_like_the_demos_are_judged_by_its_calibration(
    demo, monkeypatch, model, preset, is_calibrated
):
    run = generate(demo, "a cat", num_inference_steps=1, preset=preset)[0]
    run = replace(run, settings=replace(run.settings, model=model))
    monkeypatch.setattr(Heatmaps, "missing", lambda _, words, calibration: (words, calibration))
    expected = calibration_of("demo") if is_calibrated else None
    assert run.missing(["cat"]) == (["cat"], expected)
