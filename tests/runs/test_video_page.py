"""The page of a video: its numbers, its frames and its size; test_video_page_browser opens it."""

import base64
import io
from html import escape

import numpy as np
import pytest
from helpers.page_data import assert_close, data_of, expected_maps, maps_of, values_of
from helpers.small_runs import small_run
from helpers.video_rows import wan
from helpers.video_runs import disc_run
from PIL import Image

from sdattn import generate
from sdattn.runs.imagerun import group_heatmaps
from sdattn.runs.report import maps, report
from sdattn.runs.run import Run

LONG = "red circle on blue square in a white room by day"  # words enough with the next
NOISY = {"frames": 81, "latent": 21, "size": (832, 480), "grid": (30, 52), "noise": 12.0}


def frames_of(page):
    """The images of a page's video, the middle one from the page itself."""
    data = data_of(page)["video"]
    own = page.decode().split('id="image" src="')[1].split('"')[0]
    uris = [*data["frames"]]
    assert uris[data["middle"]] == ""
    uris[data["middle"]] = own
    files = [base64.b64decode(uri.split(";base64,")[1]) for uri in uris]
    return [Image.open(io.BytesIO(file)).convert("RGB") for file in files]


def test_the_page_holds_each_frame_and_each_map_of_it():
    run = disc_run(steps=2, groups=2)
    page = report(run)
    data = data_of(page)
    wanted = expected_maps(run)
    wanted += [run.heatmaps[name].values.double().numpy() for name in ("<sos>", "<eos>", "<pad>")]
    assert_close(maps_of(data), wanted)
    assert data["groups"] == list(group_heatmaps(run)) and len(data["groups"]) == 2
    # a VAE that cuts time by four: the first frame alone, then four and four
    assert data["video"]["latent"] == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert data["video"]["rate"] == 8.0 and data["video"]["middle"] == 4
    for shown, frame in zip(frames_of(page), run.video, strict=True):
        assert shown.tobytes() == frame.tobytes()  # few bytes need no loss
    assert report(run) == page


def test_a_video_that_a_model_made_has_a_page():
    size = {"height": 64, "width": 96, "num_frames": 5, "max_sequence_length": 12}
    run = generate(wan(), "a red cat", num_inference_steps=1, guidance_scale=1.0, **size)[0]
    data = data_of(report(run))
    assert_close(maps_of(data)[:3], values_of(run.heatmaps))
    assert len(data["video"]["frames"]) == len(run.video)


def test_an_images_page_has_nothing_of_a_video():
    page = report(small_run()).decode()
    assert "video" not in data_of(page.encode())
    for part in ('id="player"', 'id="strips"', "requestAnimationFrame(tick)", ".player"):
        assert part not in page
        assert part in report(disc_run()).decode()


@pytest.mark.slow
def test_a_page_of_81_noisy_frames_is_under_8_mb():
    """As Wan makes them: 832x480, a latent of 21 frames, 12 words."""
    run = disc_run(**NOISY, prompt=f"{LONG} cat", steps=4, groups=2)
    assert len(run.heatmaps.occurrences()) == 12
    page = report(run)
    assert 4_000_000 < len(page) < 8_000_000
    data = data_of(page)
    shown = maps_of(data)
    assert_close(shown[:12], values_of(run.heatmaps))  # at their own 30x52
    frames = frames_of(page)
    assert len({frame.size for frame in frames}) == 1 and frames[0].width >= 384
    of_disc = [np.asarray(frame.resize((26, 15)), int) for frame in frames]
    wanted = [np.asarray(frame.convert("RGB").resize((26, 15)), int) for frame in run.video]
    assert all(np.abs(a - b).mean() < 6 for a, b in zip(of_disc, wanted, strict=True))
    group = group_heatmaps(run)[data["groups"][0]]
    fine, coarse = values_of(group)[0], shown[12]
    by = 30 // coarse.shape[1]
    assert by == 2 and coarse.shape == (21, 15, 26)  # rows and columns, and never frames
    means = fine.reshape(21, 15, by, 26, by).mean((2, 4))
    np.testing.assert_allclose(coarse, means, atol=np.ptp(means) / 250)


def test_what_a_page_has_no_room_for_is_left_out_and_said(monkeypatch):
    run = disc_run(steps=2, groups=2)
    told = "The page has no room for these maps: {}."
    cells = 3 * 8 * 12 * 3  # of the words of one look
    assert "has no room" not in report(run).decode()
    monkeypatch.setitem(maps._BUDGETS, "groups", 2 * cells // 64 - 1)
    page = report(run)
    data = data_of(page)
    assert data["groups"] == [] and len(data["steps"]) == 2
    assert told.format("layers") in page.decode()
    assert_close(maps_of(data)[:3], values_of(run.heatmaps))
    monkeypatch.setitem(maps._BUDGETS, "steps", 2 * cells // 64 - 1)
    page = report(run)
    assert data_of(page)["steps"] == []
    assert told.format("layers, steps") in page.decode()


def test_a_notebook_shows_the_page_and_key_frames_of_each_word():
    one = disc_run()
    run = Run([one], store=None, layers=one.layers)
    html = run._repr_html_()
    assert escape(report(one).decode()) in html
    assert html.count("<img") == 6 * (1 + 3)  # six key frames: themselves, then a row a word
    at = [1, 3, 4, 6, 7, 9]
    notes = [text.split("</span>")[0] for text in html.split('opacity:.7">')[1:]]
    own = one.heatmaps["cat"].of_frames(9).numpy()
    assert notes[-6:] == [f"frame {n}, peak {own[n - 1].max():.2g}" for n in at]
    alone = one.heatmaps._repr_html_()
    assert alone.count("<img") == 3 * 3
    assert [f"latent frame {n}" in alone for n in range(4)] == [True, True, True, False]
