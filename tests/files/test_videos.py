"""Videos as files: what is written can be read, here and by others; what is broken is refused."""

import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers.tiers import tiered
from PIL import Image

from sdattn.files.videos import FORMATS, Video, best_format, read_video, write_video


def moving(number=5, size=(48, 32), step=8):
    """A white square that moves to the right on grey."""
    frames = []
    for i in range(number):
        pixels = np.full((size[1], size[0], 3), 90, np.uint8)
        pixels[8:16, i * step : i * step + 8] = 255
        frames.append(Image.fromarray(pixels))
    return frames


def apart(first, second):
    return np.abs(np.asarray(first, float) - np.asarray(second, float)).mean()


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_written_is_read(kind):
    pytest.importorskip("av")
    frames = moving()
    data = write_video(iter(frames), 8, kind)
    back = read_video(data, kind, "video")
    assert [frame.size for frame in back] == [(48, 32)] * 5
    for number, frame in enumerate(back):
        # the square is where it was, and nowhere else
        nearest = min(range(5), key=lambda other: apart(frames[other], frame))
        assert nearest == number and apart(frames[number], frame) < 4
    assert write_video(frames, 8, kind) == data


@pytest.mark.parametrize("kind", FORMATS)
def test_frames_that_are_alike_are_all_there(kind):
    pytest.importorskip("av")
    first, last = moving(2)
    for frames in ([first] * 4, [first, last, last, last, first], [last, first, first]):
        back = read_video(write_video(frames, 8, kind), kind, "video", len(frames), 8)
        assert len(back) == len(frames)
        for frame, expected in zip(back, frames, strict=True):
            assert apart(frame, expected) < 4 < apart(first, last)


RATES = [0.01, 0.0105, 0.3, 1, 7.5, 8, 12, 16, 23.976, 24000 / 1001, 29.97, 30, 59.94, 100]
RATES += [120, 144, 333.3, 400, 499.9, 600, 666.7, 700, 900, 999.5, 1000]
MOST = [1001, 2000, 3000, 1e9]  # which play at 1000


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rate", tiered([*MOST, *RATES], quick=2))
def test_every_rate_is_read_back_frame_by_frame(kind, rate):
    """Also where frames that are alike are one, for as long as all of them."""
    pytest.importorskip("av")
    one, two, three = moving(3)
    frames = [one] * 3 + [two] * 200 + [three, one, two, two, three] + [one] * 37
    back = read_video(write_video(frames, rate, kind), kind, "video", len(frames), rate)
    assert len(back) == len(frames)
    far = [apart(found, expected) for found, expected in zip(back, frames, strict=True)]
    assert max(far) < 4 < apart(one, two)


@pytest.mark.parametrize("rate", RATES)
def test_a_webp_takes_the_time_of_its_rate(rate):
    """To the millisecond, however many frames there are."""
    with Image.open(io.BytesIO(write_video(moving(6) * 20, rate, "webp"))) as video:
        times = [
            (video.seek(i), video.load(), video.info["duration"])[2] for i in range(video.n_frames)
        ]
    assert abs(sum(times) - 120 * 1000 / rate) <= 0.5 and min(times) >= 1


@pytest.mark.parametrize("rate", RATES)
def test_an_mp4_has_its_rate(rate):
    av = pytest.importorskip("av")
    with av.open(io.BytesIO(write_video(moving(3), rate, "mp4"))) as file:
        assert float(file.streams.video[0].average_rate) == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "rate",
    [0, -8, 0.009, 1e-300, float("nan"), float("inf"), True, "8", None],
)
def test_a_rate_that_cannot_be_is_refused(kind, rate):
    with pytest.raises(ValueError, match="0.01 to 1000"):
        write_video(moving(), rate, kind)


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="ffprobe is not installed")
def test_other_programs_read_the_rate_and_the_frames(tmp_path):
    pytest.importorskip("av")
    file = tmp_path / "video.mp4"
    file.write_bytes(write_video(moving(), 12.5, "mp4"))
    asked = ["ffprobe", "-v", "error", "-count_frames", "-show_streams", "-of", "json", str(file)]
    [stream] = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)["streams"]
    assert (stream["codec_name"], stream["pix_fmt"]) == ("h264", "yuv420p")
    assert (stream["nb_read_frames"], stream["r_frame_rate"]) == ("5", "25/2")


def test_pillow_reads_the_rate_of_a_webp():
    with Image.open(io.BytesIO(write_video(moving(), 8, "webp"))) as video:
        video.seek(1)
        video.load()
        assert video.n_frames == 5 and video.info["duration"] == 125 and video.info["loop"] == 0


def test_odd_sides_are_made_even_for_mp4():
    pytest.importorskip("av")
    [frame] = read_video(write_video(moving(1, (47, 31)), 8, "mp4"), "mp4", "video")
    assert frame.size == (48, 32)
    assert apart(frame.crop((0, 0, 47, 31)), moving(1, (47, 31))[0]) < 4
    assert apart(frame.crop((47, 0, 48, 32)), frame.crop((46, 0, 47, 32))) < 4


def test_without_pyav_videos_are_webp(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    assert best_format() == "webp"
    with pytest.raises(ImportError, match=r"pip install 'sdattn\[video\]'"):
        write_video(moving(), 8, "mp4")
    with pytest.raises(ImportError, match="run/video.mp4.*PyAV"):
        read_video(b"", "mp4", "run/video.mp4")
    assert len(read_video(write_video(moving(), 8, "webp"), "webp", "video")) == 5


def test_with_a_pyav_that_has_no_h264_videos_are_webp(monkeypatch):
    """Known before the model runs, not where its video is written."""
    av = pytest.importorskip("av")
    assert best_format() == "mp4"
    monkeypatch.setattr(av, "codecs_available", av.codecs_available - {"libx264"})
    assert best_format() == "webp"


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_no_video_is_refused(kind):
    pytest.importorskip("av")
    held = io.BytesIO()
    moving(1)[0].save(held, "PNG")
    for data in (b"", b"no video", held.getvalue()):
        with pytest.raises(ValueError, match="run/video"):
            read_video(data, kind, "run/video")
    with pytest.raises(ValueError, match="at least one frame"):
        write_video([], 8, kind)


def test_a_video_is_read_when_it_is_looked_at():
    read = []

    def reading():
        read.append(1)
        return moving()

    video = Video(reading, 8, 5)
    assert len(video) == 5 and video.middle == 2 and video.key_frames(3) == [0, 2, 4]
    assert repr(video) == "Video(5 frames, 8 a second)" and not read
    assert video[4].tobytes() == moving()[4].tobytes() and len(list(video)) == 5
    assert read == [1]
    assert Video(moving(1), 8).key_frames() == [0]
    assert Video(moving(20), 8).key_frames(6) == [0, 4, 8, 11, 15, 19]
