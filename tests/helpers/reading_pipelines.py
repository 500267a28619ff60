"""Pipelines whose text encoders tell the tokens that they were given, and what is read of them."""

from typing import Any

import torch

from helpers.tiny_pipelines import tiny

PROMPTS = [
    "a red cat on the sofa",
    "A turquoise Cat, a dog (on a  cat's SOFA)!",
    "  un café 😀 cat\n",
    "一只 cat 红色",
]


def tells_ids(encoder):
    """Have an encoder's states hold the number of their token, plus one: zeros are no token."""

    def overwrite(module, args, kwargs, output):
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        for name, value in output.items():
            if name == "last_hidden_state":
                output[name] = (ids[..., None] + 1).expand_as(value).to(value.dtype)
            elif name == "hidden_states":
                output[name] = tuple((ids[..., None] + 1).expand_as(v).to(v.dtype) for v in value)
        return output

    encoder.register_forward_hook(overwrite, with_kwargs=True)
    return encoder.eval()


def telling(kind: Any, **parts: Any) -> Any:
    """A tiny pipeline of which only the parts are there that read a prompt, and tell it."""
    pipe = tiny(kind, **{"vae": None, "transformer": None, **parts})
    for name, part in pipe.components.items():
        if name.startswith("text_encoder") and part is not None:
            tells_ids(part)
    return pipe


def ids_of(states):
    """The token numbers behind each column of text states, -1 for zeros."""
    return (states[..., 0].round().long() - 1).tolist()


def made_by(pipe, prompts, **options):
    """The token numbers behind each column that the pipeline gives its denoiser, -1 for zeros."""
    with torch.no_grad():
        made = pipe.encode_prompt(prompts, device="cpu", **options)
    return ids_of(made[0] if isinstance(made, tuple) else made)


def assert_same_columns(read, made, tokenizer):
    """Every column's token, and each word's columns spell the word."""
    assert [[token.id for token in one.tokens] for one in read] == made
    for one in read:
        for word in one.seen:
            spelled = tokenizer.decode([one.tokens[i].id for i in word.columns])
            spelled, text = "".join(spelled.split()).casefold(), word.text.casefold()
            cut_off = one.truncated and word is one.seen[-1] and text.startswith(spelled)
            assert spelled == text or cut_off or "<unk>" in spelled, word
