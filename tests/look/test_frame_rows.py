"""Videos whose frames are rows of the batch, one after the other: AnimateDiff."""

from dataclasses import replace

import pytest
import torch
from diffusers import MotionAdapter, UNetMotionModel
from helpers.matrix import ROWS, WAYS
from helpers.matrix_oracle import recorded
from helpers.tiny_pipelines import make_small_unet
from helpers.video_rows import wan

from sdattn import CaptureError, capture, heatmaps
from sdattn.maps.aggregation import refining

[ROW] = [row for row in ROWS if row.name == "AnimateDiff"]
WAY = replace(WAYS[0], size=(64, 96))
MID = "mid_block.attentions.0.transformer_blocks.0.attn2"
FINEST = "up_blocks.1.attentions.1.transformer_blocks.0.attn1"
TEXT = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
LATENT = torch.randn(2, 4, 3, 8, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def watched():
    """A pipeline, what its attention did in two guided steps, and a store of each head and step."""
    pipe = ROW.make()
    with recorded(pipe.unet) as record:
        ROW.run(pipe, WAY)
    kinds = {"kinds": ("cross", "self"), "steps": "all", "heads": "all"}
    with capture(pipe, branch="both", **kinds) as store:
        ROW.run(pipe, WAY)
    return pipe, record, store


def make_motion_model():
    torch.manual_seed(2)
    adapter = MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
    )
    unet = make_small_unet()
    return unet, UNetMotionModel.from_unet2d(unet, adapter).eval()


def called(model, n_frames=3, **options):
    """A capture of a model that is called by hand for two videos, each frame with its video's text,
    as the pipeline calls it."""
    with torch.no_grad(), capture(model, **options) as store:
        model(LATENT[:, :, :n_frames], 500, TEXT.repeat_interleave(n_frames, 0))
    return store


def test_each_videos_branch_is_told_once():
    """The first half of the rows is the negative prompt's, of three frames, one video each."""
    store = called(make_motion_model()[1], branch="both", guidance="batch")
    assert store.branches == ("unconditional", "conditional")
    assert store.passes[0].rows == (0, 1, 2, 3, 4, 5) and store.images == 2


@pytest.mark.slow
def test_frames_of_both_branches_are_in_their_order(watched):
    """[negative, prompt], each frame by frame, with each head and step, against float64."""
    _, record, store = watched
    assert store.branches == ("unconditional", "conditional") and store.images == 2
    assert store.latent_size == (3, 8, 12) and store.is_video
    for layer in store.layers:
        found = store.maps[layer.name]  # [images, steps, heads, frames, rows, cols, keys]
        for step, probs in enumerate(record[layer.name]):  # [2 * frames, heads, N, keys]
            for image in range(2):
                for frame in range(3):
                    one = found[image, step, :, frame].flatten(1, 2).double()
                    torch.testing.assert_close(one, probs[3 * image + frame], atol=1e-6, rtol=0)
    assert store.maps[FINEST].shape == (2, 2, 2, 3, 8, 12, 96)  # a frame attends to itself alone
    assert store.nbytes == store.expected_nbytes


def test_all_ways_of_keeping_are_of_the_same_maps(watched):
    pipe, _, store = watched
    whole = {name: maps[1:] for name, maps in store.maps.items()}
    with capture(pipe) as mean, capture(pipe, frames=[2, 0], tokens=[1, 3]) as some:
        ROW.run(pipe, WAY)
    with capture(pipe, heads="all", frames=[1]) as one, capture(pipe, steps="last") as last:
        ROW.run(pipe, WAY)
    for layer, maps in mean.maps.items():
        close = {"atol": 1e-6, "rtol": 0}
        torch.testing.assert_close(maps, whole[layer].mean((1, 2)), **close)
        chosen = whole[layer].mean((1, 2))[:, [2, 0]][..., [1, 3]]
        torch.testing.assert_close(some.maps[layer], chosen, **close)
        torch.testing.assert_close(one.maps[layer], whole[layer].mean(1)[:, :, [1]], **close)
        torch.testing.assert_close(last.maps[layer], whole[layer][:, 1].mean(1), **close)
    for held in (mean, some, one, last):
        assert held.nbytes == held.expected_nbytes


@torch.no_grad()
def test_a_video_of_one_frame_has_the_values_of_its_image():
    """With motion modules that add nothing the model is the UNet of the image."""
    unet, model = make_motion_model()
    for name, part in model.named_modules():
        if ".motion_modules." in name and name.endswith("proj_out"):
            torch.nn.init.zeros_(part.weight), torch.nn.init.zeros_(part.bias)
    video = called(model, n_frames=1, heads="all")
    with capture(unet, heads="all") as image:
        made = unet(LATENT[:, :, 0], 500, TEXT).sample
    torch.testing.assert_close(model(LATENT[:, :, :1], 500, TEXT).sample[:, :, 0], made)
    assert set(video.maps) == set(image.maps) and video.is_video and not image.is_video
    for layer, maps in image.maps.items():
        assert video.maps[layer].shape[2] == 1
        torch.testing.assert_close(video.maps[layer][:, :, 0], maps, atol=1e-6, rtol=0)


