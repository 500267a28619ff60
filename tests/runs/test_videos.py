"""Runs of videos: what generate() makes of them, their folders, and one frame as an image's run."""

import io
import json

import numpy as np
import pytest
import torch
from helpers.joint_video_rows import (
    cogvideox,
    cogvideox15,
    hunyuan_video,
    hunyuan_video15,
    mochi,
)
from helpers.ltx2_rows import ltx2
from helpers.refusals import refused_unrun
from helpers.small_images import new_image
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline
from helpers.unet_rows import animatediff, make_small_unet
from helpers.video_rows import ltx, wan
from helpers.wan_rows import wan22_small_from_image, wan_from_image
from PIL import Image, ImageDraw

import sdattn
from sdattn import capture, explain, generate, heatmaps, load_run
from sdattn.edit import edit
from sdattn.figures import figure
from sdattn.files.videos import read_video
from sdattn.maps.heatmap import latent_frames
from sdattn.maps.sheets import frame_means, strips
from sdattn.models.facts import frame_rate
from sdattn.runs.drawings import drawings
from sdattn.runs.imagerun import group_heatmaps, step_heatmaps
from sdattn.runs.packing import pack_run
from sdattn.runs.report import report
from sdattn.runs.unpacking import unpack_run

PROMPT = "a red cat"
SMALL = {"num_inference_steps": 2, "height": 64, "width": 96}
WAN = {**SMALL, "num_frames": 5, "max_sequence_length": 12}
HUNYUAN = {
    "max_sequence_length": 12,
    "true_cfg_scale": 5.0,
    "prompt_template": {"template": "[INST]clip: {}[/INST]", "crop_start": 4},
}
FROM_IMAGE = {"image": new_image((96, 64))}
VIDEO = "video.mp4"


@pytest.fixture(scope="module", autouse=True)
def as_mp4():
    pytest.importorskip("av")


@pytest.fixture(scope="module")
def pipe():
    return wan()


@pytest.fixture(scope="module")
def run(pipe):
    return generate(pipe, PROMPT, seed=3, capture_options={"steps": "all"}, **WAN)[0]


