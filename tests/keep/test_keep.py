"""What a capture keeps of steps, heads and columns."""

from dataclasses import fields
from inspect import signature

import pytest
import torch
from helpers.capture_runs import assert_untouched, run
from helpers.rounding import rounding
from helpers.tiny_pipelines import make_pipeline

from sdattn import CaptureError, capture
from sdattn.keep.keep import Keep


def test_an_option_of_capture_is_a_field_of_keep_with_the_same_default():
    options = signature(capture).parameters
    assert ["target", *(field.name for field in fields(Keep))] == [*options]
    defaults = {name: option.default for name, option in options.items() if name != "target"}
    assert Keep.of(**defaults) == Keep.of() == Keep()


@pytest.mark.slow
def test_steps_heads_and_tokens_are_slices_of_everything():
    pipe = make_pipeline()
    options = {"num_inference_steps": 3}
    with capture(pipe, steps="all", heads="all") as everything:
        run(pipe, **options)
    with capture(pipe, steps=[0, 2], heads=[1], tokens=[2, 3, 0], dtype=torch.float64) as some:
        run(pipe, **options)
    with capture(pipe) as mean:
        run(pipe, **options)
    for name, full in everything.maps.items():
        assert full.shape[:2] == (1, 3)
        picked = full[:, [0, 2]][:, :, [1]][..., [2, 3, 0]]
        near = {"rtol": rounding(16 + 77), "atol": 0}  # one head's products are another call
        torch.testing.assert_close(some.maps[name], picked.double(), **near)
        torch.testing.assert_close(mean.maps[name], full.mean((1, 2)))
    assert everything.timesteps == [667, 334, 1]
    assert len(everything.maps) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": [9]}, "head 9 of .* which has 2"),
        ({"tokens": [77]}, r"token column 77 .*\(0 to 76\)"),
    ],
)
def test_columns_and_heads_that_are_not_there(tiny_pipe, options, message):
    with pytest.raises(CaptureError, match=message), capture(tiny_pipe, **options):
        run(tiny_pipe)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_maps_of_a_dtype_that_holds_no_shares_are_refused(tiny_unet, dtype):
    with pytest.raises(ValueError, match=f"dtype={dtype}: .* floating"):
        with capture(tiny_unet, dtype=dtype):
            pass


@pytest.mark.parametrize(
    ("among", "message"), [([[0], [1], [2]], "3 list.*2 image"), ([[0, 77]], "up to 77.*columns")]
)
def test_keys_of_other_images_or_beyond_the_text_are_refused(tiny_pipe, among, message):
    before = tiny_pipe.unet.attn_processors
    with pytest.raises(CaptureError, match=message), capture(tiny_pipe, among=among):
        run(tiny_pipe, num_images_per_prompt=2)
    assert_untouched(tiny_pipe.unet, before)
