"""What is particular in how families of images read prompts, against their own encode_prompt."""

import inspect
import warnings

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPlusPipeline
from helpers.padded_rows import krea2
from helpers.reading_pipelines import (
    PROMPTS,
    assert_same_columns,
    ids_of,
    made_by,
    telling,
    tells_ids,
)
from helpers.tiny_encoders import tiny_llama
from helpers.tiny_pipelines import make_sdxl_pipeline, tiny
from helpers.tiny_processors import tiny_qwen_processor
from helpers.tiny_tokenizers import tiny_mistral, tiny_qwen
from PIL import Image

from sdattn.models.reading import read_prompts
from sdattn.prompts.tokens import TruncationWarning

ALONE = {"do_classifier_free_guidance": False}
ALL_ENCODERS = {**ALONE, "prompt_2": None, "prompt_3": None}
BATCHES = (PROMPTS, PROMPTS[:1], PROMPTS[::-1])


def numbers(read):
    """The token numbers of each column."""
    return [[token.id for token in one.tokens] for one in read]


def assert_read_as(pipe, batch, made, tokenizer, **options):
    read = read_prompts(pipe, batch, **options)
    assert_same_columns(read, made, tokenizer)
    assert read_prompts(pipe, batch, columns=len(made[0]), **options) == read
    return read


def test_two_tokenizers_that_disagree_are_refused():
    pipe = make_sdxl_pipeline()
    pipe.tokenizer.add_tokens(["<cat-toy>"])
    with pytest.raises(ValueError, match="words.*'a <cat-toy>'"):
        read_prompts(pipe, "a <cat-toy>")


def test_sdxls_refiner_reads_one_clip():
    pipe = make_sdxl_pipeline()
    refiner = tiny("StableDiffusionXLImg2ImgPipeline", text_encoder=None, tokenizer=None)
    refined = read_prompts(refiner, PROMPTS)
    assert refined == read_prompts(pipe, PROMPTS)


@pytest.mark.parametrize("length", [None, 40])
def test_sd3_reads_clip_and_then_t5(length):
    pipe = telling("StableDiffusion3Pipeline", transformer={})
    options = {} if length is None else {"max_sequence_length": length}
    read = read_prompts(pipe, PROMPTS, **options)
    made = made_by(pipe, PROMPTS, **ALL_ENCODERS, **options)
    assert numbers(read) == made
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
    none = {"text_encoder_3": None, "tokenizer_3": None}
    pipe = telling("StableDiffusion3Pipeline", transformer={}, **none)
    made = made_by(pipe, PROMPTS, **ALL_ENCODERS)
    read = assert_read_as(pipe, PROMPTS, made, pipe.tokenizer)
    assert read[0].find("<pad>") == [tuple(range(14, len(made[0])))]


def test_sd3_warns_only_of_words_that_both_encoders_lost():
    pipe = tiny("StableDiffusion3Pipeline")
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


def test_flux_knows_textual_inversions():
    pipe = telling("FluxPipeline")
    pipe.tokenizer_2.add_tokens(["<cat-toy>", "<cat-toy>_1"])
    pipe.text_encoder_2.resize_token_embeddings(len(pipe.tokenizer_2))
    (read,) = read_prompts(pipe, "a <cat-toy>, red")
    assert read.find("<cat-toy>") == [(1, 2)]
    assert numbers([read]) == made_by(pipe, "a <cat-toy>, red")


def test_pixart_reads_letters_that_grow_in_lower_case():
    pipe = telling("PixArtSigmaPipeline")
    (read,) = read_prompts(pipe, "İstanbul CAT  ", clean_caption=False)
    [made] = made_by(pipe, "İstanbul CAT  ", **ALONE, clean_caption=False)
    assert numbers([read]) == [made]
    (cat,) = read.find("cat")
    assert pipe.tokenizer.decode([made[i] for i in cat]) == "cat"
    assert read.words[0].text == "İstanbul"


def test_a_cleaned_caption_is_another_prompt():
    pipe = telling("PixArtAlphaPipeline")

    def preprocess(texts, clean_caption):  # as bs4 and ftfy would have it
        return ["a cat"] * len(texts) if clean_caption else [text.lower() for text in texts]

    pipe._text_preprocessing = preprocess
    assert read_prompts(pipe, "A Cat")[0].find("cat") == [(1,)]
    with pytest.raises(ValueError, match="'a cat'.*'a <b>cat</b>'"):
        read_prompts(pipe, "a <b>cat</b>")
    assert len(read_prompts(pipe, "a <b>cat</b>", clean_caption=False)[0].find("b")) == 2


