"""Readers of pipelines that fill up each text in a way of their own, against ``encode_prompt``."""

import warnings

import pytest
import torch
from diffusers import (
    CogView4Pipeline,
    HunyuanDiTPAGPipeline,
    HunyuanDiTPipeline,
    Lumina2Pipeline,
    ZImageControlNetPipeline,
    ZImageImg2ImgPipeline,
    ZImageOmniPipeline,
    ZImagePipeline,
)
from helpers.newer import newer
from helpers.padded_rows import counted
from helpers.reading_pipelines import assert_same_columns, made_by, tells_ids
from helpers.tiny_encoders import (
    tiny_bert,
    tiny_gemma_encoder,
    tiny_glm_encoder,
    tiny_qwen3,
    tiny_qwen3_vl,
    tiny_t5_encoder,
)
from helpers.tiny_tokenizers import (
    tiny_bert_tokenizer,
    tiny_gemma,
    tiny_glm,
    tiny_qwen,
    tiny_t5,
)

from sdattn.models.families import reader_of
from sdattn.models.reading import read_prompts
from sdattn.prompts.tokens import TruncationWarning

PROMPTS = [
    "a red cat on the sofa",
    "A turquoise Cat, a dog (on a  cat's SOFA)!",
    "  un café 😀 cat\n",
    "一只 cat 红色",
]
NOTHING = {"scheduler": None, "vae": None, "transformer": None}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def z_image(side="right"):
    return ZImagePipeline(
        text_encoder=tells_ids(tiny_qwen3()), tokenizer=tiny_qwen(side), **NOTHING
    )


def z_image_columns(pipe, prompts, **options):
    """The tokens that each caption is made of, filled up to 32 and to the longest with no token."""
    with torch.no_grad():
        made, _ = pipe.encode_prompt(list(prompts), "cpu", False, **options)
    rows = [(row[:, 0].round().long() - 1).tolist() for row in made]
    longest = max(len(row) + -len(row) % 32 for row in rows)
    return [row + [-1] * (longest - len(row)) for row in rows]


@pytest.mark.parametrize("side", ["right", "left"])
def test_z_image_reads_a_chat_without_its_padding(side):
    pipe = z_image(side)
    for batch in (PROMPTS, PROMPTS[:1], PROMPTS[::-1]):
        read = read_prompts(pipe, batch)
        made = z_image_columns(pipe, batch)
        assert_same_columns(read, made, pipe.tokenizer)
        assert read_prompts(pipe, batch, columns=len(made[0])) == read
    (wider,) = read_prompts(pipe, PROMPTS[0], columns=96)  # of a run with a longer text beside it
    assert [token.id for token in wider.tokens] == [
        *z_image_columns(pipe, PROMPTS[:1])[0][:32],
        *[-1] * 64,
    ]
    with pytest.raises(ValueError, match=r"have 40 token columns.*makes 32"):
        read_prompts(pipe, PROMPTS[0], columns=40)
    with pytest.raises(ValueError, match="32 token columns"):
        read_prompts(pipe, PROMPTS, columns=32)


def test_z_image_cuts_the_end_of_the_chat():
    pipe = z_image()
    with pytest.warns(TruncationWarning, match="sofa"):
        read = read_prompts(pipe, PROMPTS[:1], max_sequence_length=11)
    assert_same_columns(
        read, z_image_columns(pipe, PROMPTS[:1], max_sequence_length=11), pipe.tokenizer
    )


def test_z_image_knows_the_prompt_that_its_pipeline_wrote_over():
    pipe, prompts = z_image(), PROMPTS[:2]
    expected, left = read_prompts(pipe, prompts), list(prompts)
    pipe.encode_prompt(left, "cpu", False)
    assert left != prompts  # the pipeline's doing
    assert read_prompts(pipe, left) == expected


def lumina2():
    return Lumina2Pipeline(
        text_encoder=tells_ids(tiny_gemma_encoder()), tokenizer=tiny_gemma(), **NOTHING
    )


def lumina2_columns(pipe, prompts, *, negative=False, **options):
    """The tokens that the mask leaves, filled up to the longest with no token."""
    with torch.no_grad():
        if negative:
            _, _, made, mask = pipe.encode_prompt(
                ["a"] * len(prompts), True, list(prompts), device="cpu", **options
            )
        else:
            made, mask, *_ = pipe.encode_prompt(list(prompts), False, device="cpu", **options)
    ids, longest = (made[..., 0].round().long() - 1).tolist(), int(mask.sum(1).max())
    rows = [row[: int(n)] for row, n in zip(ids, mask.sum(1), strict=True)]
    return [row + [-1] * (longest - len(row)) for row in rows]


@pytest.mark.parametrize("system", [None, "Paint"])
def test_lumina_2_reads_gemma_behind_a_system_prompt(system):
    pipe = lumina2()
    options = {} if system is None else {"system_prompt": system}
    for batch in (PROMPTS, PROMPTS[:1], PROMPTS[::-1]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TruncationWarning)
            read = read_prompts(pipe, batch, **options)
            made = lumina2_columns(pipe, batch, **options)
            assert read_prompts(pipe, batch, columns=len(made[0]), **options) == read
        assert_same_columns(read, made, pipe.tokenizer)
    with pytest.raises(ValueError, match="9.*columns"):
        read_prompts(pipe, PROMPTS, columns=9, system_prompt="Paint")


