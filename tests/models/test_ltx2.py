"""LTX-2: which columns its connectors make of a prompt, which passes count, and what is refused."""

import diffusers
import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline
from helpers.ltx2_rows import LENGTH, LTX2_VIDEOS, alike_videos, connectors, ltx2, video_and_sound
from helpers.matrix_oracle import expected_maps, recorded
from helpers.newer import needs_argument, newer
from helpers.reading_pipelines import assert_same_columns, tells_ids
from helpers.rows import Way
from helpers.small_images import new_image

from sdattn import CaptureError, capture, generate
from sdattn.cli.info import shortcomings
from sdattn.models.denoiser import find_denoiser
from sdattn.models.facts import default_frames, frame_rate
from sdattn.models.families import reader_of
from sdattn.models.guidance import guidance_of
from sdattn.models.reading import read_prompts

PROMPTS = ["a red cat on the sofa", "a dog", " A turquoise Cat (a cat's SOFA)! "]
WAY = Way(size=(64, 96))
BOTH = ("LTX2Pipeline", "LTX2ImageToVideoPipeline")
OTHERS = [
    name
    for name in dir(diffusers)
    if name.startswith("LTX2") and name.endswith("Pipeline") and name not in BOTH
]

pytestmark = pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")


@pytest.fixture(scope="module")
def pipe():
    needs_argument(diffusers.LTX2VideoTransformer3DModel.__init__, "gated_attn")
    return ltx2(newer=True)


@torch.no_grad()
def columns_of(pipe, prompts, length):
    """The token behind each column of the text states, -1 for registers: the column that changes
    with the token's own states, where the connectors have no layers that mix columns."""
    states, masks, _, _ = pipe.encode_prompt(
        prompts, do_classifier_free_guidance=False, max_sequence_length=length
    )
    ids = states[..., 0].round().long() - 1
    before = pipe.connectors(states, masks)[0]
    found = torch.full(ids.shape, -1)
    for place in range(length):
        other = states.clone()
        other[:, place] += torch.randn(states.shape[-1])
        changed = (pipe.connectors(other, masks)[0] != before).any(-1)
        for row, columns in enumerate(changed):
            assert columns.sum() <= 1
            found[row, columns] = ids[row, place]
    return found.tolist()


@pytest.mark.parametrize("length", [32, 8])
def test_columns_are_those_of_the_connectors(length):
    pipe = ltx2(newer=True, connectors=connectors(video_connector_num_layers=0))
    tells_ids(pipe.text_encoder)
    read = read_prompts(pipe, PROMPTS, max_sequence_length=length)
    made = columns_of(pipe, PROMPTS, length)
    assert_same_columns(read, made, pipe.tokenizer)
    assert made[1][:2] == [2, pipe.tokenizer.convert_tokens_to_ids("a")]  # behind <bos>
    assert read[1].words[0].columns == (1,)
    assert read_prompts(pipe, PROMPTS, columns=length) == read


def test_without_registers_padding_stays_in_front():
    no_registers = {"video_connector_num_learnable_registers": None}
    own = connectors(video_connector_num_layers=0, **no_registers)
    pipe = ltx2(newer=True, connectors=own)
    tells_ids(pipe.text_encoder)
    [read] = read_prompts(pipe, "a dog", max_sequence_length=8)
    made = columns_of(pipe, ["a dog"], 8)
    pad = pipe.tokenizer.pad_token_id
    assert [token.id for token in read.tokens][-3:] == made[0][-3:]
    # the connectors put zeros in place of padding, whose states change nothing
    assert made[0][:5] == [-1] * 5 and [token.id for token in read.tokens][:5] == [pad] * 5
    assert read.words[0].columns == (6,)


def test_prompts_that_would_be_rewritten_are_refused(pipe):
    options = {"enable_prompt_enhancement": True, "max_sequence_length": LENGTH}
    with pytest.raises(ValueError, match="LTX2Pipeline.*enhance_prompt"):
        read_prompts(pipe, "a red cat", **options)


def test_videos_that_would_get_each_others_masks_are_refused(pipe):
    options = {"max_sequence_length": LENGTH, "num_videos_per_prompt": 2}
    with pytest.raises(ValueError, match="num_videos_per_prompt=2.*LTX2Pipeline"):
        generate(pipe, ["a red cat", "a dog"], num_frames=9, **options)
    assert len(read_prompts(pipe, ["a red cat", "a red dog"], **options)) == 2
    with capture(pipe) as store:
        given = {**video_and_sound(pipe, WAY), **options, "num_inference_steps": 1}
        pipe(["a red cat", "a dog"], output_type="latent", **given)
    for asked in ((), (pipe, ["a red cat", "a dog"])):
        with pytest.raises(ValueError, match="num_videos_per_prompt=2"):
            store.heatmaps(*asked)


@pytest.mark.parametrize("name", OTHERS)
def test_other_pipelines_are_refused_by_name(name):
    cls = getattr(diffusers, name)
    with pytest.raises(ValueError, match=f"{name}.*guidance"):
        guidance_of(cls.__new__(cls))
    assert reader_of(cls.__new__(cls)).__name__ == "refuse_unknown"


def test_there_are_other_pipelines():
    newer("LTX2InContextPipeline")
    newer("LTX2DFRPipeline")
    assert {"LTX2ConditionPipeline", "LTX2InContextPipeline", "LTX2DFRPipeline"} <= set(OTHERS)


