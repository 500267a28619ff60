"""What is particular in how families of videos read prompts, against their own encode_prompt."""

import diffusers
import pytest
import torch
from helpers.reading_pipelines import ids_of, tells_ids
from helpers.tiny_pipelines import tiny

from sdattn.models.reading import read_prompts

QUOTING = ['a "red" cat by a “dog”, "red"', "a dog", 'no "" cat']


def test_wan_refuses_what_it_would_rewrite():
    pipe = tiny("WanPipeline")
    [read] = read_prompts(pipe, " a red cat ", max_sequence_length=12)
    assert [word.text for word in read.words] == ["a", "red", "cat"]
    with pytest.raises(ValueError, match="WanPipeline.*'a cat & dog'"):
        read_prompts(pipe, "a  cat &amp; dog", max_sequence_length=12)


def test_wans_other_pipelines_need_ftfy(monkeypatch):
    monkeypatch.delattr("diffusers.pipelines.wan.pipeline_wan_i2v.ftfy")
    said = "A WanImageToVideoPipeline cleans its prompts with ftfy, .* 'sdattn\\[video\\]'"
    with pytest.raises(ImportError, match=said):
        read_prompts(tiny("WanImageToVideoPipeline"), "a red cat", max_sequence_length=12)
    assert read_prompts(tiny("WanPipeline"), "a red cat", max_sequence_length=12)


@pytest.mark.parametrize("own", [False, True], ids=["short", "own chat"])
def test_hunyuan_video15_reads_a_chat_and_quoted_text_by_byt5(own):
    pipe = tiny("HunyuanVideo15Pipeline")
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
        quoted, whole = (torch.tensor(ids_of(part[i])) for part in (glyphs, states))
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
    pipe = tiny("HunyuanVideo15Pipeline")
    with pytest.raises(ValueError, match="num_videos_per_prompt=2.*HunyuanVideo15Pipeline"):
        read_prompts(pipe, QUOTING, num_videos_per_prompt=2)
    assert read_prompts(pipe, ["a cat", "a dog"], num_videos_per_prompt=2)
