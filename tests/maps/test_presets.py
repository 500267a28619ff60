"""The table of presets: what is in it, by what name, that it survives a saved run, and what a run
captures for it."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.presets import JOINT
from helpers.tiny_pipelines import make_pipeline

from sdattn import generate
from sdattn.maps.presets import PRESETS, Preset, preset_of


def test_the_presets_are_those_of_the_field():
    assert list(PRESETS) == ["default", "daam", "p2p", "attend-and-excite", "ovam", "sum", *JOINT]
    assert all(preset.name == name for name, preset in PRESETS.items())
    assert PRESETS["sum"].unit == "attention, summed over heads"
    assert PRESETS["default"].part.holds(0.5)  # a step in the very middle of the run


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
@pytest.mark.parametrize("refine", [None, "self"])
def test_a_preset_comes_back_from_json(preset, refine):
    own = replace(preset, name="own", refine=refine)
    assert Preset.from_json(json.loads(json.dumps(own.to_json()))) == own


@pytest.mark.parametrize("change", [{"colour": 3}, {"name": ...}])
def test_a_preset_with_other_attributes_is_refused(change):
    held = {**PRESETS["daam"].to_json(), **change}
    held = {name: one for name, one in held.items() if one is not ...}
    with pytest.raises(ValueError, match="attributes"):
        Preset.from_json(held)


def test_a_preset_is_found_by_its_name_or_taken_as_it_is():
    own = Preset("own", ("up",))
    assert preset_of("p2p") is PRESETS["p2p"]
    assert preset_of(own) is own
    assert preset_of(own, "self") == Preset("own", ("up",), refine="self")
    refined = replace(own, refine="self")
    assert preset_of(refined) is refined
    assert PRESETS["default"].refine is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "dam"}, "preset='dam'.*p2p"),
        ({"refine": "cross"}, "refine='cross'"),
    ],
)
def test_unknown_names_are_refused_before_the_model_runs(options, message):
    with pytest.raises(ValueError, match=message):
        preset_of(**{"preset": "default", **options})
    pipe, ran = make_pipeline(), []
    pipe.unet.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=message):
        generate(pipe, "a cat", **options)
    assert not ran


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": "max"}, "heads='max'"),
        ({"steps": "first"}, "steps='first'"),
        ({"steps": (0.9, 0.1)}, "steps=\\(0.9, 0.1\\)"),
        ({"steps": True}, "steps=True"),
        ({"steps": torch.tensor(1)}, r"steps=tensor\(1\)"),
        ({"steps": (False, True)}, r"steps=\(False, True\)"),
        ({"resize": "nearest"}, "resize='nearest'"),
        ({"refine": "cross"}, "refine='cross'"),
        ({"places": ()}, "places=\\(\\)"),
        ({"places": "up"}, "places='up'"),
        *[({"sharpen": bad}, f"sharpen={bad}.*0") for bad in (0.0, -1.0, math.inf, math.nan)],
        *[({"depth": bad}, "depth") for bad in (1.0, -0.1, (0.5, 0.5), (0.5, 1.5))],
    ],
)
def test_a_preset_of_ones_own_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PRESETS["default"], **change)


def test_its_title_says_whether_maps_are_refined():
    assert PRESETS["daam"].title == "daam" and preset_of("daam", "self").title == "daam, refined"


SMALL = {"num_inference_steps": 4, "height": 64, "width": 96}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "daam", "capture_options": {"heads": [0]}}, "'daam'.*heads"),
        ({"preset": "attend-and-excite", "capture_options": {"steps": [0]}}, "sets steps"),
        ({"preset": "attend-and-excite", "words": ["cat"]}, "sets words"),
        ({"capture_options": {"among": [[0, 1]]}}, "words of the prompt"),
        ({"capture_options": {"refine": "self"}}, "words of the prompt"),
    ],
)
def test_captures_that_a_preset_cannot_do_with_are_refused_before_the_run(options, message):
    pipe, ran = make_pipeline(), []
    pipe.unet.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=message):
        generate(pipe, "a red cat", **SMALL, **options)
    assert not ran
