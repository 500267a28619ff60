"""How families of films read their prompts, against their own encode_prompt."""

import diffusers
import pytest
import torch
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from helpers.film_rows import ltx, wan
from helpers.joint_film_rows import cogvideox, hunyuan_video
from helpers.reading_pipelines import assert_same_columns, made_by, tells_ids

from sdattn.models.families import reader_of
from sdattn.models.reading import read_prompts

PROMPTS = ["a red cat on the sofa", "A turquoise Cat, a dog (on a cat's SOFA)!", "un café 😀 cat"]


pytestmark = pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")


@pytest.mark.parametrize("make", [wan, ltx, cogvideox])
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
    with pytest.raises(
        ValueError, match="A WanPipeline reads 'a cat & dog' for 'a  cat &amp; dog'"
    ):
        read_prompts(pipe, "a  cat &amp; dog", max_sequence_length=12)


# the pipeline's own is some 500 tokens, spelled in letters; of one without crop_start it counts
@pytest.mark.parametrize(
    ("template", "length"),
    [
        (DEFAULT_PROMPT_TEMPLATE, 600),
        ({"template": "[INST]{}[/INST]", "crop_start": 2}, 6),
        ({"template": "[INST]a film of:{}[/INST]"}, 20),
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
    with pytest.raises(ValueError, match=f"have 5 token columns.*max_sequence_length={length}"):
        read_prompts(pipe, PROMPTS, columns=5, **options)


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("HunyuanSkyreelsImageToVideoPipeline", "read_hunyuan_video"),
        ("HunyuanVideoImageToVideoPipeline", "refuse_unknown"),
        ("HunyuanVideoFramepackPipeline", "refuse_unknown"),
    ],
)
def test_each_class_has_its_reader(name, reader):
    cls = getattr(diffusers, name)
    assert reader_of(cls.__new__(cls)).__name__ == reader