def test_sana_reads_negative_prompts_without_the_instruction():
    pipe = telling("SanaPipeline")
    (read,) = read_prompts(pipe, "a red dog", negative=True)
    with torch.no_grad():  # which turns the padding to the right, and leaves it there
        made = pipe.encode_prompt("a cat", negative_prompt="a red dog", device="cpu")
    assert_same_columns([read], ids_of(made[2]), pipe.tokenizer)
    assert read.find("dog") == [(3,)]
    with pytest.raises(KeyError, match="not in the prompt"):
        read.find("<template>")


def test_qwen_image_cuts_its_states():
    pipe = telling("QwenImagePipeline")
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
    pipe = telling("QwenImagePipeline")
    before, _, _ = pipe.prompt_template_encode.partition("{}")
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(before)["input_ids"])
    long = " ".join(["cat"] * 1300)
    with pytest.warns(TruncationWarning):
        [read] = read_prompts(pipe, long, max_sequence_length=1024)
    assert_same_columns([read], made_by(pipe, [long], max_sequence_length=1024), pipe.tokenizer)
    assert len(read.tokens) == 1024


def test_klein_reads_the_chats_own_words_as_template():
    pipe = telling("Flux2KleinPipeline")
    prompt = "a user of <think> and <|im_end|>"
    (read,) = read_prompts(pipe, prompt)
    assert numbers([read]) == made_by(pipe, prompt, text_encoder_out_layers=(0, 1))
    assert len(read.find("user")) == 1
    assert len(read.find("<think>")[0]) == 1


def test_a_template_that_strips_its_prompt():
    tokenizer = tiny_qwen()
    tokenizer.chat_template = tokenizer.chat_template.replace(".content }}", ".content | trim }}")
    pipe = telling("Flux2KleinPipeline", tokenizer=tokenizer)
    (read,) = read_prompts(pipe, "  a red cat ")
    made = made_by(pipe, "  a red cat ", text_encoder_out_layers=(0, 1))
    assert_same_columns([read], made, tokenizer)
    assert [(word.start, word.end) for word in read.words] == [(2, 3), (4, 7), (8, 11)]


def test_flux2_refuses_what_it_would_rewrite():
    pipe = telling("Flux2Pipeline")
    with pytest.raises(ValueError, match=r"prompt.*'a \[IMG\] cat'"):
        read_prompts(pipe, "a [IMG] cat")
    with pytest.raises(ValueError, match="rewrite the prompt"):
        read_prompts(pipe, "a cat", caption_upsample_temperature=0.15)


def test_auraflow_has_its_registers_before_t5():
    pipe = telling("AuraFlowPipeline")
    read = read_prompts(pipe, PROMPTS, max_sequence_length=60)
    made = made_by(pipe, PROMPTS, **ALONE, max_sequence_length=60)
    # the pipeline zeroes its padding
    ids = [[-1 if token.special else token.id for token in one.tokens] for one in read]
    assert [[-1 if token == 1 else token for token in row] for row in made] == [
        row[8:] for row in ids
    ]
    assert all(row[:8] == [-1] * 8 for row in ids)
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


def check_edit(pipe, shown, prompts, **options):
    """Each column's token, against what the pipeline makes of the images it shows its encoder."""
    made = made_by(pipe, prompts, image=shown)
    read = assert_read_as(pipe, prompts, made, pipe.tokenizer, **options)
    pads = [[i for i, token in enumerate(ids) if token == ID] for ids in made]
    for columns, one in zip(pads, read, strict=True):
        assert set(columns) <= set(one.find("<template>")[0])
    return [len(ids) for ids in pads]


ID = tiny_qwen_processor().image_token_id


