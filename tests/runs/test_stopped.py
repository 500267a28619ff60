"""Runs that a callback stops (``pipe._interrupt = True``): their image and maps stay, and are said
to be of a part of the steps."""

import json
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from diffusers import FluxPipeline, HeunDiscreteScheduler
from helpers.tiny_pipelines import make_pipeline, make_small_unet
from helpers.transformer_rows import flux

import sdattn
from sdattn import CaptureError, CaptureWarning, capture, generate, load_run
from sdattn.errors import SdattnWarning
from sdattn.follow.capture_warnings import Stopped, may_stop
from sdattn.maps.presets import PRESETS
from sdattn.runs.report import report
from sdattn.runs.sampling import StoppedError

PROMPT = "a red cat"
TEN = {"height": 64, "width": 64, "num_inference_steps": 10}


def stop_after(steps):
    """A callback that stops the run once so many steps have run."""

    def stop(pipe, step, _timestep, given):
        if step + 1 == steps:
            pipe._interrupt = True
        return given

    return {"callback_on_step_end": stop}


@pytest.fixture(scope="module")
def pipe():
    return make_pipeline(unet=make_small_unet())


def drawn(pipe, **options):
    return pipe(PROMPT, generator=torch.Generator().manual_seed(0), **{**TEN, **options}).images[0]


def mean_of(pipe, steps):
    """The maps of these steps of a whole run."""
    with capture(pipe, steps=list(steps)) as store:
        drawn(pipe)
    return {name: maps.mean(1) for name, maps in store.maps.items()}


