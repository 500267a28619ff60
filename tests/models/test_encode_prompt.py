"""Prompts read by a pipeline's own encode_prompt, whose text encoders do not run."""

import logging
import threading
import warnings

import diffusers
import pytest
import torch
from helpers.modular_rows import flux3
from helpers.tiny_pipelines import tiny
from helpers.tiny_tokenizers import tiny_qwen

from sdattn.models.reading import read_prompts
from sdattn.prompts.tokens import TruncationWarning

KINDS = ("StableDiffusion3Pipeline", "FluxPipeline", "QwenImagePipeline", "SanaPipeline")
LONG = "cat " * 600


def made(kind):
    return flux3() if kind == "Flux3ModularPipeline" else tiny(kind)


def parts_of(pipe):
    """Every attribute of a pipeline, and of its tokenizers and text encoders."""
    parts = {
        name: dict(vars(part))
        for name, part in vars(pipe).items()
        if name.startswith(("tokenizer", "text_encoder")) and hasattr(part, "__dict__")
    }
    return {**vars(pipe), **parts}


@pytest.mark.parametrize("kind", [*KINDS, "Flux3ModularPipeline"])
def test_nothing_of_the_pipeline_changes_and_no_weights_run(kind):
    pipe = made(kind)
    read = read_prompts(pipe, "a red cat")
    for name, part in vars(pipe).items():
        if name.startswith("text_encoder") and isinstance(part, torch.nn.Module):
            part.to("meta")  # which cannot run
    before = parts_of(pipe)
    assert read_prompts(pipe, "a red cat") == read
    after = parts_of(pipe)
    assert list(after) == list(before)
    for name, value in after.items():
        same = value == before[name] if isinstance(value, dict) else value is before[name]
        assert same, name


@pytest.mark.parametrize("kind", KINDS)
def test_encoders_that_were_freed_are_not_needed(kind):
    """As after a run on prompt_embeds that were made before."""
    pipe = tiny(kind)
    read = read_prompts(pipe, "a red cat", columns=101 if "3" in kind else None)
    for name in ("text_encoder", "text_encoder_2"):
        if hasattr(pipe, name):
            setattr(pipe, name, None)
    assert read_prompts(pipe, "a red cat", columns=len(read[0].tokens)) == read


@pytest.fixture
def diffusers_log(caplog, monkeypatch):
    """What diffusers logs; older ones keep it from the root logger."""
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    return caplog


def test_the_pipelines_own_warnings_are_not_given_again(diffusers_log):
    pipe = tiny("StableDiffusion3Pipeline")
    with pytest.warns(TruncationWarning) as warned:
        read_prompts(pipe, LONG)
    assert len(warned) == 1 and not diffusers_log.records
    with torch.no_grad():
        pipe.encode_prompt(LONG, None, None)
    assert "truncated" in diffusers_log.text


def test_another_threads_warnings_are_given_meanwhile(diffusers_log):
    pipe = tiny("StableDiffusion3Pipeline")
    tokenize = type(pipe.tokenizer).__call__

    class Meanwhile(type(pipe.tokenizer)):
        def __call__(self, *args, **options):
            other = threading.Thread(target=pipe_logger.warning, args=("of another run",))
            other.start()
            other.join()
            return tokenize(self, *args, **options)

    from diffusers.pipelines.stable_diffusion_3 import pipeline_stable_diffusion_3

    pipe_logger = pipeline_stable_diffusion_3.logger
    pipe.tokenizer.__class__ = Meanwhile
    before = list(pipe_logger.filters)
    read_prompts(pipe, "a red cat")
    assert "of another run" in diffusers_log.text
    assert pipe_logger.filters == before


class UnknownPipeline(diffusers.DiffusionPipeline):
    """A pipeline that nobody wrote down, which drops the start of a template."""

    def __init__(self, tokenizer, text_encoder):
        super().__init__()
        self.register_modules(tokenizer=tokenizer, text_encoder=text_encoder)

    def __call__(self, prompt, max_sequence_length=24):
        return self.encode_prompt(prompt, max_sequence_length)

    def encode_prompt(self, prompt, max_sequence_length=24):
        texts = [f"a photo of {one.strip()}." for one in prompt]
        options = {"padding": "max_length", "max_length": max_sequence_length + 3}
        ids = self.tokenizer(texts, truncation=True, return_tensors="pt", **options).input_ids
        states = self.text_encoder(ids, output_hidden_states=True).hidden_states[-2]
        return states[:, 3:], None


def unknown(kind=UnknownPipeline):
    return kind(tiny_qwen(), tiny("QwenImagePipeline").text_encoder)


def test_a_pipeline_that_nobody_wrote_down_is_read():
    pipe = unknown()
    texts = [" a photo of a red cat", "of"]
    read = read_prompts(pipe, texts)
    ids = pipe.tokenizer([f"a photo of {one.strip()}." for one in texts])["input_ids"]
    for one, own in zip(read, ids, strict=True):
        assert len(one.tokens) == 24
        assert [token.id for token in one.tokens][: len(own) - 3] == own[3:]
        for word in one.words:
            spelled = pipe.tokenizer.decode([one.tokens[i].id for i in word.columns])
            assert spelled.strip() == word.text
        assert one.find("<template>")[0][0] == 0
    assert read_prompts(pipe, texts, max_sequence_length=30, columns=30)
    assert len(read_prompts(pipe, texts, columns=30)[0].tokens) == 30
    with pytest.raises(ValueError, match="29 token columns.*`max_sequence_length=30` makes 30"):
        read_prompts(pipe, texts, max_sequence_length=30, columns=29)


def test_what_cannot_be_followed_is_refused_by_name():
    class Splitting(UnknownPipeline):
        def encode_prompt(self, prompt):
            """As LongCat-Image tokenizes what is in quotes."""
            ids = [i for piece in prompt[0].split(",") for i in self.tokenizer(piece)["input_ids"]]
            return self.text_encoder(torch.tensor([ids]))[0]

    class Failing(UnknownPipeline):
        def encode_prompt(self, prompt):
            return self.text_encoder.encoder.block[0](prompt)

    class Pooling(UnknownPipeline):
        def encode_prompt(self, prompt):
            ids = self.tokenizer(prompt, return_tensors="pt").input_ids
            return self.text_encoder(ids).pooler_output

    assert read_prompts(unknown(Splitting), "a red cat")[0].find("cat") == [(2,)]
    with pytest.raises(ValueError, match="Splitting reads .* for the prompt 'a cat, a dog'"):
        read_prompts(unknown(Splitting), "a cat, a dog")
    with pytest.raises(TypeError, match="Failing could not be followed .*encoder.*labels"):
        read_prompts(unknown(Failing), "a red cat")
    with pytest.raises(TypeError, match="Pooling could not be followed .*no states.*labels"):
        read_prompts(unknown(Pooling), "a red cat")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_prompts(unknown(Failing), {"cat": [2]}, columns=5)
