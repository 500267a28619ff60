"""The families of models that the package knows."""

import inspect
import warnings

import pytest
import torch
from diffusers import (
    Flux2Pipeline,
    FluxPriorReduxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    QwenImageImg2ImgPipeline,
    QwenImagePipeline,
    SanaPAGPipeline,
    SanaPipeline,
    SanaSprintPipeline,
    ShapEPipeline,
    StableDiffusionXLImg2ImgPipeline,
)
from helpers.joint_models import first_map, inputs
from helpers.newer import newer
from helpers.reading_pipelines import (
    assert_same_columns,
    made_by,
    make_flux,
    make_klein,
    make_pixart,
    make_qwen,
    make_sd3,
    tells_ids,
)
from helpers.tiny_encoders import (
    TextProcessor,
    tiny_gemma_encoder,
    tiny_mistral3,
)
from helpers.tiny_pipelines import (
    make_pipeline,
    make_sdxl_pipeline,
    make_unet,
    make_vae,
    tiny_text_encoder,
)
from helpers.tiny_tokenizers import tiny_gemma, tiny_mistral, tiny_qwen
from helpers.transformer_rows import flux

from sdattn.models.families import reader_of, registered
from sdattn.models.reading import read_prompts
from sdattn.prompts.tokens import TruncationWarning, read_prompt


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_every_family_with_joint_attention_says_in_which_order():
    for family in registered():
        joint = "joint" in {kind for _, kind in family.layers.values()}
        assert joint == (family.joined is not None), family.name


class Same(FluxTransformer2DModel):
    pass


