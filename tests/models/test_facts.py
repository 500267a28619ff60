"""Rates of videos: refused before the model runs, or written so that the run can be read again."""

import re
import sys
from fractions import Fraction
from pathlib import Path

import diffusers
import numpy as np
import pytest
from helpers.tiers import tiered
from helpers.video_rows import ltx

from sdattn import generate, load_run
from sdattn.files.videos import Video, preview, read_video
from sdattn.models.facts import frame_rate
from sdattn.models.families import registered

SMALL = {"num_inference_steps": 1, "height": 64, "width": 64, "num_frames": 9}
SMALL |= {"max_sequence_length": 12, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def pipe():
    return ltx()


NONE = [0, 0.0, -1, -0.04, 0.0099, 1e-320, 1000.1, 1500, 2000, 3000, 1e9, 10**400, True, "24"]
NONE += [[24], *map(float, ("nan", "inf", "-inf")), np.float32(3000), np.float64("nan")]


@pytest.mark.parametrize("rate", NONE, ids=repr)
def test_a_rate_that_no_file_can_hold_is_refused_before_the_model_runs(pipe, rate, monkeypatch):
    kind = type(pipe.transformer)
    monkeypatch.setattr(kind, "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match="frame_rate"):
        generate(pipe, "a red cat", **SMALL, frame_rate=rate)


@pytest.mark.parametrize("without_pyav", tiered([False, True]))
@pytest.mark.parametrize("rate", tiered([23.976, 1000, 0.01]))
@pytest.mark.slow
def test_a_run_at_a_rate_is_read_again(pipe, rate, without_pyav, tmp_path, monkeypatch):
    if without_pyav:
        monkeypatch.setitem(sys.modules, "av", None)
    else:
        pytest.importorskip("av")
    made = generate(pipe, "a red cat", **SMALL, frame_rate=rate)
    made.save(tmp_path / "run")
    video, back = made[0].video, load_run(tmp_path / "run").video
    assert back.rate == rate and len(back) == len(back.frames) == 9
    # noise, of which a codec keeps little: each frame is nearest to itself
    apart = [[np.abs(1.0 * np.asarray(x) - np.asarray(y)).mean() for y in video] for x in back]
    assert np.argmin(apart, axis=1).tolist() == list(range(9))


@pytest.mark.parametrize("given", [30, 12.5, Fraction(24000, 1001), np.float32(8), np.int64(24)])
def test_numbers_of_every_kind_are_rates(pipe, given):
    assert frame_rate(pipe, {"frame_rate": given}) == float(given)
    assert frame_rate(pipe, {"frame_rate": None}) == frame_rate(pipe, {}) == 25


def test_the_preview_of_a_slow_video_can_be_read(pipe):
    frames = generate(pipe, "a red cat", **SMALL)[0].video.frames * 10
    assert len(read_video(preview(Video(frames, 0.01)), "webp", "preview", 8, 0.01)) == 8


@pytest.mark.parametrize(
    ("family", "file"),
    [
        ("Wan", "wan/pipeline_wan"),
        ("SkyReels V2", "skyreels_v2/pipeline_skyreels_v2"),
        ("Kandinsky 5", "kandinsky5/pipeline_kandinsky"),
    ],
)
def test_rates_are_those_of_diffusers_examples(family, file):
    """Other examples differ from the authors' own pages, which these records follow."""
    source = Path(diffusers.__file__).parent / "pipelines" / f"{file}.py"
    [shown] = set(re.findall(r"export_to_video\(.*fps=(\d+)", source.read_text("utf-8")))
    [rate] = [one.fps for one in registered() if one.name == family]
    assert rate == int(shown)
