"""The presets `gramcol` and `imap`: what runs keep of them, and what is refused before a run."""

from dataclasses import replace

import pytest
import torch
from helpers.joint_video_rows import cogvideox, hunyuan_video, hunyuan_video15
from helpers.tiers import tiered
from helpers.transformer_rows import flux, sd3
from helpers.unet_rows import animatediff
from helpers.video_rows import ltx, wan

from sdattn import PRESETS, capture, generate, heatmaps, load_run
from sdattn.look.other_text import encode_text
from sdattn.runs.imagerun import group_heatmaps, head_heatmaps, step_heatmaps

PROMPT = "a red cat on the sofa"
SMALL = {"num_inference_steps": 2, "height": 64, "width": 96}
HUNYUAN = {"prompt_template": {"template": "[INST]clip: {}[/INST]", "crop_start": 4}}
VIDEOS = {
    "CogVideoX": (cogvideox, {"num_frames": 9, "max_sequence_length": 12}),
    "HunyuanVideo": (hunyuan_video, {"num_frames": 5, "max_sequence_length": 12, **HUNYUAN}),
    "HunyuanVideo 1.5": (hunyuan_video15, {"num_frames": 5}),
}
IMAGES = {**SMALL, "max_sequence_length": 16}
SHORT = "a red cat"


def words_of(prompt):
    return [i for i, token in enumerate(prompt.tokens) if not token.special]


def captured(pipe, prompt, space, options, drawn=None, **more):
    """The mean over layers of what a run has of a prompt's words, ``[(frames,) rows, cols, T]``,
    double."""
    columns = words_of(prompt)
    with capture(pipe, space=space, among=[columns], tokens=columns, **more) as store:
        generate(pipe, drawn or prompt.text, seed=1, preset="columns", **options)
    return torch.stack([maps[0].double() for maps in store.maps.values()]).mean(0)


@pytest.mark.parametrize("kind", tiered(VIDEOS, quick=0, daily=2))
@pytest.mark.parametrize("preset", tiered(["gramcol", "imap"]))
def test_a_word_is_the_mean_of_its_columns_above_the_mean_of_the_words(kind, preset, tmp_path):
    make, options = VIDEOS[kind]
    pipe, options = make(), {**SMALL, **options}
    run = generate(pipe, SHORT, seed=1, preset=preset, **options)
    [found] = run.heatmaps
    mean = captured(pipe, found.prompt, preset, options)
    assert found.columns == tuple(words_of(found.prompt)) and found.maps.ndim == 4
    torch.testing.assert_close(found.maps.double(), mean.clamp(min=0), atol=1e-5, rtol=1e-4)
    columns = [found.columns.index(column) for column in found["red"].columns]
    wanted = mean.clamp(min=0)[..., columns].mean(-1)
    torch.testing.assert_close(found["red"].values.double(), wanted, atol=1e-5, rtol=1e-4)
    assert float(found.maps.max()) > 0 and found.statistics()
    assert found.preset.unit == "likeness of outputs, z-score among words"
    [folder] = run.save(tmp_path / "run")
    back = load_run(folder).heatmaps
    torch.testing.assert_close(back["red"].values, found["red"].values, atol=4e-3, rtol=0)


@pytest.mark.slow
def test_steps_heads_and_groups_are_above_the_mean_of_the_words_too(tmp_path):
    options = {**SMALL, **VIDEOS["CogVideoX"][1]}
    kept = {"steps": "all", "heads": "all"}
    [run] = generate(cogvideox(), SHORT, seed=1, preset="imap", capture_options=kept, **options)
    [group] = group_heatmaps(run).values()
    torch.testing.assert_close(group.maps, run.heatmaps.maps, atol=1e-5, rtol=1e-4)
    assert group.preset.unit == run.heatmaps.preset.unit and group.preset.words == "mean"
    heads = [head for layer in head_heatmaps(run).values() for head in layer.values()]
    assert len(step_heatmaps(run)) == 2 and len(heads) == 4
    assert all(float(one.maps.min()) == 0 for one in [*step_heatmaps(run), *heads])
    assert run.to_xarray("steps").min() >= 0