@pytest.mark.parametrize("kind", ["QwenImageEditPipeline", "QwenImageEditInpaintPipeline"])
def test_qwen_image_edit_reads_an_image_before_the_prompt(kind):
    pipe = telling(kind)
    for size in ((60, 40), (40, 60), (100, 1000)):
        one = new_image(*size)
        shown = resized(1024 * 1024, one)
        (number,) = check_edit(pipe, shown, PROMPTS[:1], image=one)
        assert number > 4  # pixels enough for the most that this processor gives
        check_edit(pipe, shown, PROMPTS[:1], prompt_image=shown)
    # of a list each prompt has one, which is not resized
    several = [new_image(60, 40), new_image(56, 84), new_image(100, 30), new_image(84, 84)]
    assert len(set(check_edit(pipe, several, PROMPTS, image=several))) > 1
    with pytest.raises(ValueError, match=f"{kind}.*image="):
        read_prompts(pipe, "a cat")
    with pytest.raises(ValueError, match="50.*columns"):
        read_prompts(pipe, "a cat", image=new_image(60, 40), columns=50)


def test_qwen_image_edit_plus_reads_several_images():
    pipe = telling("QwenImageEditPlusPipeline")
    for sizes in ([(60, 40)], [(60, 40), (40, 60), (100, 1000)]):
        given = [new_image(*size) for size in sizes]
        shown = [resized(384 * 384, one) for one in given]
        check_edit(pipe, shown, PROMPTS[1:2], image=given)
        check_edit(pipe, shown, PROMPTS[1:2], condition_images=shown)
    check_edit(pipe, shown[:1], PROMPTS[:1], image=given[0])


