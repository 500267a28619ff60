"""How further families of images read their prompts, against their own encode_prompt."""

import inspect

import numpy as np
import pytest
import torch
from diffusers import (
    AuraFlowPipeline,
    BriaPipeline,
    ChromaImg2ImgPipeline,
    ChromaPipeline,
    HiDreamImagePipeline,
    HunyuanImagePipeline,
    Kandinsky5T2IPipeline,
    KolorsPipeline,
    LongCatImagePipeline,
    OvisImagePipeline,
    QwenImageEditInpaintPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
)
from helpers.newer import needs_argument, newer
from helpers.reading_pipelines import assert_same_columns, made_by, tells_ids
from helpers.tiny_encoders import (
    tiny_llama,
    tiny_mistral3,
    tiny_qwen3,
    tiny_qwen_vl,
    tiny_t5_encoder,
)
from helpers.tiny_pipelines import make_vae, tiny_text_encoder
from helpers.tiny_processors import tiny_qwen_processor
from helpers.tiny_tokenizers import tiny_mistral, tiny_qwen, tiny_t5, tiny_tokenizer
from PIL import Image
from transformers import ByT5Tokenizer, CLIPTextModelWithProjection

from sdattn.models.reading import read_prompts

PROMPTS = [
    "a red cat on the sofa",
    "A turquoise Cat, a dog (on a  cat's SOFA)!",
    "  un café 😀 cat\n",
    "一只 cat 红色",
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def bare(kind, **parts):
    """A pipeline of which only the parts are there that read a prompt."""
    names = set(inspect.signature(kind.__init__).parameters) - {"self", *parts}
    needed = {
        name
        for name in names
        if inspect.signature(kind.__init__).parameters[name].default is inspect.Parameter.empty
    }
    return kind(**dict.fromkeys(needed), **parts)


def numbers(read, *, masked=False):
    """The token numbers of each column; with ``masked`` the pipeline zeroes its padding."""
    return [
        [-1 if masked and token.special == "<pad>" else token.id for token in one.tokens]
        for one in read
    ]


@pytest.mark.parametrize("kind", [ChromaPipeline, ChromaImg2ImgPipeline])
def test_chroma_reads_t5(kind):
    pipe = bare(kind, text_encoder=tells_ids(tiny_t5_encoder()), tokenizer=tiny_t5())
    read = read_prompts(pipe, PROMPTS, max_sequence_length=60)
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 60}
    assert_same_columns(read, made_by(pipe, PROMPTS, **options), pipe.tokenizer)
    assert read_prompts(pipe, PROMPTS, columns=60) == read
    pipe.tokenizer.add_tokens(["<cat-toy>", "<cat-toy>_1"])
    assert read_prompts(pipe, "a <cat-toy>, red")[0].find("<cat-toy>") == [(1, 2)]


def test_auraflow_has_its_registers_before_t5():
    pipe = bare(AuraFlowPipeline, text_encoder=tells_ids(tiny_t5_encoder()), tokenizer=tiny_t5())
    read = read_prompts(pipe, PROMPTS, max_sequence_length=60)
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 60}
    made = made_by(pipe, PROMPTS, **options)
    assert numbers(read, masked=True) == [[-1] * 8 + ids for ids in made]
    assert read[0].find("red cat") == [(8 + 1, 8 + 2)]
    assert read_prompts(pipe, PROMPTS, columns=8 + 60) == read
    with pytest.raises(ValueError, match="8.*columns.*max_sequence_length=256"):
        read_prompts(pipe, PROMPTS, columns=8)


def new_image(width, height):
    return Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8))


def resized(area, one):
    """As the pipelines have it for the text encoder; calculate_dimensions is their own."""
    module = inspect.getmodule(QwenImageEditPlusPipeline)
    return one.resize(module.calculate_dimensions(area, one.width / one.height))


def make_edit(kind):
    processor = tiny_qwen_processor()
    encoder = tells_ids(tiny_qwen_vl(processor.tokenizer))
    parts = {"tokenizer": processor.tokenizer, "processor": processor}
    return bare(kind, text_encoder=encoder, **parts)


def check_edit(pipe, shown, prompts, **options):
    """Each column's token, against what the pipeline makes of the images it shows its encoder."""
    made = made_by(pipe, prompts, image=shown)
    read = read_prompts(pipe, prompts, **options)
    assert_same_columns(read, made, pipe.tokenizer)
    assert read_prompts(pipe, prompts, columns=len(made[0]), **options) == read
    pads = [[i for i, token in enumerate(ids) if token == ID] for ids in made]
    for columns, one in zip(pads, read, strict=True):
        assert set(columns) <= set(one.find("<template>")[0])
    return [len(ids) for ids in pads]