def assert_maps(found, expected):
    assert {*found} == {*expected}
    for name, maps in found.items():
        torch.testing.assert_close(maps, expected[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("after", "kept", "said"),
    [(3, range(3), "steps 1 to 3"), (1, range(1), "step 1"), (7, range(5, 7), "steps 6 to 7")],
)
@pytest.mark.slow
def test_generate_keeps_the_image_and_the_maps_that_there_are(pipe, after, kept, said, tmp_path):
    with pytest.warns(CaptureWarning, match=f"{after} of 10 steps.*{said}") as heard:
        run = generate(pipe, PROMPT, **TEN, **stop_after(after))
    assert len(heard) == 1
    assert run.images[0].tobytes() == drawn(pipe, **stop_after(after)).tobytes()
    assert_maps(dict(run.store.maps), mean_of(pipe, kept))
    stopped = Stopped(after, 10, tuple(kept))
    assert run[0].settings.stopped == stopped and len(run[0].settings.timesteps) == after
    [folder] = run.save(tmp_path / "run")
    document = json.loads((folder / "run.json").read_text())
    assert document["stopped"] == {"after": after, "steps": 10, "kept": [*kept]}
    back = load_run(folder)
    assert back.settings.stopped == stopped
    assert f"stopped after {after} of 10 steps; the maps are of {said}".encode() in report(back)
    assert f"{after} steps, stopped of 10" in repr(back)


def test_all_texts_of_a_stopped_run_have_the_maps_that_there_are(pipe):
    watch = {"branch": "both"}
    options = {"negative_prompt": "a dog", "ask": "a dog", "capture_options": watch}
    with pytest.warns(CaptureWarning) as heard:
        run = generate(pipe, PROMPT, refine="self", **options, **TEN, **stop_after(3))
    assert len(heard) == 1
    assert [*run[0].more] == ["negative", "asked"] and run.layers.affinity is not None


@pytest.mark.parametrize("preset", ["default", "attend-and-excite", "daam"])
@pytest.mark.parametrize("keep", [None, "all"])
def test_presets_read_the_steps_that_there_are(pipe, preset, keep):
    watch = {"capture_options": {"steps": keep}} if keep else {}
    last = PRESETS[preset].steps == "last"
    with pytest.warns(CaptureWarning, match="of step 3" if last else "of steps 1 to 3"):
        run = generate(pipe, PROMPT, preset=preset, **watch, **TEN, **stop_after(3))
    assert run[0].settings.stopped.kept == ((2,) if last else (0, 1, 2))


@pytest.mark.slow
def test_a_run_that_goes_to_its_end_says_nothing(pipe):
    """Its maps are those without a callback, and it stops in its last step at the earliest."""
    plain = generate(pipe, PROMPT, **TEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SdattnWarning)
        for steps in (10, 11):
            run = generate(pipe, PROMPT, **TEN, **stop_after(steps))
            assert run[0].settings.stopped is None and "stopped" not in run.info[0]
            assert torch.equal(run.heatmaps[0].maps, plain.heatmaps[0].maps)


def test_steps_before_a_part_that_no_step_lies_in_are_no_error(pipe):
    part = replace(PRESETS["default"], name="own", steps=(0.02, 1.0))
    run = generate(pipe, PROMPT, preset=part, **TEN, **stop_after(11))
    assert_maps(dict(run.store.maps), mean_of(pipe, range(10)))


class Silent:
    """Stops a pipeline from outside, where no callback says that this may come."""

    def __init__(self, pipe, steps):
        self.pipe, self.left = pipe, steps

    def __call__(self, *_):
        self.left -= 1
        if not self.left:
            thread = threading.Thread(target=setattr, args=(self.pipe, "_interrupt", True))
            thread.start()
            thread.join()


def test_where_nothing_of_the_preset_ran_the_error_has_the_images(pipe, monkeypatch):
    monkeypatch.setattr("sdattn.runs.preparing.SMALL", 0)  # or each step would be kept
    handle = pipe.unet.register_forward_hook(Silent(pipe, 3))
    try:
        with pytest.raises(StoppedError, match="3 of 10 steps.*'steps': 'all'") as raised:
            generate(pipe, PROMPT, **TEN)
    finally:
        handle.remove()
    [image] = raised.value.images
    assert image.tobytes() == drawn(pipe, **stop_after(3)).tobytes()
    assert isinstance(raised.value, CaptureError)


def test_no_causal_maps_are_drawn_after_a_stop(pipe):
    with pytest.warns(SdattnWarning) as heard:
        run = generate(pipe, PROMPT, causal=True, **TEN, **stop_after(6))
    assert len(heard) == 2 and any("causal" in str(one.message) for one in heard)
    assert not run.causal_heatmaps


@pytest.mark.parametrize(
    ("steps", "said", "kept"),
    [
        ("mean", "steps 1 to 3", (0, 1, 2)),
        ("all", "steps 1 to 3", (0, 1, 2)),
        ("last", "step 3", (2,)),
        ([0, 2, 8], "steps 1, 3", (0, 2)),
    ],
)
def test_a_capture_warns_once_at_its_end(pipe, steps, said, kept):
    with pytest.warns(CaptureWarning, match=f"3 of 10 steps.*{said}") as heard:
        with capture(pipe, steps=steps) as store:
            drawn(pipe, **stop_after(3))
            assert store.stopped is None
    assert len(heard) == 1 and heard[0].filename == __file__
    assert store.stopped == Stopped(3, 10, kept)
    assert store.heatmaps()[0]["cat"].values.any()


def test_a_capture_of_what_did_not_run_says_so_when_it_is_read(pipe):
    with pytest.warns(CaptureWarning, match="3 of 10 steps.*no maps") as heard:
        with capture(pipe, steps=(0.5, 1.0)) as store:
            image = drawn(pipe, **stop_after(3))
    assert len(heard) == 1 and image.size == (64, 64)
    with pytest.raises(CaptureError, match="stopped after 3 of 10"):
        sdattn.heatmaps(store)


def test_a_sign_that_was_left_behind_stops_nothing(pipe):
    drawn(pipe, **stop_after(3))
    assert pipe._interrupt and not may_stop(pipe)  # as at a call of one's own
    text = torch.zeros(1, 77, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        with capture(pipe) as store:
            drawn(pipe)
        assert store.stopped is None and len(store.passes) == 10
        drawn(pipe, **stop_after(3))
        with capture(pipe.unet) as store:  # a call of one's own
            pipe.unet(torch.zeros(1, 4, 8, 8), 1, text)
    assert store.stopped is None


@pytest.mark.slow
def test_guidance_in_turn_and_second_order_count_the_steps():
    made = flux(FluxPipeline)
    with pytest.warns(CaptureWarning, match="2 of 4 steps"):
        run = generate(
            made, PROMPT, negative_prompt="a dog", true_cfg_scale=3.0, height=64, width=64,
            num_inference_steps=4, **stop_after(2),
        )  # fmt: skip
    assert run[0].settings.stopped == Stopped(2, 4, (0, 1))
    heun = make_pipeline(unet=make_small_unet(), scheduler=HeunDiscreteScheduler(steps_offset=1))
    with pytest.warns(CaptureWarning, match="4 of 9 steps"), capture(heun) as store:
        drawn(heun, num_inference_steps=5, **stop_after(4))
    assert len(store.passes) == 4


def test_a_run_that_is_broken_off_raises_as_ever(pipe):
    def broken(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(pipe, PROMPT, **TEN, callback_on_step_end=broken)