QUOTING = ["a sign 'red cat' on a sofa", 'the cat\'s sofa "a  red 😀"', "“red”, “dog”"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_longcat_image_reads_quoted_text_in_letters(side):
    pipe = telling("LongCatImagePipeline", tokenizer=tiny_qwen(side))
    pipe.tokenizer_max_length = 60
    with torch.no_grad():
        made, _ = pipe.encode_prompt([*PROMPTS, *QUOTING])
    read = read_prompts(pipe, [*PROMPTS, *QUOTING], enable_prompt_rewrite=False)
    assert_same_columns(read, ids_of(made), pipe.tokenizer)
    assert len(read[len(PROMPTS)].find("cat")[0]) == 3  # in letters
    assert len(read[0].find("cat")[0]) == 1
    with pytest.raises(ValueError, match="rewire_prompt"):
        read_prompts(pipe, "a cat")
    with pytest.raises(ValueError, match="mixes up the apostrophes"):
        read_prompts(pipe, "a cat's sofa, a dog's sofa", enable_prompt_rewrite=False)
    with pytest.raises(ValueError, match="61.*columns.*tokenizer_max_length"):
        read_prompts(pipe, "a cat", enable_prompt_rewrite=False, columns=61)


def test_kolors_reads_chatglm():
    pytest.importorskip("sentencepiece")
    pipe = tiny("KolorsPipeline")
    pipe.text_encoder.register_forward_hook(tell_chatglm_ids, with_kwargs=True)
    with torch.no_grad():
        made = pipe.encode_prompt(PROMPTS, do_classifier_free_guidance=False)[0]
    read = assert_read_as(pipe, PROMPTS, ids_of(made), pipe.tokenizer)
    assert read[0].find("red cat") == [(251, 252)]  # "on the sofa" fills 256 columns
    assert read[0].find("<sos>") == [(248, 249)]
    with pytest.raises(ValueError, match="24.*columns.*max_sequence_length"):
        read_prompts(pipe, "a cat", columns=24)


def tell_chatglm_ids(_module, _args, kwargs, output):
    """Have states ``[length, B, width]`` hold the number of their token, plus one."""
    ids = kwargs["input_ids"].T[..., None] + 1
    states = output.hidden_states
    output.hidden_states = tuple(ids.expand_as(one).to(one.dtype) for one in states)
    return output


def test_hidream_reads_t5_and_twice_llama():
    pipe = telling("HiDreamImagePipeline")
    options = {**ALONE, "max_sequence_length": 70}
    with torch.no_grad():
        t5, _, llama, *_ = pipe.encode_prompt(PROMPTS, device="cpu", **options)
    made = torch.cat([t5[..., :1], *llama[-2:, ..., :1]], dim=1)
    read = read_prompts(pipe, PROMPTS, max_sequence_length=70)
    assert numbers(read) == ids_of(made)
    assert read_prompts(pipe, PROMPTS, columns=210) == read
    assert read[0].find("red cat") == [(1, 2, 72, 73, 142, 143)]
    for one in read:
        for word in one.words:
            spelled = [i for i in word.columns if 70 <= i < 140]
            assert [i + 70 for i in spelled] == [i for i in word.columns if i >= 140]
            text = pipe.tokenizer_4.decode([one.tokens[i].id for i in spelled])
            assert "".join(text.split()) == word.text
    with pytest.raises(ValueError, match="211.*makes 384"):
        read_prompts(pipe, PROMPTS, columns=211)
    with pytest.raises(ValueError, match="prompt_4='a dog'.*text"):
        read_prompts(pipe, "a cat", prompt_4="a dog")


GLYPHS = ['a "red" cat', "a 'dog' on “the sofa” 😀", "“café 'red'” \"a\"", "the cat's sofa"]


def test_hunyuan_image_reads_quoted_text_by_byt5():
    pipe = telling("HunyuanImagePipeline")
    pipe.tokenizer_max_length = 300
    pipe.tokenizer_2_max_length = 40
    texts = [*PROMPTS, *GLYPHS]
    with torch.no_grad():
        states, mask, glyphs, glyph_mask = pipe.encode_prompt(texts, "cpu", len(texts))
    read = read_prompts(pipe, texts)
    for i, one in enumerate(read):
        own, quoted = (torch.tensor(ids_of(part[i])) for part in (states, glyphs))
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


def test_kandinsky5_refuses_what_it_would_rewrite():
    pipe = telling("Kandinsky5T2IPipeline")
    with pytest.raises(ValueError, match="reads 'a & b' for the prompt 'a &amp; b'"):
        read_prompts(pipe, "a &amp; b")
    with pytest.raises(ValueError, match="reads .* for the prompt 'a cat'"):  # which it cuts
        read_prompts(pipe, "a cat", max_sequence_length=100)


def test_ernie_image_fills_up_to_the_longest():
    pipe = telling("ErnieImagePipeline", vae={})
    with torch.no_grad():
        states, _ = pipe._pad_text(pipe.encode_prompt(PROMPTS, "cpu"), "cpu", torch.float32, 16)
    read = read_prompts(pipe, PROMPTS)
    assert_same_columns(read, ids_of(states), pipe.tokenizer)
    longest = states.shape[1]
    longer = read_prompts(pipe, PROMPTS, columns=longest + 2)  # of a longer negative prompt
    assert [one.words for one in longer] == [one.words for one in read]
    assert {len(one.tokens) for one in longer} == {longest + 2}
    with pytest.raises(ValueError, match="3.*columns"):
        read_prompts(pipe, PROMPTS, columns=3)
    pipe.register_modules(pe=tiny_llama(), pe_tokenizer=tiny_mistral())
    with pytest.raises(ValueError, match="prompt.*use_pe=False"):
        read_prompts(pipe, "a cat")
    assert read_prompts(pipe, "a cat", use_pe=False)[0].find("cat")


def z_image_columns(pipe, prompts, **options):
    """The tokens that each caption is made of, filled up to 32 and to the longest with no token."""
    with torch.no_grad():
        made, _ = pipe.encode_prompt(list(prompts), "cpu", False, **options)
    longest = max(len(row) + -len(row) % 32 for row in made)
    return [ids_of(row) + [-1] * (longest - len(row)) for row in made]


@pytest.mark.parametrize("side", ["right", "left"])
def test_z_image_reads_a_chat_without_its_padding(side):
    pipe = telling("ZImagePipeline", tokenizer=tiny_qwen(side))
    for batch in BATCHES:
        assert_read_as(pipe, batch, z_image_columns(pipe, batch), pipe.tokenizer)
    (wider,) = read_prompts(pipe, PROMPTS[0], columns=96)  # of a run with a longer text beside it
    row = z_image_columns(pipe, PROMPTS[:1])[0]
    assert numbers([wider]) == [[*row[:32], *[-1] * 64]]
    with pytest.raises(ValueError, match=r"have 40 token columns.*makes 32"):
        read_prompts(pipe, PROMPTS[0], columns=40)
    with pytest.raises(ValueError, match="32 token columns"):
        read_prompts(pipe, PROMPTS, columns=32)
    cut = {"max_sequence_length": 11}
    with pytest.warns(TruncationWarning, match="sofa"):
        read = read_prompts(pipe, PROMPTS[:1], **cut)
    assert_same_columns(read, z_image_columns(pipe, PROMPTS[:1], **cut), pipe.tokenizer)
    # its pipeline writes over the prompts of a list
    left = PROMPTS[:2]
    expected = read_prompts(pipe, left)
    pipe.encode_prompt(left, "cpu", False)
    assert left != PROMPTS[:2]
    assert read_prompts(pipe, left) == expected


def lumina2_columns(pipe, prompts, *, negative=False, **options):
    """The tokens that the mask leaves, filled up to the longest with no token."""
    texts = (["a"] * len(prompts), True, list(prompts)) if negative else (list(prompts), False)
    with torch.no_grad():
        made = pipe.encode_prompt(*texts, device="cpu", **options)
    states, mask = made[2:] if negative else made[:2]
    longest = int(mask.sum(1).max())
    rows = [row[: int(n)] for row, n in zip(ids_of(states), mask.sum(1), strict=True)]
    return [row + [-1] * (longest - len(row)) for row in rows]


@pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
def test_lumina_2_reads_gemma_behind_a_system_prompt():
    pipe = telling("Lumina2Pipeline")
    paint = {"system_prompt": "Paint"}
    for options in ({}, paint):
        for batch in BATCHES:
            made = lumina2_columns(pipe, batch, **options)
            assert_read_as(pipe, batch, made, pipe.tokenizer, **options)
    with pytest.raises(ValueError, match="9.*columns"):
        read_prompts(pipe, PROMPTS, columns=9, **paint)
    read = read_prompts(pipe, PROMPTS, negative=True)
    assert_same_columns(read, lumina2_columns(pipe, PROMPTS, negative=True), pipe.tokenizer)
    cut = {**paint, "max_sequence_length": 24}
    with pytest.warns(TruncationWarning):
        read = read_prompts(pipe, PROMPTS[:2], **cut)
    assert_same_columns(read, lumina2_columns(pipe, PROMPTS[:2], **cut), pipe.tokenizer)


def test_cogview4_fills_up_in_front():
    pipe = telling("CogView4Pipeline")
    made = made_by(pipe, PROMPTS, **ALONE)
    assert len(made[0]) % 16 == 0
    assert [one.encoded for one in read_prompts(pipe, PROMPTS)] == [(tuple(ids),) for ids in made]
    with pytest.raises(ValueError, match="17.*columns.*16"):
        read_prompts(pipe, "dog", columns=17)


def test_krea_2_reads_a_prompt_whose_turn_ends_behind_the_padding():
    pipe = krea2(vae=None, transformer=None)
    tells_ids(pipe.text_encoder)

    def made_of(length):
        with torch.no_grad():
            states, _ = pipe.encode_prompt(PROMPTS, "cpu", max_sequence_length=length)
        return ids_of(states[:, :, 0])  # of the first layer

    read = read_prompts(pipe, PROMPTS)
    assert_same_columns(read, made_of(512), pipe.tokenizer)
    ending = pipe.prompt_template_encode_num_suffix_tokens
    assert read[0].find("<template>") == [tuple(range(512 - ending, 512))]
    assert read[0].find("red cat") == [(1, 2)]
    with pytest.warns(TruncationWarning):
        read = read_prompts(pipe, PROMPTS, columns=30)
    assert_same_columns(read, made_of(30), pipe.tokenizer)


@pytest.mark.parametrize("kind", ["HunyuanDiTPipeline", "HunyuanDiTPAGPipeline"])
def test_hunyuan_dit_reads_bert_and_then_t5(kind):
    pipe = telling(kind)
    bert, t5 = (made_by(pipe, PROMPTS, **ALONE, text_encoder_index=number) for number in (0, 1))
    read = read_prompts(pipe, PROMPTS)
    assert numbers(read) == [first + second for first, second in zip(bert, t5, strict=True)]
    assert read_prompts(pipe, PROMPTS, columns=333) == read
    assert read[0].find("red cat") == [(2, 3, 77 + 1, 77 + 2)]
    assert read[0].find("<sos>") == [(0,)]
    with pytest.raises(ValueError, match="77.*columns.*333"):
        read_prompts(pipe, PROMPTS, columns=77)