def test_lumina_2_reads_negative_prompts_alone():
    pipe = lumina2()
    read = read_prompts(pipe, PROMPTS, negative=True)
    assert_same_columns(read, lumina2_columns(pipe, PROMPTS, negative=True), pipe.tokenizer)


def test_lumina_2_cuts_long_prompts():
    pipe, options = lumina2(), {"system_prompt": "Paint", "max_sequence_length": 24}
    with pytest.warns(TruncationWarning):
        read = read_prompts(pipe, PROMPTS[:2], **options)
    assert_same_columns(read, lumina2_columns(pipe, PROMPTS[:2], **options), pipe.tokenizer)


def test_cogview4_reads_glm_filled_up_in_front():
    pipe = CogView4Pipeline(
        text_encoder=tells_ids(tiny_glm_encoder()), tokenizer=tiny_glm(), **NOTHING
    )
    for batch in (PROMPTS, PROMPTS[:1], PROMPTS[::-1], ["cat " * 14, "dog"]):
        read = read_prompts(pipe, batch)
        made = made_by(pipe, batch, do_classifier_free_guidance=False)
        assert len(made[0]) % 16 == 0
        assert_same_columns(read, made, pipe.tokenizer)
        assert [one.encoded for one in read] == [(tuple(ids),) for ids in made]
        assert read_prompts(pipe, batch, columns=len(made[0])) == read
    with pytest.raises(ValueError, match="17.*columns.*16"):
        read_prompts(pipe, "dog", columns=17)
    with pytest.warns(TruncationWarning):
        read = read_prompts(pipe, PROMPTS, max_sequence_length=10)
    made = made_by(pipe, PROMPTS, do_classifier_free_guidance=False, max_sequence_length=10)
    assert_same_columns(read, made, pipe.tokenizer)


def test_krea_2_reads_a_prompt_whose_turn_ends_behind_the_padding():
    pipe = counted(
        newer("Krea2Pipeline")(
            text_encoder=tells_ids(tiny_qwen3_vl()),
            tokenizer=tiny_qwen(),
            text_encoder_select_layers=(1, 2),
            **NOTHING,
        )
    )

    def made_of(length):
        with torch.no_grad():
            states, _ = pipe.encode_prompt(PROMPTS, "cpu", max_sequence_length=length)
        return (states[:, :, 0, 0].round().long() - 1).tolist()  # of the first layer

    read = read_prompts(pipe, PROMPTS)
    assert_same_columns(read, made_of(512), pipe.tokenizer)
    ending = pipe.prompt_template_encode_num_suffix_tokens
    assert read[0].find("<template>") == [tuple(range(512 - ending, 512))]
    assert read[0].find("red cat") == [(1, 2)]
    with pytest.warns(TruncationWarning):
        read = read_prompts(pipe, PROMPTS, columns=30)
    assert_same_columns(read, made_of(30), pipe.tokenizer)


@pytest.mark.parametrize("kind", [HunyuanDiTPipeline, HunyuanDiTPAGPipeline])
def test_hunyuan_dit_reads_bert_and_then_t5(kind):
    parts = {"pag_applied_layers": "blocks.0"} if kind is HunyuanDiTPAGPipeline else {}
    pipe = kind(
        text_encoder=tells_ids(tiny_bert()),
        tokenizer=tiny_bert_tokenizer(),
        text_encoder_2=tells_ids(tiny_t5_encoder()),
        tokenizer_2=tiny_t5(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **parts,
        **NOTHING,
    )
    read = read_prompts(pipe, PROMPTS)
    ids = []
    for encoder in (0, 1):
        with torch.no_grad():
            made = pipe.encode_prompt(
                PROMPTS, "cpu", do_classifier_free_guidance=False, text_encoder_index=encoder
            )[0]
        ids.append((made[..., 0].round().long() - 1).tolist())
    joined = [[*bert, *t5] for bert, t5 in zip(*ids, strict=True)]
    assert [[token.id for token in one.tokens] for one in read] == joined
    assert read_prompts(pipe, PROMPTS, columns=333) == read
    assert read[0].find("red cat") == [(2, 3, 77 + 1, 77 + 2)]
    assert read[0].find("<sos>") == [(0,)]
    with pytest.raises(ValueError, match="77.*columns.*333"):
        read_prompts(pipe, PROMPTS, columns=77)


@pytest.mark.parametrize(
    ("cls", "reader"),
    [
        (ZImageImg2ImgPipeline, "read_z_image"),
        (ZImageControlNetPipeline, "read_z_image"),
        (ZImageOmniPipeline, "refuse_unknown"),
        (HunyuanDiTPAGPipeline, "read_hunyuan_dit"),
    ],
)
def test_each_class_has_its_reader(cls, reader):
    assert reader_of(cls.__new__(cls)).__name__ == reader