ID = tiny_qwen_processor().image_token_id


@pytest.mark.parametrize("kind", [QwenImageEditPipeline, QwenImageEditInpaintPipeline])
def test_qwen_image_edit_reads_an_image_before_the_prompt(kind):
    pipe = make_edit(kind)
    for size in ((60, 40), (40, 60), (100, 1000)):
        one = new_image(*size)
        shown = resized(1024 * 1024, one)
        (number,) = check_edit(pipe, shown, PROMPTS[:1], image=one)
        assert number > 4  # pixels enough for the most that this processor gives
        check_edit(pipe, shown, PROMPTS[:1], prompt_image=shown)
    # of a list each prompt has one, which is not resized
    several = [new_image(60, 40), new_image(56, 84), new_image(100, 30), new_image(84, 84)]
    assert len(set(check_edit(pipe, several, PROMPTS, image=several))) > 1


def test_qwen_image_edit_plus_reads_several_images():
    pipe = make_edit(QwenImageEditPlusPipeline)
    for sizes in ([(60, 40)], [(60, 40), (40, 60), (100, 1000)]):
        given = [new_image(*size) for size in sizes]
        shown = [resized(384 * 384, one) for one in given]
        check_edit(pipe, shown, PROMPTS[1:2], image=given)
        check_edit(pipe, shown, PROMPTS[1:2], condition_images=shown)
    check_edit(pipe, shown[:1], PROMPTS[:1], image=given[0])


def test_qwen_image_edit_needs_the_size_of_its_images():
    pipe = make_edit(QwenImageEditPipeline)
    with pytest.raises(ValueError, match="QwenImageEditPipeline.*image="):
        read_prompts(pipe, "a cat")
    with pytest.raises(ValueError, match="50.*columns"):
        read_prompts(pipe, "a cat", image=new_image(60, 40), columns=50)


def test_bria_reads_t5_and_zeros():
    transformer = torch.nn.Linear(1, 1)  # of which the pipeline asks the dtype
    transformer.dtype = torch.float32
    parts = {"text_encoder": tells_ids(tiny_t5_encoder()), "tokenizer": tiny_t5()}
    pipe = bare(BriaPipeline, vae=make_vae(), transformer=transformer, **parts)
    read = read_prompts(pipe, PROMPTS, max_sequence_length=60)
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 60}
    assert_same_columns(read, made_by(pipe, PROMPTS, **options), pipe.tokenizer)
    assert read_prompts(pipe, PROMPTS, columns=60) == read
    assert len(read_prompts(pipe, PROMPTS[0])[0].tokens) == 128


