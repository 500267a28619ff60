"""What a model's files say, next to what its loaded pipeline says."""

import json

import pytest
from helpers.tiers import tiered

from sdattn.loading.facts import check_frames, check_size
from sdattn.loading.outline import outline
from sdattn.models.demos import DEMOS
from sdattn.models.facts import makes_videos, size_unit


def refused(check, *args):
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", tiered(DEMOS, quick=2))
def test_files_refuse_what_the_pipeline_would(name):
    pipe = outline(name)
    unit = size_unit(pipe)
    wrong = [side for side in range(1, 3 * unit) if refused(check_size, name, {"width": side})]
    assert wrong == [side for side in range(1, 3 * unit) if side % unit]
    assert bool(refused(check_frames, name, {"num_frames": 3})) is not makes_videos(pipe)


def test_a_message_names_the_unit():
    assert f"multiple of {size_unit(outline('demo'))} " in refused(
        check_size, "demo", {"height": 100}
    )


@pytest.mark.parametrize("index", ["{", "[]", "{}", json.dumps({"unet": 3, "vae": [None]})])
def test_files_that_tell_nothing_refuse_nothing(index, tmp_path):
    (tmp_path / "model_index.json").write_text(index)
    asked = {"width": 3, "num_frames": 3}
    assert not refused(check_size, str(tmp_path), asked)
    assert not refused(check_frames, "owner/name", asked)