def test_each_video_may_be_asked_about_a_text_of_its_own():
    _, model = make_motion_model()
    own, asked = called(model), called(model, text_states=TEXT)
    turned = called(model, text_states=TEXT.flip(0))
    for layer, maps in own.maps.items():
        torch.testing.assert_close(asked.maps[layer], maps, atol=1e-6, rtol=0)
        assert (turned.maps[layer] - maps).abs().max() > 1e-3
    with pytest.raises(ValueError, match="6 texts and the run has 2 images"):
        called(model, text_states=TEXT.repeat(3, 1, 1))


@pytest.mark.slow
def test_a_softmax_among_words_is_of_each_video():
    _, model = make_motion_model()
    whole, some = called(model), called(model, among=[[0, 1], [2, 5, 6]])
    assert whole.images == 2 and whole.maps[MID].shape == (2, 3, 4, 6, 9)
    heads = called(model, heads="all")
    for layer, maps in heads.maps.items():
        for video, columns in enumerate(([0, 1], [2, 5, 6])):
            chosen = maps[video][..., columns]
            expected = (chosen / chosen.sum(-1, keepdim=True)).mean(0)
            found = some.maps[layer][video][..., columns]
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
            torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]))
        assert whole.maps[layer].shape == some.maps[layer].shape


COMPILED = {"mean": {}, "self": {"kinds": ("cross", "self")}, "one frame": {"frames": [1]}}


@pytest.mark.parametrize("kept", COMPILED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_is_recorded_of_a_compiled_model_is_folded_too(kept, eagerly):
    _, model = make_motion_model()
    expected = called(model, **COMPILED[kept])
    model.compile()
    found = called(model, **COMPILED[kept])
    assert list(found.maps) == list(expected.maps)
    for layer, maps in expected.maps.items():
        torch.testing.assert_close(found.maps[layer], maps, atol=1e-6, rtol=0)


def test_each_frame_is_refined_along_its_own_attention():
    """As DiffSegmenter has it of an image, on the finest grid of the way up, written out."""
    _, model = make_motion_model()
    store = called(model, kinds=("cross", "self"), layers=refining(model))
    plain, refined = store.maps, []
    own = [m for name, m in plain.items() if name.endswith("attn1")]
    affinity = torch.stack(own).mean(0).flatten(2, 3).double()  # [videos, frames, N, N]
    texts = [m for name, m in plain.items() if name.startswith("up") and name.endswith("attn2")]
    mean = torch.stack(texts).mean(0).double().flatten(2, 3)  # [videos, frames, N, tokens]
    for video in range(2):
        frames = [affinity[video, frame] @ mean[video, frame] for frame in range(3)]
        refined.append(torch.stack(frames).unflatten(1, (8, 12)))
    labels = {"cat": [2], "all": list(range(9))}
    for video, found in enumerate(heatmaps(store, model, [labels, labels], refine="self")):
        torch.testing.assert_close(found.maps.double(), refined[video], atol=1e-6, rtol=0)
    one = called(model, kinds=("cross", "self"), layers=refining(model), frames=[2])
    [last, _] = heatmaps(one, model, [labels, labels], refine="self")
    torch.testing.assert_close(last.maps[0].double(), refined[0][2], atol=1e-6, rtol=0)


def test_a_video_of_one_sequence_is_refined_along_all_its_frames():
    pipe = wan()
    options = {"num_frames": 5, "height": 64, "width": 96, "num_inference_steps": 1}
    options |= {"max_sequence_length": 12, "output_type": "latent"}
    with capture(pipe, kinds=("cross", "self")) as store:
        pipe("a red cat", **options)
    maps = [store.maps[f"blocks.{i}.attn2"].double() for i in range(2)]
    own = [store.maps[f"blocks.{i}.attn1"].double().flatten(1, 3) for i in range(2)]
    mean, affinity = sum(maps) / 2, sum(own) / 2  # [1, 2, 4, 6, 12], [1, 48, 48]
    expected = (affinity[0] @ mean[0].flatten(0, 2)).unflatten(0, (2, 4, 6))
    [found] = heatmaps(store, refine="self")
    torch.testing.assert_close(found.maps.double(), expected, atol=1e-6, rtol=0)
    with capture(pipe, kinds=("cross", "self"), frames=[1]) as some:
        pipe("a red cat", **options)
    with pytest.raises(CaptureError, match=r"all frames of a video, and this store holds some"):
        heatmaps(some, refine="self")