def test_words_of_each_prompt_and_of_the_negative_one_are_compared_by_themselves():
    pipe, texts = sd3(), [PROMPT, SHORT]
    options = {**IMAGES, "negative_prompt": "a red dog", "preset": "gramcol"}
    both = {"capture_options": {"branch": "both"}}
    [long, short] = generate(pipe, texts, seed=1, **both, **options)
    [alone] = generate(pipe, SHORT, seed=2, **options)
    own = tuple(words_of(alone.heatmaps.prompt))
    assert short.heatmaps.columns == alone.heatmaps.columns == own
    assert len(long.heatmaps.columns) > len(short.heatmaps.columns)
    for found in (short, alone):
        assert found.layers.columns == found.heatmaps.columns
    cat, own = short.heatmaps["cat"].values, alone.heatmaps["cat"].values
    torch.testing.assert_close(cat, own, atol=0.05 * float(own.max()), rtol=0)
    negative = short.texts["negative"]
    assert negative.words == ("a", "red", "dog") and float(negative["dog"].values.max()) > 0


@pytest.mark.slow
def test_another_text_is_compared_in_its_own_words():
    pipe = sd3()
    [asked] = generate(pipe, PROMPT, ask=SHORT, seed=1, preset="gramcol", **IMAGES).asked_heatmaps
    states = encode_text(pipe, SHORT, IMAGES)
    wanted = captured(pipe, asked.prompt, "gramcol", IMAGES, PROMPT, text_states=states)
    torch.testing.assert_close(asked.maps.double(), wanted.clamp(min=0), atol=1e-5, rtol=1e-4)
    own = generate(pipe, SHORT, ask=SHORT, seed=1, preset="gramcol", **IMAGES)
    cat = own.asked_heatmaps[0]["cat"].values
    torch.testing.assert_close(cat, own.heatmaps[0]["cat"].values, atol=1e-4, rtol=1e-3)


def test_chosen_words_are_kept_and_compared_with_all():
    [whole] = generate(flux(), PROMPT, seed=1, preset="gramcol", **IMAGES).heatmaps
    [some] = generate(flux(), PROMPT, seed=1, preset="gramcol", words=["cat"], **IMAGES).heatmaps
    assert some.words == ("cat",)
    torch.testing.assert_close(some["cat"].values, whole["cat"].values, atol=1e-5, rtol=1e-4)


def test_a_softmax_over_the_words_can_stand_in_place_of_the_cut():
    own = replace(PRESETS["gramcol"], contrast=1.0, words="sum")
    [found] = generate(flux(), PROMPT, seed=1, preset=own, **IMAGES).heatmaps
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(found.maps.shape[:2]))
    assert own.unit.endswith("likeness of outputs, z-score among words")


def test_a_store_must_have_compared_the_words():
    pipe = flux()
    with capture(pipe, space="gramcol") as store:
        pipe(PROMPT, **IMAGES)
    with pytest.raises(RuntimeError, match="among=.*columns"):
        heatmaps(store, pipe, PROMPT, preset="gramcol")
    with pytest.raises(RuntimeError, match="Capture with space='attention'"):
        heatmaps(store, pipe, PROMPT)


# -- what is refused before the model runs --------------------------------------------------------

CROSS = {"Wan": wan, "LTX-Video": ltx, "AnimateDiff": animatediff}


def refused(pipe, error, message, prompt=PROMPT, **options):
    ran = []
    model = getattr(pipe, "transformer", None) or pipe.unet
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(error, match=message):
        generate(pipe, prompt, **options)
    assert not ran


@pytest.mark.parametrize("kind", CROSS)
@pytest.mark.parametrize("preset", ["gramcol", "imap"])
def test_cross_attention_has_no_outputs_to_compare(kind, preset):
    pipe = CROSS[kind]()
    refused(pipe, TypeError, f"'{preset}' compares the outputs that joint", preset=preset)
    with pytest.raises(ValueError, match=f"space='{preset}'.*layer"):
        with capture(pipe, space=preset):
            pass


def test_images_and_videos_of_one_frame_have_none_to_tell_apart():
    refused(flux(), TypeError, "'imap' takes the heads .* makes images", preset="imap")
    message = "num_frames=1`: the preset 'imap'"
    refused(cogvideox(), ValueError, message, preset="imap", num_frames=1, **SMALL)


@pytest.mark.parametrize("prompt", ["turquoise", ["a cat", "cat"]])
def test_a_word_alone_is_compared_with_nothing(prompt):
    message = "'gramcol' compares the words .* has 1. Write more words"
    refused(sd3(), ValueError, message, prompt, preset="gramcol", **IMAGES)
