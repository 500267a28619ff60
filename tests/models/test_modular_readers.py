"""Readers of families whose pipelines are made of blocks, against the ids that their encoders
got."""

import pytest
import torch
from helpers.modular_rows import (
    distilled_flux3,
    flux3,
    h3,
    h3_with_sound,
    ideogram4,
    ideogram4_blocks,
    qwen21,
    qwen21_blocks,
)
from helpers.newer import newer
from helpers.reading_pipelines import PROMPTS, assert_same_columns, ids_of, tells_ids
from PIL import Image

import sdattn
from sdattn.models.denoiser import find_denoiser
from sdattn.models.reading import read_prompts
from sdattn.prompts.tokens import TruncationWarning

LONG = "a red cat on the sofa, " * 16
SMALL = {"height": 64, "width": 96, "num_inference_steps": 2}


def flux3_columns(pipe, prompt, **options):
    """The token of each column that the text encoder's block hands on."""
    state = pipe.blocks.sub_blocks["text_encoder"]
    embeds = state._get_qwen3_vl_prompt_embeds(pipe.text_encoder, pipe.tokenizer, prompt, **options)
    return ids_of(embeds)


@pytest.mark.parametrize("make", [flux3, distilled_flux3])
@torch.no_grad()
def test_flux_3_reads_each_prompt_in_a_window_of_its_own(make):
    pipe = make()
    tells_ids(pipe.text_encoder)
    widths = []
    for prompt in (*PROMPTS, LONG):
        read, made = read_prompts(pipe, prompt), flux3_columns(pipe, prompt)
        assert_same_columns(read, made, pipe.tokenizer.tokenizer)
        assert read[0].encoded == (tuple(made[0]),)
        assert read_prompts(pipe, prompt, columns=len(made[0])) == read
        widths.append(len(made[0]))
    assert widths == [80, 80, 80, 80, 160]
    with pytest.raises(ValueError, match=r"160 token columns.*makes 80 of \['a red cat"):
        read_prompts(pipe, PROMPTS[0], columns=160)


@torch.no_grad()
def test_flux_3_cuts_the_window_at_max_sequence_length():
    pipe = flux3()
    tells_ids(pipe.text_encoder)
    for most, widths in ((100, (80, 100)), (40, (40, 40))):
        for prompt, width in zip((PROMPTS[0], LONG), widths, strict=True):
            made = flux3_columns(pipe, prompt, max_sequence_length=most)
            if prompt is LONG:
                with pytest.warns(TruncationWarning):
                    read = read_prompts(pipe, prompt, max_sequence_length=most)
            else:
                read = read_prompts(pipe, prompt, max_sequence_length=most)
            assert len(made[0]) == width
            assert_same_columns(read, made, pipe.tokenizer.tokenizer)


def test_flux_3_is_refused_where_a_block_replaces_the_prompt():
    pipe = newer("Flux3AutoBlocks")().init_pipeline()
    with pytest.raises(ValueError, match=r"prompt_upsampler.*sub_blocks.pop.*capture"):
        read_prompts(pipe, "a red cat")


def test_flux_3_has_the_words_of_the_caption_that_a_block_wrote():
    newer("Flux3AutoBlocks")
    from diffusers.modular_pipelines import InputParam, ModularPipelineBlocks, OutputParam

    class Upsampler(ModularPipelineBlocks):
        model_name = "flux3"
        inputs = property(lambda _: [InputParam.template("prompt")])
        intermediate_outputs = property(lambda _: [OutputParam("prompt", type_hint=str)])

        def __call__(self, components, state):
            block = self.get_block_state(state)
            block.prompt = f"{block.prompt} on the sofa"
            self.set_block_state(state, block)
            return components, state

    pipe = flux3()
    blocks = pipe.blocks
    blocks.sub_blocks.insert("prompt_upsampler", Upsampler(), 0)
    again = blocks.init_pipeline()
    again.update_components(**{name: getattr(pipe, name) for name in again.component_names})
    with sdattn.capture(again) as store:
        again(prompt="a red cat", **SMALL)
    [heatmaps] = store.heatmaps()
    assert heatmaps.words == ("a", "red", "cat", "on", "the", "sofa")
    with pytest.raises(ValueError, match="of 'a red cat', but the .* was 'a red cat on the sofa'"):
        store.heatmaps(prompt="a red cat")


