"""Maps of videos: an axis for the frames of the latent before rows and columns."""

import numpy as np
import pytest
import torch
from helpers.rows import Way
from helpers.video_rows import video, wan, wan_of_two

import sdattn
from sdattn import CaptureError, capture, heatmaps
from sdattn.maps.aggregation import aggregate, sharpened
from sdattn.maps.heatmap import latent_frames
from sdattn.maps.layermaps import layer_maps
from sdattn.maps.presets import PRESETS, Preset
from sdattn.prompts.tokens import read_prompt

WAY = Way(size=(64, 96))


def drawn(pipe, options):
    noise = torch.Generator().manual_seed(0)
    return pipe("a red cat", num_inference_steps=2, generator=noise, **options)


@pytest.fixture(scope="module")
def watched():
    """A pipeline, what capture() saw of a video of two latent frames, and its options."""
    pipe = wan()
    options = video(pipe, WAY)
    with capture(pipe, steps="all", heads="all") as store:
        drawn(pipe, options)
    return pipe, store, options


def test_maps_have_an_axis_for_frames(watched):
    _, store, _ = watched
    assert store.latent_size == (2, 4, 6)
    assert {tuple(maps.shape) for maps in store.maps.values()} == {(1, 2, 2, 2, 4, 6, 12)}
    assert store.nbytes == store.expected_nbytes == 2 * (2 * 2 * 2 * 4 * 6 * 12) * 4
    [found] = heatmaps(store)
    assert found.maps.shape == (2, 4, 6, 12) and found["red"].map.shape == (2, 4, 6)
    # the default preset reads the second half of the steps
    mean = sum(maps[0, 1].double().mean(0) for maps in store.maps.values()) / 2
    torch.testing.assert_close(found["red"].map.double(), mean[..., 1], atol=1e-6, rtol=0)
    assert "2x4x6" in repr(found) and "2x4x6" in repr(found["red"]) and "2x4x6" in store.report()


def test_axes_have_names(watched):
    _, store, _ = watched
    pytest.importorskip("xarray")
    layer = next(iter(store.maps))
    found = store.to_xarray(layer)
    assert found.dims == ("image", "step", "head", "frame", "row", "col", "token")
    assert list(found.frame) == [0, 1]
    words = heatmaps(store)[0].to_xarray()
    assert words.dims == ("word", "frame", "row", "col")


