"""Every error after the last step has the images that were drawn, whoever raised it and why."""

import warnings

import numpy as np
import pytest
import torch
from helpers.tiny_pipelines import make_pipeline, make_small_unet
from PIL import Image

import sdattn
from sdattn import generate
from sdattn.control import knockouts
from sdattn.edit import edit, editing, guide, inside
from sdattn.models.finite import check_maps
from sdattn.runs import explaining, sampling
from sdattn.runs.preparing import prepare

PROMPT = "a red cat"
FEW = {"height": 64, "width": 64, "num_inference_steps": 2}


@pytest.fixture
def pipe():
    return make_pipeline(unet=make_small_unet())


def drawn(pipe, prompts=PROMPT, **options):
    seeds = range(1 if isinstance(prompts, str) else len(prompts))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return pipe(prompts, generator=generators, **FEW, **options).images


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


def broken_image(pipe, monkeypatch):
    pipe.vae.decoder.register_forward_hook(lambda module, args, output: output * float("nan"))


def broken_maps(pipe, monkeypatch):
    """A layer whose attention to one token is NaN, and its output is not."""

    def check(maps, *further):
        check_maps({name: values * float("nan") for name, values in maps.items()}, *further)

    monkeypatch.setattr(sampling, "check_maps", check)


def flagged(pipe, monkeypatch):
    """A safety checker that blanks the image, and warnings that are errors."""
    usual = type(pipe).run_safety_checker
    monkeypatch.setattr(type(pipe), "run_safety_checker", lambda *given: (usual(*given)[0], [True]))


def raises(error):
    def spoil(pipe, monkeypatch):
        def broken(*given, **options):
            raise error

        monkeypatch.setattr(sampling, "heatmaps_of", broken)

    return spoil


def at_the_end_of_a_capture(pipe, monkeypatch):
    def broken(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("sdattn.keep.watching.Watch.check", broken)


LATE = {
    "an image that is not finite": (broken_image, sdattn.errors.NotFiniteError),
    "maps that are not finite": (broken_maps, sdattn.errors.NotFiniteError),
    "a warning that is an error": (flagged, sdattn.errors.SdattnWarning),
    "a bug": (raises(AssertionError("boom")), AssertionError),
    "a lost patience": (raises(KeyboardInterrupt()), KeyboardInterrupt),
    "a full disk": (raises(OSError(28, "No space left on device")), OSError),
    "the end of a capture": (at_the_end_of_a_capture, torch.OutOfMemoryError),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("name", LATE)
def test_errors_after_the_last_step_have_the_images(name, pipe, monkeypatch):
    spoil, kind = LATE[name]
    spoil(pipe, monkeypatch)
    prompts = PROMPT if "warning" in name else [PROMPT, "a dog"]
    expected = drawn(pipe, prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sdattn.errors.SdattnWarning)
        with pytest.raises(kind) as raised:
            generate(pipe, prompts, **FEW)
        assert_same(raised.value.images, expected)
        with pytest.raises(kind) as raised:  # as batches draw
            sampling.sample(prepare(pipe, prompts, FEW))
        assert_same(raised.value.images, expected)


def explain(pipe):
    image = Image.new("RGB", (64, 64), "red")
    return sdattn.explain(pipe, image, PROMPT)


CALLS = {  # what breaks once the run has its images, and how many they are
    "explain()": (explain, explaining, "_told", 1),
    "edit()": (lambda pipe: edit(pipe, PROMPT, "a red dog", **FEW), editing, "edited_words", 2),
    "guide()": (
        lambda pipe: guide(pipe, PROMPT, [inside("cat", (0, 0, 0.5, 0.5))], steps=1.0, **FEW),
        sampling,
        "_image_runs",
        1,
    ),
    "knockout()": (
        lambda pipe: sdattn.knockout(pipe, PROMPT, "cat", **FEW),
        knockouts,
        "images_of",
        2,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_that_draws_does_so(name, pipe, monkeypatch):
    call, module, broken, number = CALLS[name]

    def fails(*given, **options):
        raise RuntimeError("boom")

    monkeypatch.setattr(module, broken, fails)
    with pytest.raises(RuntimeError, match="boom") as raised:
        call(pipe)
    assert len(raised.value.images) == number
    assert all(isinstance(image, Image.Image) for image in raised.value.images)


def test_errors_before_the_last_step_have_none(pipe):
    generate(pipe, PROMPT, **FEW)  # its images are another call's
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - whatever it says
        generate(pipe, PROMPT, seed=-1, **FEW)
    assert raised.value.images == ()

    def stop(*_):
        raise LookupError

    with pytest.raises(LookupError) as raised:
        generate(pipe, PROMPT, callback_on_step_end=stop, **FEW)
    assert not hasattr(raised.value, "images")


def test_knockouts_that_fail_leave_a_run_as_it_is(pipe, monkeypatch):
    def fails(*given, **options):
        raise RuntimeError("boom")

    monkeypatch.setattr(knockouts, "draw_without", fails)
    with pytest.warns(sdattn.errors.SdattnWarning, match="no causal maps: boom"):
        run = generate(pipe, PROMPT, causal=True, **FEW)
    assert_same(run.images, drawn(pipe))
