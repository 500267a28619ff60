"""generate() with tiny pipelines of the real classes, and what it saves."""

from dataclasses import replace

import pytest
import torch
from helpers.small_runs import edited, small_run
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline

from sdattn import capture, generate, heatmaps, load_run
from sdattn.edit import EditRun
from sdattn.runs.run import Run

PROMPT = "a red cat and a dog"
QUICK = {"num_inference_steps": 2, "height": 128, "width": 128}


def test_a_run_that_ends_early_has_the_maps_of_what_it_ran():
    """Of its half of the schedule no pass is in the second half."""
    pipe = make_sdxl_pipeline()
    options = {**QUICK, "num_inference_steps": 4, "denoising_end": 0.5}
    run = generate(pipe, PROMPT, seed=5, **options)
    generator = torch.Generator().manual_seed(5)
    with capture(pipe) as store:
        pipe(PROMPT, generator=generator, **options)
    assert [one.timestep for one in run.store.passes] == store.timesteps
    assert len(store.passes) == 2
    [expected] = heatmaps(store, pipe, PROMPT)
    torch.testing.assert_close(run.heatmaps[0].maps, expected.maps, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_word_of_one_prompt_has_its_causes_there_only(tmp_path):
    prompts = ["a cat", "a red dog"]
    run = generate(make_pipeline(), prompts, words=["cat"], causal=True, **QUICK)
    assert [[one.label for one in found] for found in run.causal_heatmaps] == [["cat"], []]
    first, second = run.save(tmp_path / "run")
    assert (second / "run.json").is_file()
    assert (first / "causal" / "heatmaps" / "01-cat.png").is_file()


@pytest.mark.slow
def test_a_run_is_a_list_of_its_images_runs(tmp_path):
    run = generate(make_pipeline(), ["a cat", "a red dog"], ask="cat", **QUICK)
    assert len(run) == 2 and [*run] == [run[0], run[1]] and run[-1] is run.image_run(1)
    for i, image_run in enumerate(run):
        assert image_run.image is run.images[i]
        assert image_run.heatmaps is run.heatmaps[i]
        assert image_run.info == run.info[i]
        assert image_run.more["asked"].text == "cat"
        assert image_run.more["asked"].maps[0].values.equal(run.asked_heatmaps[i]["cat"].values)
    assert run.negative_heatmaps == run.causal_heatmaps == []
    paths = run.save(tmp_path / "run")
    assert [path.name for path in paths] == ["run-0", "run-1"]
    assert [load_run(path).info["prompt"] for path in paths] == ["a cat", "a red dog"]


@pytest.mark.slow
def test_a_run_of_one_image_is_read_as_a_saved_one(tmp_path):
    run = generate(make_pipeline(), PROMPT, ask="cat", **QUICK)
    back = load_run(*run.save(tmp_path / "run"))
    assert run.image is run.images[0] and run.image.tobytes() == back.image.tobytes()
    for key in ("cat", "red cat", "<eos>"):
        assert run.heatmaps[key].values.equal(run.heatmaps[0][key].values)
        assert run.heatmaps[key].columns == back.heatmaps[key].columns
    assert "cat" in run.heatmaps and "bird" not in run.heatmaps
    assert run.heatmaps[0] in run.heatmaps and [*run.heatmaps] == [run[0].heatmaps]
    assert run.asked_heatmaps["cat"].values.equal(run.asked_heatmaps[0]["cat"].values)
    with pytest.raises(KeyError, match="bird"):
        run.heatmaps["bird"]
    with pytest.raises(TypeError, match=r"run\.heatmaps\[0\]\['cat'\]"):
        run["cat"]


@pytest.mark.parametrize("images", [0, 2, 3])
def test_of_several_images_the_error_names_how_to_choose_one(images):
    one = small_run(0)
    run = Run([one] * images, None, one.layers)
    with pytest.raises(ValueError, match=rf"{images}\. Take .*run\.images.*run\[0\]\.image"):
        _ = run.image
    with pytest.raises(ValueError, match=rf"of {images}\. .*run\.heatmaps\[0\]\['cat'\]"):
        run.heatmaps["cat"]
    with pytest.raises(ValueError, match=rf"of {images}\. .*run\.heatmaps\[0\]"):
        _ = "cat" in run.heatmaps
    assert len(run.images) == len(run.heatmaps) == len(run.heatmaps[:images]) == images


def test_a_run_is_one_line(tmp_path):
    one, other = small_run(0), small_run(3, prompt="a dog\n" * 12)
    run = Run([one, other], None, one.layers)
    assert repr(run) == (
        "Run(2 images 96x64 of 2 prompts, demo, 2 steps, seed 0, 3, preset default)"
    )
    assert repr(one) == "ImageRun(96x64 of 'a red cat', demo, 2 steps, seed 0, preset default)"
    long = repr(other)
    assert len(long) < 140 and "\n" not in long and "a dog a dog" in long and "…'" in long
    of_edit = EditRun([one], None, one.layers, [["cat"]], edited("replace"))
    assert repr(of_edit) == repr(one).replace("ImageRun", "EditRun")
    assert repr(Run([], None, one.layers)) == "Run(no images)"


def test_what_is_not_known_is_left_out():
    run = small_run()
    found = replace(run, settings=replace(run.settings, seed=None, timesteps=None, model=None))
    assert repr(found) == "ImageRun(96x64 of 'a red cat', P, preset default)"
