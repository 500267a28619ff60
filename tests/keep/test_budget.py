"""`max_bytes`: a run that would hold more is refused before its first step, and told how not to."""

import gc
import re
import weakref

import pytest
import torch
from helpers.capture_runs import assert_untouched, run
from helpers.rows import Way
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_unet
from helpers.video_rows import video, wan

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
    assert f"of 4 model call(s) would hold up to {size_text(bytes_held)}" in said


def followed(advice, options, call):
    """The options of a capture and of a call after one piece of advice."""
    options, call = dict(options), dict(call)
    number = int((re.findall(r"\d+", advice) or [0])[0])
    if "leave out" in advice:
        del options[re.search("`(.*)`", advice)[1]]
    elif "dtype" in advice:
        options["dtype"] = torch.float16
    elif "layers" in advice:
        options["layers"] = lambda la, size: size is None or la.grid(size)[0] <= number
    elif "images" in advice:
        call["num_images_per_prompt"] = number
    elif "height" in advice:
        call.update(height=64, width=64)
    else:
        [name] = re.findall("`(.*)`", advice)
        options[name] = range(number)
    return options, call


@pytest.mark.parametrize("part", tiered([2, 40], quick=0, daily=1))
def test_each_advice_is_enough_and_holds_what_it_says(part):
    pipe, call = make_pipeline(), {"num_inference_steps": 6, "num_images_per_prompt": 4}
    with capture(pipe, **FULL) as store:
        run(pipe, **call)
    most = held(store) // part
    said = refused(pipe, most, FULL, **call).partition("To hold less, ")[2]
    every = re.findall(r"(?:, |or |^)?([^()]+) \(([\d.]+ \w+)\)", said)
    assert len(every) >= (7 if part == 2 else 2)
    for advice, size in every:
        if "together" in advice:
            continue
        changed, drawn = followed(advice, FULL, call)
        with capture(pipe, max_bytes=most, **changed) as store:
            run(pipe, **drawn)
        assert size_text(held(store)) == size, advice


@pytest.mark.slow
def test_where_one_change_is_not_enough_several_are_named_and_hold_what_they_say():
    pipe, options = make_pipeline(), {**FULL, "layers": 16}
    with capture(pipe, **options) as store:
        run(pipe)
    most = held(store) // 100
    said = refused(pipe, most, options)
    found = re.search(
        r"keep 1 of the 5 `layers` and keep (\d+) of the 77 `tokens` together \((.*?)\)", said
    )
    assert found and "leave out `steps`, leave out `heads`" in said
    layer, tokens = store.layers[0].name, range(int(found[1]))
    with capture(pipe, max_bytes=most, layers=layer, tokens=tokens) as store:
        run(pipe)
    assert size_text(held(store)) == found[2]
    assert "allow more" in refused(pipe, 1, {})


def test_frames_of_a_video_are_advised():
    pipe = wan()
    options = {**video(pipe, Way(size=(64, 96))), "num_inference_steps": 2}
    with capture(pipe) as store:
        pipe("a red cat", **options)
    with pytest.raises(ValueError, match="1 of the 2 `frames`"):
        with capture(pipe, max_bytes=held(store) - 1):
            pipe("a red cat", **options)
    with capture(pipe, max_bytes=held(store) // 2, frames=[0]):
        pipe("a red cat", **options)


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
    with pytest.raises(ValueError, match="steps"), capture(unet, max_bytes=6 * 10**5, steps=[0, 1]):
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
