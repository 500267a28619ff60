"""`max_bytes`: a run that would hold more is refused before its first step."""

import gc
import weakref

import pytest
import torch
from diffusers import (
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from helpers.capture_runs import assert_untouched, run
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_unet

from sdattn import capture
from sdattn.errors import size_text

FULL = {"steps": "all", "heads": "all"}


def held(store):
    """The bytes of a store's tensors, added up here."""
    tensors = [tensor for layer in store.sums.values() for tensor in layer.tensors()]
    return sum(tensor.nbytes for tensor in tensors)


def calls_of(model):
    found = []
    model.conv_in.register_forward_hook(lambda *_: found.append(1))
    return found


def refused(pipe, max_bytes, options, **call):
    """The message, where no layer of the model ran and every processor came back."""
    calls, before = calls_of(pipe.unet), pipe.unet.attn_processors
    with pytest.raises(ValueError, match="max_bytes") as error:
        with capture(pipe, max_bytes=max_bytes, **options):
            run(pipe, **call)
    assert not calls
    assert_untouched(pipe.unet, before)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        FULL,
        {"steps": [0, 3]},
        {"heads": [1], "dtype": torch.float16, "layers": [16, 4]},
        {"kinds": ("cross", "self"), "tokens": [1, 2]},
        {"branch": "both", "steps": "last"},
        {"queries": [(3, 12), (0, 1)], "steps": "all"},
    ],
)
def test_what_is_said_is_what_is_held(options):
    pipe = make_pipeline()
    call = {"num_inference_steps": 4, "num_images_per_prompt": 2}
    with capture(pipe, **options) as store:
        run(pipe, **call)
    bytes_held = held(store)
    with capture(pipe, max_bytes=bytes_held, **options) as store:
        run(pipe, **call)
    assert held(store) == store.expected_nbytes == bytes_held
    said = refused(pipe, bytes_held - 1, options, **call)
    assert f"of 4 model call(s) would hold up to {size_text(bytes_held)} of maps, and" in said
    assert said.endswith("or allow more.")


def of(kind):
    """A tiny pipeline of a class, SDXL's or of SD 1.x."""
    made = make_sdxl_pipeline() if "XL" in kind.__name__ else make_pipeline()
    parts = {**made.components}
    pipe = kind(**parts) if "XL" in kind.__name__ else kind(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


# Of eight steps, those that a part of a run makes
PARTS = [
    (StableDiffusionXLPipeline, {"denoising_end": 0.5}),
    (StableDiffusionXLImg2ImgPipeline, {"denoising_start": 0.5, "denoising_end": 0.75}),
    (StableDiffusionImg2ImgPipeline, {"strength": 0.5}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), PARTS)
def test_the_calls_are_those_that_the_run_makes(kind, options):
    pipe = of(kind)
    call = {"num_inference_steps": 8, "output_type": "latent", **options}
    if "Img2Img" in kind.__name__:
        call["image"] = torch.rand(1, 3, 64, 64)
    with capture(pipe, steps="all") as store:
        pipe("a red cat", **call)
    made = len(store.passes)
    assert made < 8 and held(store) == store.expected_nbytes
    with capture(pipe, steps="all", max_bytes=held(store)):
        pipe("a red cat", **call)
    with pytest.raises(ValueError, match=rf"of {made} model call\(s\)"):
        with capture(pipe, steps="all", max_bytes=held(store) - 1):
            pipe("a red cat", **call)


@pytest.mark.parametrize("number", [0, -1, 1.5, "4GB", True])
def test_only_a_number_of_bytes_is_one(tiny_pipe, number):
    with pytest.raises(ValueError, match="whole number"):
        capture(tiny_pipe, max_bytes=number).__enter__()


def test_a_bare_model_is_bounded_where_its_steps_do_not_count():
    unet, given = make_unet(), (torch.randn(1, 4, 16, 16), 5, torch.randn(1, 77, 32))
    with capture(unet, max_bytes=10**6) as store:
        unet(*given)
        unet(*given)
    assert held(store) <= 10**6
    with pytest.raises(ValueError, match="pipeline"), capture(unet, max_bytes=10**9, steps="all"):
        unet(*given)
    with capture(unet, max_bytes=10**9, steps=[0, 1]) as store:
        unet(*given)
        unet(*given)
    assert {maps.shape[1] for maps in store.maps.values()} == {2}
    small = pytest.raises(ValueError, match="would hold up to")
    with small, capture(unet, max_bytes=6 * 10**5, steps=[0, 1]):
        unet(*given)


def test_with_a_budget_nothing_is_logged_or_kept_alive(caplog, monkeypatch):
    monkeypatch.setattr("sdattn.keep.budget.MUCH", 1)
    pipe = make_pipeline()
    with capture(pipe, max_bytes=10**9) as store:
        run(pipe)
    assert not caplog.records
    maps = weakref.ref(next(iter(store.sums.values())).total)
    gc.disable()
    try:
        del store
        assert maps() is None
    finally:
        gc.enable()