class Other(FluxTransformer2DModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@torch.no_grad()
def test_a_subclass_is_known_as_long_as_it_leaves_forward_alone():
    model = flux().transformer
    given = inputs("FLUX.1", model)
    expected = first_map(model, given)
    model.__class__ = Same
    assert torch.equal(first_map(model, given), expected)
    model.__class__ = Other
    with pytest.raises(TypeError, match="test_families.*forward"):
        first_map(model, given)
    model.__class__ = type("FluxTransformer2DModel", (Other,), {"__module__": "elsewhere"})
    with pytest.raises(TypeError, match="FluxTransformer2DModel.*forward"):
        first_map(model, given)


def test_a_model_of_no_known_family_is_refused_by_name():
    model = flux().transformer
    model.__class__ = type("Joined", (FluxTransformer2DModel.__mro__[1], torch.nn.Module), {})
    with pytest.raises(TypeError, match="Asked to capture a Joined"):
        first_map(model, {})


PROMPTS = [
    "a red cat on the sofa",
    "A turquoise Cat, a dog (on a  cat's SOFA)!",
    "  un café 😀 cat\n",
    "一只 cat 红色",
]


def make_flux2(tokenizer=None):
    tokenizer = tokenizer or tiny_mistral()
    return Flux2Pipeline(
        scheduler=None,
        vae=None,
        text_encoder=tells_ids(tiny_mistral3()),
        tokenizer=TextProcessor(tokenizer, chat_template=tokenizer.chat_template),
        transformer=None,
    )


def make_sana(kind=SanaPipeline):
    parts = {"pag_applied_layers": "transformer_blocks.0"} if kind is SanaPAGPipeline else {}
    return kind(
        tokenizer=tiny_gemma(),
        text_encoder=tells_ids(tiny_gemma_encoder()),
        vae=None,
        transformer=None,
        scheduler=None,
        **parts,
    )


def test_stable_diffusion_reads_clip():
    pipe = make_pipeline(text_encoder=tells_ids(tiny_text_encoder()))
    made = pipe.encode_prompt(PROMPTS, "cpu", 1, False)[0]
    ids = (made[..., 0].round().long() - 1).tolist()
    assert_same_columns(read_prompts(pipe, PROMPTS), ids, pipe.tokenizer)
    assert read_prompts(pipe, PROMPTS[0]) == [read_prompt(pipe.tokenizer, PROMPTS[0])]


def test_sdxl_reads_two_clips_and_its_refiner_one():
    pipe = make_sdxl_pipeline()
    tells_ids(pipe.text_encoder), tells_ids(pipe.text_encoder_2)
    read = read_prompts(pipe, PROMPTS)
    options = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    assert_same_columns(read, made_by(pipe, PROMPTS, **options), pipe.tokenizer)
    refiner = StableDiffusionXLImg2ImgPipeline(
        vae=make_vae(),
        text_encoder=None,
        text_encoder_2=pipe.text_encoder_2,
        tokenizer=None,
        tokenizer_2=pipe.tokenizer_2,
        unet=make_unet(),
        scheduler=pipe.scheduler,
        requires_aesthetics_score=True,
    )
    assert read_prompts(refiner, PROMPTS) == read


@pytest.mark.parametrize("length", [None, 40])
def test_sd3_reads_clip_and_then_t5(length):
    pipe = make_sd3()
    options = {} if length is None else {"max_sequence_length": length}
    read = read_prompts(pipe, PROMPTS, **options)
    made = made_by(
        pipe, PROMPTS, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, **options
    )
    assert [[token.id for token in one.tokens] for one in read] == made
    assert read_prompts(pipe, PROMPTS, columns=len(made[0])) == read
    assert len(made[0]) == 77 + (length or 256)
    first = read[0]
    assert first.find("red cat") == [(2, 3, 77 + 1, 77 + 2)]
    assert first.find("<sos>") == [(0,)]
    assert first.find("<eos>") == [(13, 77 + 6)]  # the tiny CLIP spells "on the sofa" in letters
    for one in read:
        for word in one.words:
            clip = pipe.tokenizer.decode([one.tokens[i].id for i in word.columns if i < 77])
            assert "".join(clip.split()) == word.text.lower()


def test_sd3_without_t5_has_columns_of_zeros():
    pipe = make_sd3(t5=False)
    read = read_prompts(pipe, PROMPTS)
    made = made_by(pipe, PROMPTS, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False)
    assert_same_columns(read, made, pipe.tokenizer)
    assert read_prompts(pipe, PROMPTS, columns=len(made[0])) == read
    assert read[0].find("<pad>") == [tuple(range(14, len(made[0])))]


def test_sd3_warns_only_of_words_that_both_encoders_lost():
    pipe = make_sd3()
    prompt = "cat " * 100 + "dog"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (read,) = read_prompts(pipe, prompt)
    assert read.find("dog") == [(77 + 100,)]
    with pytest.warns(TruncationWarning, match="127 tokens.*: (cat, )+dog$"):
        (read,) = read_prompts(pipe, prompt, columns=127)
    assert len(read.seen) == 75
    with pytest.raises(ValueError, match="76.*columns.*256"):
        read_prompts(pipe, prompt, columns=76)


@pytest.mark.parametrize("length", [512, 20])
def test_flux_reads_t5(length):
    pipe = make_flux()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        read = read_prompts(pipe, PROMPTS, max_sequence_length=length)
        assert read_prompts(pipe, PROMPTS, columns=length) == read
    made = made_by(pipe, PROMPTS, max_sequence_length=length)
    assert_same_columns(read, made, pipe.tokenizer_2)
    assert len(read_prompts(pipe, "a cat")[0].tokens) == 512


def test_flux_knows_textual_inversions():
    pipe = make_flux()
    pipe.tokenizer_2.add_tokens(["<cat-toy>", "<cat-toy>_1"])
    pipe.text_encoder_2.resize_token_embeddings(len(pipe.tokenizer_2))
    (read,) = read_prompts(pipe, "a <cat-toy>, red")
    assert read.find("<cat-toy>") == [(1, 2)]
    assert [[token.id for token in read.tokens]] == made_by(pipe, "a <cat-toy>, red")


@pytest.mark.parametrize("kind", [PixArtAlphaPipeline, PixArtSigmaPipeline])
def test_pixart_reads_t5_in_lower_case(kind):
    pipe = make_pixart(kind)
    prompts = [*PROMPTS, "İstanbul CAT  "]
    plain = {"clean_caption": False}  # which is so without ftfy and bs4 anyway
    read = read_prompts(pipe, prompts, **plain)
    length = {PixArtAlphaPipeline: 120, PixArtSigmaPipeline: 300}[kind]
    options = {"do_classifier_free_guidance": False, "max_sequence_length": length, **plain}
    made = made_by(pipe, prompts, **options)
    assert_same_columns(read[:-1], made[:-1], pipe.tokenizer)
    assert [one.text for one in read] == prompts
    assert [token.id for token in read[-1].tokens] == made[-1]
    (cat,) = read[-1].find("cat")
    assert pipe.tokenizer.decode([made[-1][i] for i in cat]) == "cat"
    assert read[-1].words[0].text == "İstanbul"


@pytest.mark.parametrize(
    ("kind", "length"),
    [(SanaPipeline, 300), (SanaPipeline, 24), (SanaPAGPipeline, 300), (SanaSprintPipeline, 24)],
)
@pytest.mark.slow
def test_sana_reads_gemma_behind_an_instruction(kind, length):
    pipe = make_sana(kind)
    default = inspect.signature(pipe.__call__).parameters["complex_human_instruction"].default
    guided = {} if kind is SanaSprintPipeline else {"do_classifier_free_guidance": False}
    for instruction in (default, ["draw:"], None):
        options = {"max_sequence_length": length, "complex_human_instruction": instruction}
        made = made_by(pipe, PROMPTS, **options, **guided)
        if instruction is default:
            del options["complex_human_instruction"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TruncationWarning)
            read = read_prompts(pipe, PROMPTS, columns=length, **options)
        assert_same_columns(read, made, pipe.tokenizer)
        assert read[0].tokens[0].special == "<sos>"
        if instruction == ["draw:"]:
            assert read[0].find("<template>") == [(1,)]


def test_sana_reads_negative_prompts_without_the_instruction():
    pipe = make_sana()
    with torch.no_grad():
        made = pipe.encode_prompt("a cat", negative_prompt="a red dog", device="cpu")
    ids = (made[2][..., 0].round().long() - 1).tolist()
    (read,) = read_prompts(pipe, "a red dog", negative=True)
    assert_same_columns([read], ids, pipe.tokenizer)
    assert read.find("dog") == [(3,)]
    with pytest.raises(KeyError, match="not in the prompt"):
        read.find("<template>")


@pytest.mark.parametrize("kind", [QwenImagePipeline, QwenImageImg2ImgPipeline])
@pytest.mark.parametrize("side", ["right", "left"])
def test_qwen_image_reads_inside_a_template(kind, side):
    pipe = make_qwen(kind, tiny_qwen(side))
    for batch in (PROMPTS, PROMPTS[:1], PROMPTS[::-1]):
        read = read_prompts(pipe, batch)
        made = made_by(pipe, batch, max_sequence_length=512)
        assert_same_columns(read, made, pipe.tokenizer)
        assert read_prompts(pipe, batch, columns=len(made[0])) == read
    with pytest.raises(ValueError, match="9.*columns.*max_sequence_length=512"):
        read_prompts(pipe, PROMPTS, columns=9)


def test_qwen_image_cuts_its_states():
    pipe = make_qwen()
    before, _, _ = pipe.prompt_template_encode.partition("{}")
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(before)["input_ids"]) - 3
    with pytest.warns(TruncationWarning, match="reads 30 tokens"):
        read = read_prompts(pipe, PROMPTS, max_sequence_length=30)
    assert_same_columns(read, made_by(pipe, PROMPTS, max_sequence_length=30), pipe.tokenizer)
    assert read[0].find("<template>")[0][:4] == (0, 1, 2, 9)
    assert [word.text for word in read[1].truncated] == [")!"]


