"""How families of videos read their prompts, against their own encode_prompt."""

import diffusers
import pytest
import torch
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from helpers.joint_video_rows import cogvideox, hunyuan_video, hunyuan_video15, mochi
from helpers.reading_pipelines import assert_same_columns, made_by, tells_ids
from helpers.video_rows import ltx, wan
from helpers.wan_rows import wan22_from_image

from sdattn.models.families import guidance_of, reader_of
from sdattn.models.reading import read_prompts

PROMPTS = ["a red cat on the sofa", "A turquoise Cat, a dog (on a cat's SOFA)!", "un café 😀 cat"]


pytestmark = pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")


@pytest.mark.parametrize("make", [wan, wan22_from_image, ltx, cogvideox, mochi])
@pytest.mark.parametrize("length", [24, 6])
def test_columns_are_those_of_encode_prompt(make, length):
    pipe = make()
    pipe.text_encoder = tells_ids(pipe.text_encoder.to(torch.float32))
    made = made_by(pipe, PROMPTS, max_sequence_length=length, do_classifier_free_guidance=False)
    read = read_prompts(pipe, PROMPTS, max_sequence_length=length)
    assert_same_columns(read, made, pipe.tokenizer)


def test_wan_refuses_what_it_would_rewrite():
    pipe = wan()
    [read] = read_prompts(pipe, " a red cat ", max_sequence_length=12)
    assert [word.text for word in read.words] == ["a", "red", "cat"]
    with pytest.raises(ValueError, match="WanPipeline.*'a cat & dog'"):
        read_prompts(pipe, "a  cat &amp; dog", max_sequence_length=12)


def test_wans_other_pipelines_need_ftfy(monkeypatch):
    pipe = wan22_from_image()
    monkeypatch.delattr("diffusers.pipelines.wan.pipeline_wan_i2v.ftfy")
    said = "A WanImageToVideoPipeline cleans its prompts with ftfy, .* 'sdattn\\[video\\]'"
    with pytest.raises(ImportError, match=said):
        read_prompts(pipe, "a red cat", max_sequence_length=12)
    assert read_prompts(wan(), "a red cat", max_sequence_length=12)


# the pipeline's own is some 500 tokens, spelled in letters; of one without crop_start it counts
@pytest.mark.parametrize(
    ("template", "length"),
    [
        (DEFAULT_PROMPT_TEMPLATE, 600),
        ({"template": "[INST]{}[/INST]", "crop_start": 2}, 6),
        ({"template": "[INST]a video of:{}[/INST]"}, 20),
    ],
    ids=["own", "cropped", "counted"],
)
def test_hunyuan_video_reads_inside_a_template(template, length):
    pipe = hunyuan_video()
    pipe.text_encoder = tells_ids(pipe.text_encoder)
    pipe.tokenizer.add_tokens(["{}"])  # as Llama has it
    pipe.tokenizer.model_max_length = 12
    options = {"prompt_template": template, "max_sequence_length": length}
    read = read_prompts(pipe, PROMPTS, **options)
    assert_same_columns(read, made_by(pipe, PROMPTS, **options), pipe.tokenizer)
    assert len(read[0].tokens) == length and read[0].seen
    columns = read_prompts(pipe, PROMPTS, columns=length, prompt_template=template)
    assert columns == read
    with pytest.raises(ValueError, match=f"5.*columns.*max_sequence_length={length}"):
        read_prompts(pipe, PROMPTS, columns=5, **options)


QUOTING = ['a "red" cat by a “dog”, "red"', "a dog", 'no "" cat']


@pytest.mark.parametrize("own", [False, True], ids=["short", "own chat"])
def test_hunyuan_video15_reads_a_chat_and_quoted_text_by_byt5(own):
    pipe = hunyuan_video15()
    if own:  # some 700 tokens, spelled in letters
        fresh = diffusers.HunyuanVideo15Pipeline(**pipe.components)
        pipe.system_message = fresh.system_message
        pipe.prompt_template_encode_start_idx = fresh.prompt_template_encode_start_idx
        pipe.tokenizer_max_length = fresh.tokenizer_max_length
    pipe.tokenizer_2_max_length = 60
    tells_ids(pipe.text_encoder), tells_ids(pipe.text_encoder_2)
    with torch.no_grad():
        states, mask, glyphs, glyph_mask = pipe.encode_prompt(QUOTING, batch_size=len(QUOTING))
    made = []
    for i in range(len(QUOTING)):
        quoted, whole = (part[i, :, 0].round().long() - 1 for part in (glyphs, states))
        # as HunyuanVideo15Transformer3DModel.forward puts them, of no image
        made.append(torch.cat([quoted[glyph_mask[i].bool()], whole[mask[i].bool()]]).tolist())
    longest = max(map(len, made))
    read = read_prompts(pipe, QUOTING)
    for one, ids in zip(read, made, strict=True):
        assert [token.id for token in one.tokens] == ids + [-1] * (longest - len(ids))
    # of Text "red". Text "dog". what is in quotes, once, and each word in the chat
    n_glyphs = int(glyph_mask[0].sum())
    columns = {word.text: word.columns for word in reversed(read[0].words)}
    ids = {
        word: [[read[0].tokens[i].id for i in found if (i < n_glyphs) == first] for first in (1, 0)]
        for word, found in columns.items()
    }
    for word in ("red", "dog", "cat"):
        by_bytes, by_chat = ids[word]
        assert pipe.tokenizer_2.decode(by_bytes) == (word if word != "cat" else "")
        assert pipe.tokenizer.decode(by_chat).strip() == word
    assert len(read[0].find("red")) == 2  # the second is read by Qwen alone
    assert all(column >= n_glyphs for column in read[0].find("red")[1])
    assert read_prompts(pipe, QUOTING, columns=longest) == read
    with pytest.raises(ValueError, match=f"makes {longest}"):
        read_prompts(pipe, QUOTING, columns=longest + 1)


def test_hunyuan_video15_refuses_videos_that_would_get_each_others_masks():
    pipe = hunyuan_video15()
    with pytest.raises(ValueError, match="num_videos_per_prompt=2.*HunyuanVideo15Pipeline"):
        read_prompts(pipe, QUOTING, num_videos_per_prompt=2)
    assert read_prompts(pipe, ["a cat", "a dog"], num_videos_per_prompt=2)


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("HunyuanSkyreelsImageToVideoPipeline", "read_hunyuan_video"),
        ("HunyuanVideoImageToVideoPipeline", "refuse_unknown"),
        ("HunyuanVideoFramepackPipeline", "refuse_unknown"),
        ("HunyuanVideo15ImageToVideoPipeline", "read_hunyuan_video15"),
    ],
)
def test_each_class_has_its_reader(name, reader):
    cls = getattr(diffusers, name)
    assert reader_of(cls.__new__(cls)).__name__ == reader


@pytest.mark.parametrize(
    "name",
    [
        "WanVACEPipeline",
        "WanAnimatePipeline",
        "HunyuanVideoImageToVideoPipeline",
        "HunyuanVideo15ImageToVideoPipeline",
        "HunyuanVideoFramepackPipeline",
    ],
)
def test_videos_from_what_was_not_tested_are_refused_by_name(name):
    cls = getattr(diffusers, name)
    with pytest.raises(ValueError, match=f"{name}.*guidance"):
        guidance_of(cls.__new__(cls))
