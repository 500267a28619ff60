"""Pipelines whose text encoders tell the tokens that they were given, and what is read of them."""

import torch
from diffusers import (
    Flux2KleinPipeline,
    FluxPipeline,
    PixArtAlphaPipeline,
    QwenImageEditPipeline,
    QwenImagePipeline,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection

from helpers.tiny_encoders import (
    tiny_qwen3,
    tiny_qwen_vl,
    tiny_t5_encoder,
)
from helpers.tiny_pipelines import tiny_text_encoder
from helpers.tiny_tokenizers import tiny_qwen, tiny_t5, tiny_tokenizer


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


def make_flux():
    return FluxPipeline(
        scheduler=None,
        vae=None,
        text_encoder=tiny_text_encoder(),
        tokenizer=tiny_tokenizer(),
        text_encoder_2=tells_ids(tiny_t5_encoder()),
        tokenizer_2=tiny_t5(),
        transformer=None,
    )


def make_sd3(*, t5=True):
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=1,
        joint_attention_dim=64,
        caption_projection_dim=8,
        pooled_projection_dim=64,
        out_channels=4,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=None,
        vae=None,
        text_encoder=tells_ids(tiny_text_encoder(CLIPTextModelWithProjection)),
        tokenizer=tiny_tokenizer(),
        text_encoder_2=tells_ids(tiny_text_encoder(CLIPTextModelWithProjection)),
        tokenizer_2=tiny_tokenizer(),
        text_encoder_3=tells_ids(tiny_t5_encoder(64)) if t5 else None,
        tokenizer_3=tiny_t5() if t5 else None,
    )


def make_qwen(kind=QwenImagePipeline, tokenizer=None):
    parts = {"processor": None} if kind is QwenImageEditPipeline else {}
    return kind(
        scheduler=None,
        vae=None,
        text_encoder=tells_ids(tiny_qwen_vl()),
        tokenizer=tokenizer or tiny_qwen(),
        transformer=None,
        **parts,
    )


def make_klein():
    return Flux2KleinPipeline(
        scheduler=None,
        vae=None,
        text_encoder=tells_ids(tiny_qwen3()),
        tokenizer=tiny_qwen(),
        transformer=None,
    )


def make_pixart(kind=PixArtAlphaPipeline):
    return kind(
        tokenizer=tiny_t5(),
        text_encoder=tells_ids(tiny_t5_encoder()),
        vae=None,
        transformer=None,
        scheduler=None,
    )


def made_by(pipe, prompts, **options):
    """The token numbers behind each column that the pipeline gives its denoiser, -1 for zeros."""
    with torch.no_grad():
        made = pipe.encode_prompt(prompts, device="cpu", **options)
    states = made[0] if isinstance(made, tuple) else made
    return (states[..., 0].round().long() - 1).tolist()


def assert_same_columns(read, made, tokenizer):
    """Every column's token, and each word's columns spell the word."""
    assert [[token.id for token in one.tokens] for one in read] == made
    for one in read:
        for word in one.seen:
            spelled = tokenizer.decode([one.tokens[i].id for i in word.columns])
            spelled, text = "".join(spelled.split()).casefold(), word.text.casefold()
            cut_off = one.truncated and word is one.seen[-1] and text.startswith(spelled)
            assert spelled == text or cut_off or "<unk>" in spelled, word