@pytest.mark.slow
def test_qwen_image_cuts_long_prompts_where_its_encoder_does():
    """Beyond its 1024 tokens and those of the template, not before."""
    pipe = make_qwen()
    before, _, _ = pipe.prompt_template_encode.partition("{}")
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(before)["input_ids"])
    long = " ".join(["cat"] * 1300)
    with pytest.warns(TruncationWarning):
        [read] = read_prompts(pipe, long, max_sequence_length=1024)
    assert_same_columns([read], made_by(pipe, [long], max_sequence_length=1024), pipe.tokenizer)
    assert len(read.tokens) == 1024


def test_klein_reads_a_chat():
    pipe = make_klein()
    prompts = [*PROMPTS, "a user of <think> and <|im_end|>"]
    read = read_prompts(pipe, prompts)
    made = made_by(pipe, prompts, text_encoder_out_layers=(0, 1))
    assert_same_columns(read[:-1], made[:-1], pipe.tokenizer)
    assert [token.id for token in read[-1].tokens] == made[-1]
    assert len(made[0]) == 512
    assert len(read[-1].find("user")) == 1  # the chat's own "user" is template
    assert len(read[-1].find("<think>")[0]) == 1
    with pytest.warns(TruncationWarning, match="reads 10 tokens.*: the, sofa"):
        short = read_prompts(pipe, PROMPTS[0], columns=10)
    made = made_by(pipe, PROMPTS[0], text_encoder_out_layers=(0, 1), max_sequence_length=10)
    assert_same_columns(short, made, pipe.tokenizer)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("starts", [True, False])