QUOTING = ["a sign 'red cat' on a sofa", 'the cat\'s sofa "a  red 😀"', "“red”, “dog”"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_longcat_image_reads_quoted_text_in_letters(side):
    parts = {"text_encoder": tells_ids(tiny_qwen_vl()), "tokenizer": tiny_qwen(side)}
    pipe = bare(LongCatImagePipeline, **parts)
    pipe.tokenizer_max_length = 60
    with torch.no_grad():
        made, _ = pipe.encode_prompt([*PROMPTS, *QUOTING])
    ids = (made[..., 0].round().long() - 1).tolist()
    read = read_prompts(pipe, [*PROMPTS, *QUOTING], enable_prompt_rewrite=False)
    assert_same_columns(read, ids, pipe.tokenizer)
    assert len(read[len(PROMPTS)].find("cat")[0]) == 3  # in letters
    assert len(read[0].find("cat")[0]) == 1


def test_longcat_image_refuses_what_it_would_rewrite():
    pipe = bare(LongCatImagePipeline, text_encoder=tiny_qwen_vl(), tokenizer=tiny_qwen())
    with pytest.raises(ValueError, match="rewire_prompt"):
        read_prompts(pipe, "a cat")
    with pytest.raises(ValueError, match="mixes up the apostrophes"):
        read_prompts(pipe, "a cat's sofa, a dog's sofa", enable_prompt_rewrite=False)
    with pytest.raises(ValueError, match="60.*columns.*tokenizer_max_length"):
        read_prompts(pipe, "a cat", enable_prompt_rewrite=False, columns=60)


def test_kolors_reads_chatglm():
    pytest.importorskip("sentencepiece")
    from helpers.tiny_chatglm import tiny_chatglm, tiny_chatglm_tokenizer

    encoder = tiny_chatglm()
    encoder.register_forward_hook(tell_chatglm_ids, with_kwargs=True)
    pipe = bare(KolorsPipeline, text_encoder=encoder, tokenizer=tiny_chatglm_tokenizer())
    with torch.no_grad():
        made = pipe.encode_prompt(PROMPTS, do_classifier_free_guidance=False)[0]
    ids = (made[..., 0].round().long() - 1).tolist()
    read = read_prompts(pipe, PROMPTS)
    assert_same_columns(read, ids, pipe.tokenizer)
    assert read[0].find("red cat") == [(251, 252)]  # "on the sofa" fills 256 columns
    assert read[0].find("<sos>") == [(248, 249)]
    assert read_prompts(pipe, PROMPTS, columns=256) == read
    with pytest.raises(ValueError, match="24.*columns.*max_sequence_length"):
        read_prompts(pipe, "a cat", columns=24)


def tell_chatglm_ids(_module, _args, kwargs, output):
    """Have states ``[length, B, width]`` hold the number of their token, plus one."""
    ids = kwargs["input_ids"].T[..., None] + 1
    states = output.hidden_states
    output.hidden_states = tuple(ids.expand_as(one).to(one.dtype) for one in states)
    return output


@pytest.mark.parametrize("side", ["right", "left"])
def test_ovis_image_reads_a_chat_behind_an_instruction(side):
    needs_argument(OvisImagePipeline.encode_prompt, "do_classifier_free_guidance")
    encoder = tells_ids(tiny_qwen3().model)
    pipe = bare(OvisImagePipeline, text_encoder=encoder, tokenizer=tiny_qwen(side))
    options = {"max_sequence_length": 180}
    made = made_by(pipe, PROMPTS, do_classifier_free_guidance=False, **options)
    read = read_prompts(pipe, PROMPTS, **options)
    assert_same_columns(read, made, pipe.tokenizer)
    assert read_prompts(pipe, PROMPTS, columns=180) == read


def test_hidream_reads_t5_and_twice_llama():
    pipe = HiDreamImagePipeline(
        scheduler=None,
        vae=None,
        transformer=None,
        text_encoder=tiny_text_encoder(CLIPTextModelWithProjection),
        tokenizer=tiny_tokenizer(),
        text_encoder_2=tiny_text_encoder(CLIPTextModelWithProjection),
        tokenizer_2=tiny_tokenizer(),
        text_encoder_3=tells_ids(tiny_t5_encoder()),
        tokenizer_3=tiny_t5(),
        text_encoder_4=tells_ids(tiny_llama()),
        tokenizer_4=tiny_mistral("right"),
    )
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 70}
    with torch.no_grad():
        t5, _, llama, *_ = pipe.encode_prompt(PROMPTS, device="cpu", **options)
    ids = torch.cat([t5[..., 0], *llama[-2:, ..., 0]], dim=-1).round().long() - 1
    read = read_prompts(pipe, PROMPTS, max_sequence_length=70)
    assert numbers(read) == ids.tolist()
    assert read_prompts(pipe, PROMPTS, columns=210) == read
    assert read[0].find("red cat") == [(1, 2, 72, 73, 142, 143)]
    for one in read:
        for word in one.words:
            own = [ids for start in (70, 140) if (ids := [i - start for i in word.columns])]
            spelled = [i for i in word.columns if 70 <= i < 140]
            again = [i - 70 for i in word.columns if i >= 140]
            assert spelled == again and own
            text = pipe.tokenizer_4.decode([one.tokens[i].id for i in spelled])
            assert "".join(text.split()) == word.text
    with pytest.raises(ValueError, match="211.*makes 384"):
        read_prompts(pipe, PROMPTS, columns=211)
    with pytest.raises(ValueError, match="prompt_4='a dog'.*text"):
        read_prompts(pipe, "a cat", prompt_4="a dog")


GLYPHS = ['a "red" cat', "a 'dog' on “the sofa” 😀", "“café 'red'” \"a\"", "the cat's sofa"]