@pytest.fixture(scope="module")
def files(run):
    return pack_run(run, ("image", "video", "overlays", "grid", "maps", "masks")).files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "frames", "options", "latent"),
    tiered(
        [
            (wan, 5, {"max_sequence_length": 12}, 2),
            (wan_from_image, 5, FROM_IMAGE, 2),
            (wan22_small_from_image, 5, {**FROM_IMAGE, "max_sequence_length": 12}, 2),
            (ltx, 9, {"max_sequence_length": 12}, 2),
            (ltx2, 9, {"max_sequence_length": 12}, 2),
            (cogvideox, 9, {"max_sequence_length": 12}, 3),
            (cogvideox15, 9, {"max_sequence_length": 12}, 2),
            (hunyuan_video, 5, HUNYUAN, 2),
            (hunyuan_video15, 5, {}, 2),
            (mochi, 7, {"max_sequence_length": 12}, 2),
            (animatediff, 3, {}, 3),
        ],
        quick=0,
    ),
)
def test_the_video_is_the_pipelines_own_and_its_maps_those_of_a_capture(
    make, frames, options, latent
):
    pipe, options = make(), {**SMALL, **options, "num_frames": frames}
    made = generate(pipe, PROMPT, seed=3, **options)
    noise = [torch.Generator().manual_seed(3)]
    with capture(pipe, steps=(0.5, 1.0)) as store:
        [plain] = pipe(prompt=[PROMPT], generator=noise, output_type="pil", **options).frames
    [video] = made.videos
    assert len(made) == 1 and len(video) == frames == len(plain)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(video, plain, strict=True))
    assert made.images[0].tobytes() == plain[frames // 2].tobytes()
    [expected] = heatmaps(store)
    assert made.heatmaps[0].maps.shape[0] == latent
    torch.testing.assert_close(made.heatmaps[0]["cat"].map, expected["cat"].map, atol=1e-6, rtol=0)
    assert made.info[0]["frames"] == frames and made.info[0]["size"] == [96, 64]


def test_several_videos_have_seeds_of_their_own(pipe):
    options = {**WAN, "num_inference_steps": 1, "num_frames": 1}
    both = generate(pipe, [PROMPT, "a dog"], seed=5, num_videos_per_prompt=2, **options)
    assert [info["seed"] for info in both.info] == [5, 6, 7, 8]
    assert [info["prompt"] for info in both.info] == [PROMPT] * 2 + ["a dog"] * 2
    assert len({video[0].tobytes() for video in both.videos}) == 4
    assert "4 videos 96x64, 1 frames," in repr(both)


@pytest.mark.slow
def test_a_video_of_one_frame_has_the_images_maps():
    """The UNet of AnimateDiff with its motion modules at 0 is that of Stable Diffusion."""
    video = animatediff()
    for name, weights in video.unet.named_parameters():
        if "motion_modules" in name and "proj_out" in name:
            torch.nn.init.zeros_(weights)
    unet = make_small_unet()
    unet.load_state_dict(video.unet.state_dict(), strict=False)
    components = {"text_encoder": video.text_encoder, "vae": video.vae}
    of_one = make_pipeline(unet=unet, **components)
    options = {**SMALL, "num_inference_steps": 1}
    of_image = generate(of_one, PROMPT, **options)[0]
    of_video = generate(video, PROMPT, num_frames=1, **options)[0]
    assert of_video.heatmaps.maps.shape[0] == 1
    for name, layer in of_video.layers.layers.items():
        expected = of_image.layers.layers[name].maps
        torch.testing.assert_close(layer.maps[:, 0], expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_the_folder_of_a_video(run, files):
    words = ["01-a", "02-red", "03-cat"]
    drawn = [f"heatmaps/{word}.mp4" for word in words] + [f"masks/{word}.webp" for word in words]
    held = {VIDEO, "image.png", "grid.png", "strips.png", "maps.safetensors", "steps.safetensors"}
    assert files.keys() == {*drawn, *held, "run.json"}
    back = read_video(files[VIDEO], "mp4", VIDEO)
    for frame, plain in zip(back, run.video, strict=True):
        nearest = [
            np.abs(np.asarray(frame, float) - np.asarray(x, float)).mean() for x in run.video
        ]
        assert run.video[int(np.argmin(nearest))].tobytes() == plain.tobytes()
    overlays = read_video(files["heatmaps/03-cat.mp4"], "mp4", "cat")
    for number, latent in enumerate(latent_frames(2, 5)):
        shown = run.heatmaps["cat"].frame(latent).overlay(run.video[number])
        seen = np.asarray(overlays[number].crop((0, 0, *shown.size)), float)
        assert np.abs(seen - np.asarray(shown, float)).mean() < 6
    assert pack_run(run, ("video",)).files[VIDEO] == files[VIDEO]


def test_masks_have_one_level_for_all_frames(run, files):
    mask = run.heatmaps["cat"].mask((64, 96)).numpy()
    frames = read_video(files["masks/03-cat.webp"], "webp", "mask", 5, 16)
    for frame, latent in zip(frames, latent_frames(2, 5), strict=True):
        assert ((np.asarray(frame)[..., 0] == 255) == mask[latent]).all()


@pytest.mark.slow
def test_a_folder_is_read_back(run, tmp_path):
    saved = sdattn.runs.folder.save_run(tmp_path / "run", run)
    back = load_run(saved)
    assert len(back.video) == 5 and back.video.rate == 16 and back.video[0].size == (96, 64)
    assert back.image.tobytes() == run.image.tobytes()
    torch.testing.assert_close(back.heatmaps.maps, run.heatmaps.maps, atol=1e-4, rtol=1e-3)
    assert "96x64, 5 frames, of 'a red cat'" in repr(back)
    document = json.loads((saved / "run.json").read_bytes())
    assert document["frames"] == 5 and document["frame_rate"] == 16
    mass = run.layers.as_saved().layers
    assert len(document["statistics"][2]["frames"]) == 2 and len(mass) == 2
    assert back.settings.options["num_frames"] == 5 and back.settings.captured.steps == "all"
    (saved / VIDEO).write_bytes(b"")
    with pytest.raises(ValueError, match="video.mp4.*run"):
        load_run(saved)
    (saved / VIDEO).unlink()
    with pytest.raises(FileNotFoundError, match=r"has no video.mp4"):
        load_run(saved)


def test_a_video_that_was_not_saved_is_refused_where_it_is_shown(run):
    held = pack_run(run, ("image", "maps")).files
    back = unpack_run(held, "run")
    assert len(back.video) == 5 and back.image.tobytes() == run.image.tobytes()
    torch.testing.assert_close(back.heatmaps.maps, run.heatmaps.maps, atol=1e-4, rtol=1e-3)
    for way in (
        lambda: report(back),
        lambda: figure(back, "words"),
        lambda: figure(back, "frames"),
        lambda: drawings(back, back.heatmaps.occurrences(), PROMPT),
        lambda: back.frame(0),
    ):
        with pytest.raises(FileNotFoundError, match="without its video"):
            way()


@pytest.mark.slow
def test_videos_are_compared_frame_by_frame(run, tmp_path):
    first = load_run(sdattn.runs.folder.save_run(tmp_path / "run", run))
    with pytest.raises(TypeError, match="Comparisons"):
        sdattn.diff(first, first)
    frames = sdattn.diff(first.frame(0), first.frame(4), words=["cat"])
    apart = first.heatmaps["cat"].map[1] - first.heatmaps["cat"].map[0]
    torch.testing.assert_close(frames.words[0].difference, apart, atol=1e-6, rtol=0)


def test_one_frame_is_an_images_run(run):
    first, last = run.frame(0), run.frame(4)
    assert first.video is None and first.image.tobytes() == run.video[0].tobytes()
    assert first.heatmaps.maps.shape == (4, 6, 12)
    assert torch.equal(last.heatmaps["cat"].map, run.heatmaps["cat"].map[1])
    assert first.heatmaps.top == last.heatmaps.top == run.heatmaps.top
    of_layer = group_heatmaps(last)
    mean = sum(layer.maps[0, 1] for layer in run.layers.layers.values()) / 2
    torch.testing.assert_close(of_layer["block 4x6"].maps, mean)
    steps = [step["cat"].map for step in step_heatmaps(last)]
    whole = [step["cat"].map[1] for step in step_heatmaps(run)]
    assert len(steps) == 2 and all(map(torch.equal, steps, whole))
    with pytest.raises(ValueError, match="frame 5.*0 to 4"):
        run.frame(5)
    with pytest.raises(ValueError, match="no frames"):
        first.frame(0)


@pytest.mark.slow
def test_refined_maps_of_frames_alone():
    """Each frame of AnimateDiff attends to itself alone: one frame's is that of an image."""
    pipe = animatediff()
    kept = {"steps": "all"}
    options = {**SMALL, "num_frames": 3, "capture_options": kept, "refine": "self"}
    video = generate(pipe, PROMPT, **options)[0]
    back = pack_and_read(video)
    assert back.layers.affinity.shape == video.layers.affinity.shape == (1, 3, 96, 96)
    one = back.frame(2)
    steps, whole = (step_heatmaps(run)[1]["cat"].map for run in (one, back))
    torch.testing.assert_close(steps, whole[2])


def pack_and_read(run):
    return unpack_run(pack_run(run).files, "run")


def test_strips_show_the_mean_of_each_frame(run):
    word = run.heatmaps["cat"]
    expected = [word.map[i].double().mean() for i in (0, 1, 1, 1, 1)]
    np.testing.assert_allclose(frame_means(word, 5), expected, atol=1e-12)
    maps = run.heatmaps.occurrences()
    sheet = np.asarray(strips(maps, 5))
    most = max(frame_means(heatmap, 5).max() for heatmap in maps)
    table = np.asarray(sdattn.maps.render.colorize(np.linspace(0, 1, 256)[None]))[0]
    for row, heatmap in enumerate(maps):
        for frame, mean in enumerate(frame_means(heatmap, 5)):
            shown = sheet[6 + row * 34 + 14, 150 + frame * 128 + 64]
            assert (table[min(255, int(mean / most * 256))] == shown).all()


def test_strips_note_the_highest_mean_of_a_word_and_its_frame(run, monkeypatch):
    noted, text = [], ImageDraw.ImageDraw.text

    def note(draw, place, said, *given, **options):
        noted.append(said)
        text(draw, place, said, *given, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", note)
    maps = run.heatmaps.occurrences()
    strips(maps, 5)
    for heatmap in maps:
        first, second = (float(heatmap.map[i].double().mean()) for i in (0, 1))
        expected = f"{first:.2g} in 1" if first >= second else f"{second:.2g} in 2"
        assert noted[noted.index(heatmap.label) + 1] == expected


def test_strips_name_the_first_and_the_last_frame_in_the_middle_of_a_row(run):
    sheet = np.asarray(strips(run.heatmaps.occurrences(), 5).convert("L")).astype(int)
    row = sheet[-34:-6]  # of 28 pixels, above a gap of 6
    for columns in (slice(150, 220), slice(720, 790)):
        inked = np.flatnonzero((abs(row[:, columns] - row[0, 0]) > 40).any(1))
        assert (inked.min() + inked.max()) / 2 == pytest.approx(14, abs=2.5)


def test_the_grid_has_a_row_a_word(run, files):
    with Image.open(io.BytesIO(files["grid.png"])) as grid:
        tile = run.heatmaps["cat"].frame(0).overlay(run.video[0]).size
        across, down = grid.width // tile[0], grid.height // tile[1]
    assert (across, down) == (5, 4)  # five frames; the video and three words


def test_drawings_of_some_words(run):
    found = drawings(run, [run.heatmaps["red cat"]], PROMPT, ("overlays",))
    assert found.keys() == {"heatmaps/01-red-cat.mp4"}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (wan, {"num_frames": 7}, "num_frames=7.*1.*frame"),
        (wan, {"num_frames": 0}, "num_frames=0.*1"),
        (ltx, {"num_frames": 4}, "multiple of 8.*1 and 9"),
        (ltx2, {"num_frames": 8}, "multiple of 8.*1 and 9"),
        (cogvideox, {"num_frames": 5}, "multiple of 8.*1 and 9"),
        (mochi, {"num_frames": 9}, "multiple of 6.*7 and 13"),
        (animatediff, {"num_frames": 33}, "32.*pipe.enable_free_noise"),
        (make_pipeline, {"num_frames": 2}, "makes images, not videos"),
        (wan, {"num_frames": 10**8 + 1}, "frame.s. of 96x64 pixels need"),
        (wan, {"capture_options": {"frames": [0]}}, "all frames"),
        (wan, {"output_type": "np"}, "output_type"),
        (wan_from_image, {**FROM_IMAGE, "max_sequence_length": 226}, "226.*WanTransformer3D.*512"),
        (wan_from_image, {**FROM_IMAGE, "num_videos_per_prompt": 2}, "=2.*WanImageToVideoPipeline"),
        (wan22_small_from_image, {**FROM_IMAGE, "num_frames": 1}, "=1.*WanImageToVideo.*5"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_runs(make, options, message):
    pipe = make()
    with refused_unrun(pipe, message):
        generate(pipe, PROMPT, **{**SMALL, **options})


@pytest.mark.parametrize(("patch", "rate"), [(None, 8), (2, 16)])
def test_a_family_shows_each_of_its_releases_at_its_own_rate(patch, rate):
    """As the cards of CogVideoX and of CogVideoX 1.5 say."""
    assert frame_rate(cogvideox(patch_size_t=patch, patch_bias=patch is None), {}) == rate


def test_edits_knockouts_and_looks_at_images_are_refused_by_name(pipe):
    small = {key: value for key, value in WAN.items() if key != "num_frames"}
    for way in (
        lambda: generate(pipe, PROMPT, causal=True, **small),
        lambda: sdattn.knockout(pipe, PROMPT, "cat", **small),
    ):
        with pytest.raises(TypeError, match="WanPipeline.*knockouts"):
            way()
    for way in (
        lambda: edit(pipe, PROMPT, "a red dog", **small),
        lambda: explain(pipe, new_image(), PROMPT),
    ):
        with pytest.raises(TypeError, match="found a WanPipeline"):
            way()
