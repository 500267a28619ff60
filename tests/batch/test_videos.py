"""Batches of videos: a tiny Wan, in each format."""

import gc
import json
from dataclasses import replace

import numpy as np
import pytest
from helpers.batch_draws import draw
from helpers.batch_runs import FORMATS, rows_of
from helpers.trees import tree
from helpers.video_rows import wan
from PIL import Image

from sdattn import generate, load_pipeline
from sdattn.batch import open_batch, verify
from sdattn.batch.shard import _beside_video
from sdattn.files.videos import best_format

OPTIONS = {"num_inference_steps": 2, "height": 32, "width": 48, "num_frames": 5}
OPTIONS |= {"max_sequence_length": 12}
ROWS = (
    {"prompt": "a cat", "id": "plain"},
    {"prompt": "red dog", "id": "long", "num_frames": 9},
    {"prompt": "dog and cat", "id": "few", "words": ["cat"]},
)
VIDEO = f"video.{best_format()}"


@pytest.fixture(scope="module")
def video_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video") / "wan"
    wan().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(video_model, tmp_path_factory):
    """The videos in each format, a batch of one at a time."""
    root = tmp_path_factory.mktemp("runs")
    for format in FORMATS:
        how = {"options": OPTIONS, "batch_size": 1, "save": None, "format": format}
        assert draw(video_model, root / format, ROWS, **how).exit_code == 0
    return root


def folder_of(root, item):
    [row] = [row for row in rows_of(root / "metadata.jsonl") if row["id"] == item]
    return root / row["place"]


@pytest.mark.slow
def test_an_item_is_what_generate_makes_of_it(video_model, runs, tmp_path):
    """And beside it stands what the gallery shows, the overlays of the middle frame among it."""
    pipe = load_pipeline(video_model, device="cpu")
    for seed, row in enumerate(ROWS):
        options = {**OPTIONS, **{k: v for k, v in row.items() if k not in ("id", "prompt")}}
        generate(pipe, row["prompt"], seed=seed, **options).save(tmp_path / row["id"])
        found = tree(folder_of(runs / "folder", row["id"]))
        alone = tree(tmp_path / row["id"])
        for files in (found, alone):
            files.pop("run.json"), files.pop("report.html")  # which name the item
        stills = {name for name in found if name.startswith("heatmaps/") and name[-4:] == ".png"}
        names = {name.rpartition(".")[0] for name in alone if name.startswith("heatmaps/")}
        assert {name[:-4] for name in stills} == names
        assert found.keys() - alone.keys() == {"preview.webp", *stills}
        # of an item with words, colours may differ by a rounding
        same = ("image.png", VIDEO, "maps.safetensors") if "words" in row else alone
        assert {name: found[name] for name in same} == {name: alone[name] for name in same}


@pytest.mark.slow
def test_all_formats_hold_the_same_and_are_whole(runs):
    first = open_batch(runs / "folder")
    for format in FORMATS:
        assert verify(runs / format) == (3, [])
        run = open_batch(runs / format)
        assert [len(one.video) for one in run.values()] == [5, 9, 5]
        for item, one in run.items():
            assert [*map(np.array_equal, one.video, first[item].video)] == [True] * len(one.video)
            assert one.heatmaps.maps.equal(first[item].heatmaps.maps)
        rows = rows_of(runs / format / "metadata.jsonl")
        assert [row["frames"] for row in rows] == [5, 9, 5]
        settings = json.loads((runs / format / "batch.json").read_bytes())["settings"]
        assert settings["video_format"] == best_format() and "video" in settings["save"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves files open
def test_webdataset_reads_the_videos(runs):
    video = (folder_of(runs / "folder", "long") / VIDEO).read_bytes()
    webdataset = pytest.importorskip("webdataset")
    shards = sorted(map(str, (runs / "webdataset").glob("shards/*.tar")))
    samples = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
    found = {one["__key__"]: one for one in samples}
    gc.collect()
    assert found["long"][VIDEO] == video


@pytest.mark.slow
def test_a_preview_is_small_and_takes_the_videos_time(runs):
    for item, frames in (("plain", 5), ("long", 8)):
        with Image.open(folder_of(runs / "folder", item) / "preview.webp") as found:
            assert (found.n_frames, max(found.size)) == (frames, 48)


def test_a_gallery_gets_a_preview_beside_the_video_and_stills_beside_overlays():
    run = generate(wan(), "a cat", seed=0, **OPTIONS)[0]
    preview, stills = {"preview.webp"}, {"heatmaps/01-a.png", "heatmaps/02-cat.png"}
    assert _beside_video(run, ("maps",)) == {}
    assert _beside_video(run, ("maps", "video")).keys() == preview
    assert _beside_video(run, ("maps", "overlays")).keys() == stills
    assert _beside_video(run, ("overlays", "video")).keys() == preview | stills
    assert _beside_video(replace(run, video=None), ("overlays", "video")) == {}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "cat", "num_frames": 4}, "The nearest are 1 and 5"),
        ({"prompt": "cat", "edit_to": "dog"}, "makes videos, not images to edit"),
    ],
)
def test_lines_that_cannot_be(video_model, tmp_path, capsys, row, reason):
    with pytest.raises(ValueError, match="lines? .*can be drawn"):
        draw(video_model, tmp_path / "run", [row], options=OPTIONS)
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_video_of_a_model_of_images_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="makes images. Leave video out"):
        draw(model, tmp_path / "run", ["a cat"], save=("video", "maps"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_videos_of_two_kinds_do_not_come_into_one_run(video_model, tmp_path, monkeypatch):
    def command(kind, **more):
        monkeypatch.setattr("sdattn.batch.shard.best_format", lambda: kind)
        monkeypatch.setattr("sdattn.runs.drawings.best_format", lambda: kind)
        more = {"options": OPTIONS, "save": ("video",), **more}
        return draw(video_model, tmp_path / "run", ROWS[:1], **more)

    pytest.importorskip("av")
    command("mp4")
    with pytest.raises(ValueError, match="video_format mp4 is now webp"):
        command("webp")
    assert command("webp", force=True).before == 0
    assert (folder_of(tmp_path / "run", "plain") / "video.webp").is_file()
    assert verify(tmp_path / "run") == (1, [])