def test_flux_3_has_maps_of_the_negative_prompt():
    """Where both prompts are the other's, so are the maps of the first step."""
    pipe, texts = flux3(), ("a red cat", "a dog, a cat")

    def first_step(branch, prompt, negative):
        with sdattn.capture(pipe, branch=branch, steps=[0]) as store:
            generator = torch.Generator().manual_seed(0)
            pipe(prompt=prompt, negative_prompt=negative, generator=generator, **SMALL)
        assert store.drawn.texts[branch] == (texts[0],)
        return store

    own = first_step("conditional", *texts)
    negative = first_step("unconditional", *texts[::-1])
    for name, maps in own.maps.items():
        assert torch.equal(negative.maps[name], maps)
    assert [one.prompt.text for one in negative.heatmaps()] == [texts[0]]


@pytest.mark.parametrize("make", [ideogram4, ideogram4_blocks])
@torch.no_grad()
def test_ideogram_4_reads_each_prompt_without_its_padding(make):
    pipe, got, kinds = make(), [], []
    pipe.text_encoder.language_model.embed_tokens.register_forward_pre_hook(
        lambda _, args: got.append(args[0].tolist())
    )
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: kinds.append(given["indicator"].tolist()), with_kwargs=True
    )
    options = {"guidance_schedule": [1.0, 1.0], "max_sequence_length": 64, **SMALL}
    for batch in (PROMPTS, PROMPTS[:1], PROMPTS[::-1]):
        pipe(prompt=batch, **options)
        columns = [
            [token for token, kind in zip(*row, strict=False) if kind == 3]  # LLM_TOKEN_INDICATOR
            for row in zip(got[-1], kinds[-1], strict=True)
        ]
        longest = max(map(len, columns))
        filled = [row + [-1] * (longest - len(row)) for row in columns]
        read = read_prompts(pipe, batch, max_sequence_length=64)
        assert_same_columns(read, filled, pipe.tokenizer)
        assert [one.encoded[0] for one in read] == list(map(tuple, got[-1]))
        assert read_prompts(pipe, batch, columns=longest, max_sequence_length=64) == read
    with pytest.raises(ValueError, match="99 token columns"):
        read_prompts(pipe, PROMPTS[0], columns=99)


def test_ideogram_4_refuses_what_is_rewritten_and_a_negative_prompt():
    pipe = ideogram4()
    with pytest.raises(ValueError, match=r"rewrites the prompt.*prompt_upsampling=False"):
        read_prompts(pipe, "a red cat", prompt_upsampling=True)
    with pytest.raises(sdattn.CaptureError, match="never for the unconditional branch"):
        with sdattn.capture(pipe, branch="unconditional"):
            pipe("a red cat", guidance_scale=4.0, guidance_schedule=None, **SMALL)


def test_minimax_h3_reads_the_prompt_as_it_is():
    pipe, got = h3(), []
    pipe.text_encoder.model.register_forward_pre_hook(
        lambda _, args, given: got.append(given["input_ids"].tolist()), with_kwargs=True
    )
    options = {"height": 64, "width": 96, "num_inference_steps": 2}
    for prompt in PROMPTS:
        pipe(prompt=prompt, **options)
        read = read_prompts(pipe, prompt)
        assert_same_columns(read, got[-1], pipe.tokenizer)
        assert read[0].encoded == (tuple(got[-1][0]),)
    with pytest.raises(ValueError, match="99 token columns.*makes"):
        read_prompts(pipe, PROMPTS[0], columns=99)
    for name in ("image", "last_image", "references"):
        with pytest.raises(TypeError, match="images before the prompt.*labels"):
            read_prompts(pipe, PROMPTS[0], **{name: object()})


def test_minimax_h3_has_the_times_of_the_video_not_of_the_sound():
    pipe = h3()
    with sdattn.capture(pipe, steps="all") as store:
        pipe(prompt="a red cat", height=64, width=96, num_inference_steps=4)
    video, sound = pipe.scheduler.timesteps.tolist(), pipe.audio_scheduler.timesteps.tolist()
    assert store.timesteps == pytest.approx(video) and video != pytest.approx(sound)
    assert store.latent_size == (37, 2, 3)
    [heatmaps] = store.heatmaps()
    assert heatmaps.prompt.text == "a red cat"