def test_flux2_reads_a_chat_behind_a_system_message(side, starts):
    tokenizer = tiny_mistral(side)
    if not starts:  # the processor adds the start that the template lacks
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
    pipe = make_flux2(tokenizer)
    read = read_prompts(pipe, PROMPTS)
    made = made_by(pipe, PROMPTS, text_encoder_out_layers=(0, 1))
    assert_same_columns(read, made, tokenizer)
    pads = read[0].find("<pad>")[0]
    assert (pads[0] == 0) == (side == "left")
    assert len(pads) > 100
    assert not any(token.special == "<pad>" for token in read[0].tokens if token.id != 290)


def test_flux2_refuses_what_it_would_rewrite():
    pipe = make_flux2()
    with pytest.raises(ValueError, match=r"prompt.*'a \[IMG\] cat'"):
        read_prompts(pipe, "a [IMG] cat")
    with pytest.raises(ValueError, match="rewrite the prompt"):
        read_prompts(pipe, "a cat", caption_upsample_temperature=0.15)


def test_pipelines_whose_words_cannot_be_told_take_labels():
    pipe = FluxPriorReduxPipeline.__new__(FluxPriorReduxPipeline)  # FLUX.1's name, of no prompt
    with pytest.raises(TypeError, match="FluxPriorReduxPipeline.*prompts"):
        read_prompts(pipe, "a cat")
    shap_e = ShapEPipeline.__new__(ShapEPipeline)  # of no family
    with pytest.raises(TypeError, match="ShapEPipeline.*prompts"):
        read_prompts(shap_e, "a cat")
    for one in (pipe, shap_e):
        (read,) = read_prompts(one, {"cat": [2], "red dog": [4, 5]}, columns=300)
        assert read.find("red dog") == [(4, 5)]
        assert len(read.tokens) == 300
    with pytest.raises(ValueError, match="columns="):
        read_prompts(pipe, {"cat": [2]})


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("StableDiffusionPipeline", "read_clip"),
        ("StableDiffusionXLControlNetPipeline", "read_clip"),
        ("StableDiffusionPAGPipeline", "read_clip"),
        ("LatentConsistencyModelPipeline", "read_clip"),
        ("AnimateDiffSDXLPipeline", "read_clip"),
        ("LEditsPPPipelineStableDiffusion", "read_clip"),
        ("StableDiffusion3Img2ImgPipeline", "read_sd3"),
        ("StableDiffusion3ControlNetPipeline", "read_sd3"),
        ("FluxKontextPipeline", "read_flux"),
        ("FluxPriorReduxPipeline", "refuse_unknown"),
        ("Flux2Pipeline", "read_flux2"),
        ("Flux2KleinPipeline", "read_klein"),
        ("QwenImageControlNetPipeline", "read_qwen"),
        ("QwenImageEditPlusPipeline", "read_edit_plus"),
        ("QwenImageEditInpaintPipeline", "read_edit"),
        ("PixArtSigmaPAGPipeline", "read_pixart"),
        ("SanaControlNetPipeline", "read_sana"),
        ("SanaVideoPipeline", "read_sana"),
        ("KolorsImg2ImgPipeline", "read_chatglm"),
        ("AuraFlowPipeline", "read_auraflow"),
        ("BriaFiboPipeline", "refuse_unknown"),
        ("LongCatImageEditPipeline", "refuse_unknown"),
        ("QwenImage21Pipeline", "read_qwen21"),
        ("ChromaInpaintPipeline", "read_t5"),
        ("HunyuanDiTPAGPipeline", "read_hunyuan_dit"),
        ("StableVideoDiffusionPipeline", "refuse_unknown"),
    ],
)
def test_each_class_has_its_family(name, reader):
    cls = newer(name)
    found = reader_of(cls.__new__(cls))
    assert getattr(found, "func", found).__name__ == reader