def test_chosen_frames_are_those_of_all(watched):
    pipe, store, options = watched
    with capture(pipe, steps="all", heads="all", frames=[1]) as one:
        drawn(pipe, options)
    for layer, maps in store.maps.items():
        assert torch.equal(one.maps[layer], maps[:, :, :, 1:])
    assert one.nbytes == one.expected_nbytes == store.nbytes / 2
    assert list(one.to_xarray(layer).frame) == [1]
    word = heatmaps(one)[0]["cat"]
    assert (word.frame(0).map == heatmaps(store)[0]["cat"].map[1]).all()
    assert list(heatmaps(one)[0].to_xarray().frame) == [1]
    with pytest.raises(ValueError, match=r"frames.*\[1\]"):
        word.of_frames(5)  # of the one that is there it would make all five
    with capture(pipe) as mean, capture(pipe, frames=[1, 0]) as turned:
        drawn(pipe, options)
    for layer, maps in mean.maps.items():
        torch.testing.assert_close(turned.maps[layer], maps.flip(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("frames", "said"),
    [([2], "Asked for frame 2 of blocks.0.attn2, whose grid is 2x4x6. Its frames: 2"), ([], "[]")],
)
def test_frames_that_there_are_not_are_refused(watched, frames, said):
    pipe, _, options = watched
    with pytest.raises((ValueError, CaptureError)) as refused, capture(pipe, frames=frames):
        pipe("a red cat", num_inference_steps=1, **options)
    assert said in str(refused.value)


def test_an_image_has_no_frames(tiny_pipe):
    with pytest.raises(CaptureError, match="it is an image"), capture(tiny_pipe, frames=[0]):
        tiny_pipe("a red cat", num_inference_steps=1, height=64, width=64)


@pytest.mark.parametrize(
    ("latent", "frames", "each"),
    [(21, 81, 4), (13, 49, 4), (4, 25, 8), (7, 37, 6), (1, 1, None), (16, 16, 1)],
)
def test_the_first_frame_stands_alone(latent, frames, each):
    expected = [0] + [i for i in range(1, latent) for _ in range(each or 0)]
    assert latent_frames(latent, frames) == expected


def test_frames_of_a_decoder_are_those_of_its_latent():
    """What changes when one frame of the latent does, decoded by the VAE itself: it looks back, so
    the first frame that changes is the first that the latent frame stands for."""
    vae = wan().vae
    torch.manual_seed(3)
    latent = torch.randn(1, 4, 4, 4, 4)
    with torch.no_grad():
        plain = vae.decode(latent).sample
        for number in range(1, 4):
            other = latent.clone()
            other[:, :, number] += 1
            changed = (vae.decode(other).sample - plain).abs().amax((0, 1, 3, 4)) > 1e-6
            first = latent_frames(4, plain.shape[2]).index(number)
            assert not changed[:first].any() and changed[first]


@pytest.mark.parametrize("asked", range(1, 170, 4))
def test_two_frames_of_cogvideoxs_latent_are_one(asked):
    """Source: pipeline_cogvideox.py, ``__call__``: an odd latent gets a frame more, which is cut
    off at the beginning (``latents[:, additional_frames:]``); autoencoder_kl_cogvideox.py,
    ``_decode``: two at a time, and the first alone of an odd number only."""
    coded = (asked - 1) // 4 + 1
    own = [0, *(1 + i // 4 for i in range(asked - 1))] if coded % 2 else range(4 * coded)
    video = own if coded % 2 else [frame // 4 for frame in own]
    expected = [(coded % 2 + one) // 2 for one in video]
    assert latent_frames(expected[-1] + 1, len(video)) == expected
    if coded % 2 == 0:
        with pytest.raises(ValueError, match=f"{asked}.*frames"):
            latent_frames(expected[-1] + 1, asked)


def test_videos_that_no_latent_has_are_refused():
    with pytest.raises(ValueError, match="80.*frames.*21"):
        latent_frames(21, 80)
    assert latent_frames(22, 88) == [i // 4 for i in range(88)]


def video_of(values):
    return sdattn.Heatmap("cat", torch.as_tensor(values, dtype=torch.float32), (1,))


def test_numbers_of_a_video_are_sums_over_frames():
    values = np.random.default_rng(0).random((3, 4, 6))
    video = video_of(values)
    found = video.statistics()
    p = values.astype(np.float32).astype(float)
    rows, cols = (np.arange(4) + 0.5) / 4, (np.arange(6) + 0.5) / 6
    assert found.mass == pytest.approx(p.sum())
    assert found.mean == pytest.approx(p.sum() / 72)
    assert found.frames == pytest.approx(tuple(p.sum((1, 2))))
    centre = (p.sum((0, 2)) @ rows / p.sum(), p.sum((0, 1)) @ cols / p.sum())
    assert found.centre == pytest.approx(centre)
    assert found.entropy == pytest.approx(-(p / p.sum() * np.log(p / p.sum())).sum())
    image = video_of(values[:1])
    flat = sdattn.Heatmap("cat", image.values[0], (1,)).statistics()
    for name in ("peak", "mean", "mass", "centre", "area", "entropy"):
        assert getattr(image.statistics(), name) == pytest.approx(getattr(flat, name))
    assert flat.frames is None and "frames" not in flat.to_json()


def test_a_mask_of_a_video_has_one_level_and_parts_of_each_frame():
    values = np.zeros((2, 3, 5))
    values[0, 0, :2], values[0, 2, 4] = 1.0, 1.0
    values[1, 1, 1] = 0.4
    video = video_of(values)
    assert video.mask().sum((1, 2)).tolist() == [3, 0]
    assert video.mask(largest=True).sum((1, 2)).tolist() == [2, 0]
    assert video.mask((6, 10)).shape == (2, 6, 10)


def test_words_of_a_video_share_its_cells():
    torch.manual_seed(0)
    maps = torch.rand(2, 3, 4, 77)
    from helpers.tiny_tokenizers import tiny_tokenizer

    found = sdattn.Heatmaps(read_prompt(tiny_tokenizer(), "red cat"), maps)
    labels = found.segment(["red", "cat"])
    values = torch.stack([found["red"].map, found["cat"].map])
    low, high = values.amin((1, 2, 3), keepdim=True), values.amax((1, 2, 3), keepdim=True)
    strength = (values - low) / (high - low)
    masks = strength >= 0.5
    expected = torch.where(masks.any(0), strength.masked_fill(~masks, -1).argmax(0) + 1, 0)
    assert torch.equal(labels, expected)


def test_a_frame_is_an_image_on_the_scale_of_the_video():
    values = np.random.default_rng(0).random((3, 4, 6)).astype(np.float32)
    video = video_of(values)
    one = video.frame(2)
    assert (np.asarray(one) == values[2]).all() and one.full == video.full == values.max()
    assert one.ends == (0.0, values.max())
    assert (video.of_frames(9).numpy() == values[latent_frames(3, 9)]).all()
    with pytest.raises(ValueError, match="which has 3 frames, 0 to 2"):
        video.frame(3)
    with pytest.raises(ValueError, match="frames"):
        one.frame(0)
    with pytest.raises(ValueError, match="frames"):
        one.of_frames(4)


def test_what_draws_one_image_asks_for_a_frame():
    from PIL import Image

    video = video_of(np.random.default_rng(0).random((3, 4, 6)))
    for draw in (lambda: video.overlay(Image.new("RGB", (96, 64))), video.plot):
        with pytest.raises(ValueError, match=r"frames.*heatmap.frame\(0\)"):
            draw()
    assert video._repr_png_().startswith(b"\x89PNG")


def test_a_power_is_of_the_range_over_all_frames():
    torch.manual_seed(0)
    maps = torch.rand(2, 3, 4, 5)
    low, high = maps.amin((0, 1, 2)), maps.amax((0, 1, 2))
    expected = high * ((maps - low) / (high - low)) ** 3
    torch.testing.assert_close(sharpened(maps, 3.0), expected)


def test_presets_read_videos(watched):
    """Each head by itself, resized and summed, as of images, a frame at a time."""
    _, store, _ = watched
    preset = Preset("heads", ("block",), steps="sum", heads="pool", each_head=True)
    maps = layer_maps(store, preset)
    whole = aggregate(maps, preset)
    assert whole.shape == (1, 2, 4, 6, 12)
    frames = [maps_of_frame(store, preset, number) for number in range(2)]
    torch.testing.assert_close(whole[:, 0], frames[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(whole[:, 1], frames[1], atol=1e-6, rtol=0)
    assert PRESETS["sum"].name == heatmaps(store, preset="sum")[0].preset.name


def maps_of_frame(store, preset, number):
    total = sum(maps.mean((1, 2))[:, number] for maps in store.maps.values())
    return total / len(store.maps) * 2  # two steps


@pytest.mark.slow
def test_one_capture_watches_both_models_of_wan_2_2():
    """Each runs in one of two steps; test_matrix.py has the maps."""
    pipe = wan_of_two()
    options = video(pipe, WAY)
    plain = drawn(pipe, {**options, "output_type": "np"}).frames
    before = [model.attn_processors for model in (pipe.transformer, pipe.transformer_2)]
    with capture(pipe) as store:
        seen = drawn(pipe, {**options, "output_type": "np"}).frames
    assert (plain == seen).all()
    assert len(store.passes) == 2
    for model, held in zip((pipe.transformer, pipe.transformer_2), before, strict=True):
        assert all(held[name] is one for name, one in model.attn_processors.items())