def given_to(model, tokens):
    """The arguments of a call with a video of 2 x 2 x 3 cells, in so many tokens."""
    noise = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(1, *shape, generator=noise)

    return {
        "hidden_states": some(tokens, 4),
        "audio_hidden_states": some(5, 4),
        "encoder_hidden_states": some(8, 16),
        "audio_encoder_hidden_states": some(8, 8),
        "timestep": torch.full((1, tokens), 500.0),
        "audio_timestep": torch.tensor([700.0]),
        "sigma": torch.tensor([700.0]),
        "video_coords": model.rope.prepare_video_coords(1, 1, 1, tokens, "cpu"),
        "audio_num_frames": 5,
        "num_frames": 2,
        "height": 2,
        "width": 3,
    }


@torch.no_grad()
def test_tokens_behind_the_video_are_refused(pipe):
    model = pipe.transformer
    with capture(model) as store:
        model(**given_to(model, 12))
    assert store.latent_size == (2, 2, 3) and store.timesteps == [700.0]
    for tokens in (15, 6):  # keyframes behind it, a tile of it
        said = rf"with {tokens} tokens of a video and num_frames, height and width \[2, 2, 3\]"
        with pytest.raises(ValueError, match=said), capture(model):
            model(**given_to(model, tokens))
    with pytest.raises(ValueError, match=r"width \[None, 2, 3\], which are 0"), capture(model):
        model(**{**given_to(model, 12), "num_frames": None})


GUIDED = {
    "stg_scale": 1.0,
    "audio_stg_scale": 1.0,
    "spatio_temporal_guidance_blocks": [0],
    "modality_scale": 3.0,
    "audio_modality_scale": 3.0,
}


def drawn(pipe, **options):
    noise = torch.Generator().manual_seed(0)
    given = {**alike_videos(pipe, WAY), **GUIDED, "num_inference_steps": 2, **options}
    return pipe(output_type="latent", negative_prompt="a red dog", generator=noise, **given)


@pytest.mark.parametrize("guided", [True, False], ids=["guided", "unguided"])
def test_guidances_further_passes_are_of_neither_branch(pipe, guided):
    model, calls = pipe.transformer, []
    counter = model.register_forward_hook(lambda *_: calls.append(1))
    scales = {} if guided else {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}
    with recorded(model, ("cross", "self")) as record:
        plain = drawn(pipe, **scales)
    counter.remove()
    assert len(calls) == 6  # two steps; then without a layer's attention, then without sound
    targets = [pipe] if guided else [pipe, model]  # a bare model knows no branches
    for target in targets:
        with capture(target, kinds=("cross", "self")) as store:
            watched = drawn(pipe, **scales)
        assert torch.equal(plain.frames, watched.frames)
        assert torch.equal(plain.audio, watched.audio)
        assert len(store.passes) == 2 and store.images == 1
        for name, maps in store.maps.items():
            # the first block's self-attention does not run in the second call of each step
            each = 2 if name == "transformer_blocks.0.attn1" else 3
            own = record[name][::each]
            expected = expected_maps(own, 2, LTX2_VIDEOS[0], Way(guided=guided))
            found = maps.flatten(1, -2).double()
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_negative_prompts_branch_is_captured_beside_it(pipe):
    with capture(pipe, branch="both") as both:
        drawn(pipe)
    assert both.branches == ("unconditional", "conditional") and len(both.passes) == 2
    unguided = {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}
    with pytest.raises(CaptureError, match="unconditional"):
        with capture(pipe, branch="both"):
            drawn(pipe, **unguided)


def test_layers_of_the_sound_are_listed_and_not_captured(pipe):
    kinds = [layer.kind for layer in find_denoiser(pipe.transformer).layers]
    assert kinds[:6] == ["self", "audio", "cross", "audio", "audio", "audio"] and len(kinds) == 12
    assert "8 audio attention layers cannot be captured" in shortcomings(pipe)[0]
    with pytest.raises(ValueError, match="pass a tuple of"), capture(pipe, kinds=("audio",)):
        pass


def test_a_video_from_an_image_has_the_steps_own_timesteps():
    needs_argument(LTX2ImageToVideoPipeline.__call__, "image_crf")
    pipe = ltx2("LTX2ImageToVideoPipeline")
    options = {"image": new_image(), "image_crf": 0, "max_sequence_length": LENGTH}
    size = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2}
    made = generate(pipe, "a red cat", **size, **options, capture_options={"steps": "all"})
    [run] = made
    assert list(run.settings.timesteps) == pipe.scheduler.timesteps.tolist()
    assert len(run.video) == 9 and run.video.rate == 24
    assert run.heatmaps["cat"].map.shape == (2, 2, 3)
    assert run.heatmaps["cat"].of_frames(9).shape == (9, 2, 3)


def test_what_a_call_makes_by_default(pipe):
    assert default_frames(pipe) == 121
    assert frame_rate(pipe, {}) == 24 and frame_rate(pipe, {"frame_rate": 30}) == 30


def test_the_sound_is_not_looked_at():
    pipe = ltx2()
    with torch.no_grad():
        pipe.audio_vae.decoder.conv_out.conv.bias.fill_(torch.nan)
    options = {"max_sequence_length": LENGTH, "num_inference_steps": 1, "num_frames": 9}
    [video] = generate(pipe, "a red cat", height=64, width=96, **options).videos
    assert len(video) == 9