@pytest.mark.parametrize("anchors", [(), ("first",), ("first", "last")])
def test_minimax_h3_has_the_video_behind_keyframes_and_sound(anchors):
    """As its own layout numbers the tokens; two tokens of the text are an image's."""
    newer("MiniMaxH3ModularPipeline")
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    places, _, video, sound, text, conditions, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.tensor([1, 0, 0, 1, 1]),
        num_latent_frames=3,
        latent_height=4,
        latent_width=6,
        num_audio_latents=5,
        patch_size=(1, 2, 2),
        audio_channels=2,
        audio_tag=2,
        video_tag=0,
        keyframe_anchors=anchors,
    )
    family = find_denoiser(h3()).family
    given = {"position_ids": places, "audio_indices": sound}
    given["encoder_hidden_states"] = torch.zeros(1, 5, 16)
    assert family.grid(None, given) == (3, 2, 3)
    [(image, words)] = family.spans(None, given, 18)
    every = range(len(places))
    assert list(every[image]) == video[conditions:].tolist()
    assert list(every[words]) == text.tolist()


def test_minimax_h3_refuses_places_that_are_no_grid():
    pipe = h3()

    def roll(_model, args, given):
        given["position_ids"] = given["position_ids"].roll(1, dims=0)
        return args, given

    pipe.transformer.register_forward_pre_hook(roll, with_kwargs=True, prepend=True)
    with pytest.raises(
        ValueError, match="position_ids gives the image 222 cells, which do not form"
    ):
        with sdattn.capture(pipe):
            pipe(prompt="a red cat", height=64, width=96, num_inference_steps=2)


@pytest.mark.parametrize("make", [qwen21, qwen21_blocks])
def test_qwen_image_2_1_reads_a_template_without_its_system_message(make):
    pipe, got, states = make(), [], []
    tells_ids(pipe.text_encoder)
    pipe.text_encoder.register_forward_pre_hook(
        lambda _, args, given: got.append(given["input_ids"].tolist()), with_kwargs=True
    )
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: states.append(given["encoder_hidden_states"]), with_kwargs=True
    )
    for batch in (PROMPTS, PROMPTS[:1], PROMPTS[::-1]):
        pipe(prompt=batch, **SMALL)
        made = ids_of(states[-1])
        read = read_prompts(pipe, batch)
        assert_same_columns(read, made, pipe.processor.tokenizer)
        assert [one.encoded[0] for one in read] == list(map(tuple, got[-1]))
        assert read_prompts(pipe, batch, columns=len(made[0])) == read
    assert read[0].find("<template>")[0][:3] == (0, 1, 2)  # the user's turn begins
    with pytest.raises(ValueError, match="99 token columns"):
        read_prompts(pipe, PROMPTS[0], columns=99)
    with pytest.raises(TypeError, match="given images, whose tokens stand among the text's"):
        read_prompts(pipe, PROMPTS[0], image=object())


def test_qwen_image_2_1_refuses_images_among_its_text_and_what_its_text_attends_to():
    pipe = qwen21()

    def add_image(_model, args, given):
        return args, {**given, "img_shapes": [[(1, 2, 2), *given["img_shapes"][0]]]}

    pipe.transformer.register_forward_pre_hook(add_image, with_kwargs=True, prepend=True)
    with pytest.raises(TypeError, match="QwenImage21Transformer2DModel was given images"):
        with sdattn.capture(pipe):
            pipe("a red cat", **SMALL)
    with pytest.raises(ValueError, match="text attends to itself alone, in the first step"):
        with sdattn.capture(qwen21(), queries="text"):
            pass
    for change in (
        sdattn.AttentionStore,
        lambda pipeline: sdattn.knockout(pipeline, "a cat", "cat"),
    ):
        with pytest.raises(TypeError, match="controllers and knockouts do not support that"):
            change(pipeline=qwen21())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (flux3, {"negative_prompt": "dog"}),
        (flux3, {"image": Image.new("RGB", (48, 32))}),  # an input is no result
        (ideogram4, {"guidance_schedule": [4.0, 1.0]}),
    ],
)
def test_generate_draws_one_prompt(make, options):
    [run] = sdattn.generate(make(), "a red cat", seed=3, **SMALL, **options)
    assert run.image.size == (96, 64)
    assert run.heatmaps.words == ("a", "red", "cat")
    assert run.heatmaps.maps.shape[:2] == (4, 6)


def test_generate_makes_a_video_of_a_pipeline_with_sound():
    pipe = h3_with_sound()
    [run] = sdattn.generate(pipe, "a red cat", height=64, width=96, num_inference_steps=2)
    assert len(run.video) == 124 and run.image.size == (96, 64)
    assert run.heatmaps.maps.shape == (37, 2, 3, 3)