def test_hunyuan_image_reads_quoted_text_by_byt5():
    pipe = bare(
        HunyuanImagePipeline,
        text_encoder=tells_ids(tiny_qwen_vl()),
        tokenizer=tiny_qwen(),
        text_encoder_2=tells_ids(tiny_t5_encoder()),
        tokenizer_2=ByT5Tokenizer(),
    )
    # its states are those of the third layer from behind
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 300, 40
    texts = [*PROMPTS, *GLYPHS]
    with torch.no_grad():
        states, mask, glyphs, glyph_mask = pipe.encode_prompt(texts, "cpu", len(texts))
    read = read_prompts(pipe, texts)
    for i, one in enumerate(read):
        own, quoted = (part[i, :, 0].round().long() - 1 for part in (states, glyphs))
        kept, seen = mask[i].bool(), glyph_mask[i].bool()
        # as HunyuanImageTransformer2DModel.forward puts them
        order = torch.cat([quoted[seen], own[kept], quoted[~seen], own[~kept]])
        assert [token.id for token in one.tokens] == order.tolist()
    found = read[len(PROMPTS)].find("red")[0]  # Text "red". and its piece in the prompt
    assert found[:3] == (6, 7, 8)
    assert len(found) == 4
    assert read_prompts(pipe, texts, columns=340) == read
    assert all(word.columns for one in read for word in one.words)
    with pytest.raises(ValueError, match="128.*columns.*tokenizer_2_max_length"):
        read_prompts(pipe, "a cat", columns=128)
    # several images a prompt: the masks come in another order than the states that they are for
    mixed = [PROMPTS[0], GLYPHS[0]]
    with torch.no_grad():
        *_, glyphs, glyph_mask = pipe.encode_prompt(mixed, "cpu", 2, num_images_per_prompt=2)
    assert glyphs[:, 0].any(-1).tolist() == [False, False, True, True]
    assert glyph_mask[:, 0].bool().tolist() == [False, True, False, True]
    with pytest.raises(ValueError, match="num_images_per_prompt=2.*HunyuanImagePipeline"):
        read_prompts(pipe, mixed, num_images_per_prompt=2)
    for kept_apart in (PROMPTS[:2], GLYPHS[:1]):
        many = read_prompts(pipe, kept_apart, num_images_per_prompt=2)
        assert many == read_prompts(pipe, kept_apart)


@pytest.mark.parametrize("side", ["right", "left"])
def test_kandinsky5_reads_inside_a_template(side):
    processor = tiny_qwen_processor(side)
    pipe = bare(
        Kandinsky5T2IPipeline,
        text_encoder=tells_ids(tiny_qwen_vl(processor.tokenizer)),
        tokenizer=processor,
        text_encoder_2=tiny_text_encoder(),
        tokenizer_2=tiny_tokenizer(),
    )
    prompts = [*PROMPTS[:2], "  un caf\u00e9 \n cat\n", PROMPTS[3]]
    for batch in (prompts, prompts[:1], prompts[::-1]):
        read = read_prompts(pipe, batch)
        made = made_by(pipe, batch)
        assert_same_columns(read, made, processor.tokenizer)
        assert [one.text for one in read] == batch
        assert read_prompts(pipe, batch, columns=len(made[0])) == read
    with pytest.raises(ValueError, match="prompt_clean.*'a &amp; b'"):
        read_prompts(pipe, "a &amp; b")
    with pytest.raises(ValueError, match="100.*tokens"):
        read_prompts(pipe, "a cat", max_sequence_length=100)
    with pytest.raises(ValueError, match="9.*columns"):
        read_prompts(pipe, "a cat", columns=9)


def test_ernie_image_fills_up_to_the_longest():
    encoder = tells_ids(tiny_mistral3().model)
    parts = {"text_encoder": encoder, "tokenizer": tiny_mistral()}
    pipe = bare(newer("ErnieImagePipeline"), vae=make_vae(), **parts)
    with torch.no_grad():
        states, _ = pipe._pad_text(pipe.encode_prompt(PROMPTS, "cpu"), "cpu", torch.float32, 16)
    ids = (states[..., 0].round().long() - 1).tolist()
    read = read_prompts(pipe, PROMPTS)
    assert_same_columns(read, ids, pipe.tokenizer)
    longer = read_prompts(pipe, PROMPTS, columns=len(ids[0]) + 2)  # of a longer negative prompt
    assert [one.words for one in longer] == [one.words for one in read]
    assert {len(one.tokens) for one in longer} == {len(ids[0]) + 2}
    with pytest.raises(ValueError, match="3.*columns"):
        read_prompts(pipe, PROMPTS, columns=3)


def test_ernie_image_refuses_what_it_would_rewrite():
    parts = {"text_encoder": tiny_mistral3().model, "tokenizer": tiny_mistral()}
    parts |= {"pe": tiny_llama(), "pe_tokenizer": tiny_mistral()}
    pipe = bare(newer("ErnieImagePipeline"), vae=make_vae(), **parts)
    with pytest.raises(ValueError, match="prompt.*use_pe=False"):
        read_prompts(pipe, "a cat")
    assert read_prompts(pipe, "a cat", use_pe=False)[0].find("cat")
