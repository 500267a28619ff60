"""One stream of joint attention: Lumina 2, Krea 2, ERNIE-Image, Ideogram 4 and Z-Image."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...attention.joint_processor import Spans
from ...errors import InvalidTypeError
from ...prompts.tokenizing import TEMPLATE, Token, filled
from ...prompts.tokens import Prompt, join_prompts, read_source
from ...prompts.words import Source
from ..denoiser_call import grid_of_ids
from ..encoders import (
    PLACEHOLDER,
    TextCall,
    filled_to_longest,
    in_chat,
    padded_in_front,
    read_inside,
    refuse_rewriting,
    refuse_unknown,
    rendered,
)
from ..family import Family
from ..parts import IN_TURN, NEGATIVE_FIRST, Guidance, Names
from ..pipeline import Given, Model

Z_IMAGE_UNIT = 32  # tokens: image and caption are filled up to multiples (SEQ_MULTI_OF)
# transformer_ideogram4.py: LLM_TOKEN_INDICATOR, and IMAGE_POSITION_OFFSET, of the image's position
# ids on each axis
_IDEOGRAM4_TEXT = 3
_IDEOGRAM4_OFFSET = 65536


def read_ernie(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read each prompt alone, then zeros up to the longest in the batch, negative prompts included.
    Source: pipeline_ernie_image.py, ``encode_prompt`` and ``_pad_text``."""
    pipe = call.pipe
    if None not in (pipe.pe, pipe.pe_tokenizer):
        refuse_rewriting(call, "use_pe", "Take its revised_prompts of a run")
    read = [read_source(pipe.tokenizer, Source.of(text), truncation=True) for text in texts]
    return filled_to_longest(call, read, or_more=True)


def read_lumina2(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Gemma without its padding, padded again to the longest prompt in the batch; negative
    prompts are read alone. Source: pipeline_lumina2.py, ``encode_prompt`` and
    ``_get_gemma_prompt_embeds``."""
    most = call.option("max_sequence_length")
    system = call.option("system_prompt")
    if system is None:
        system = call.pipe.system_prompt
    before = "" if call.negative else system + " <Prompt Start> "
    sources = [Source.of(text).within(before, "") for text in texts]
    read = read_inside(call.pipe.tokenizer, sources, truncation=True, max_length=most)
    return filled_to_longest(call, read, f"`max_sequence_length={most}`")


def _lumina2_spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    lengths: list[int] = given["encoder_attention_mask"].sum(dim=1).tolist()
    return [(slice(length, length + cells), slice(0, length)) for length in lengths]


def read_krea2(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3-VL after a system message that is dropped, padded, with the end of the user's turn
    after the padding. Source: pipeline_krea2.py, ``get_text_hidden_states``."""
    tokenizer = call.pipe.tokenizer
    before = call.setting("prompt_template_encode_prefix")
    after = call.setting("prompt_template_encode_suffix")
    drop = call.setting("prompt_template_encode_start_idx")
    n_after = call.setting("prompt_template_encode_num_suffix_tokens")
    options = filled(call.length() + drop - n_after)
    ids = tokenizer([after])["input_ids"][0]
    suffix = tuple(Token(one, tokenizer.convert_ids_to_tokens(one), 0, 0, TEMPLATE) for one in ids)
    sources = [Source.of(text).within(before, "") for text in texts]
    return [
        replace(
            join_prompts([own, Prompt(own.text, (), suffix)]), encoded=((*own.encoded[0], *ids),)
        )
        for own in read_inside(tokenizer, sources, drop, **options)
    ]


def read_ideogram4(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3-VL's chat format without its padding, zeros in front that the model masks.
    Source: pipeline_ideogram4.py, ``encode_prompt``."""
    refuse_rewriting(call, "prompt_upsampling", "Make that caption first")
    tokenizer = call.pipe.tokenizer

    def render(text: str) -> str:
        chat = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return str(whole)

    sources = [rendered(text, render) for text in texts]
    read = read_inside(tokenizer, sources, add_special_tokens=False)
    return filled_to_longest(call, padded_in_front(read, call.option("max_sequence_length"), 0))


def _ideogram4_spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    kinds = given["indicator"]  # [B, S]
    start = kinds.shape[1] - cells
    lengths = (kinds == _IDEOGRAM4_TEXT).sum(dim=1).tolist()
    return [(slice(start, start + cells), slice(start - length, start)) for length in lengths]


def read_z_image(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3's chat format without its padding; the model pads each row to a multiple of 32
    tokens, and the map to the longest row. Source: pipeline_z_image.py, ``_encode_prompt``;
    transformer_z_image.py, ``patchify_and_embed``."""
    tokenizer = call.pipe.tokenizer
    most = call.option("max_sequence_length")
    inside = in_chat(tokenizer, enable_thinking=True)
    before, _, after = inside(PLACEHOLDER).text.partition(PLACEHOLDER)
    # The pipeline replaces prompts in a list by their rendered form.
    bare = [text.removeprefix(before).removesuffix(after) for text in texts]
    read = read_inside(tokenizer, map(inside, bare), truncation=True, max_length=most)
    by = f"`max_sequence_length={most!r}`"
    return filled_to_longest(call, read, by, unit=Z_IMAGE_UNIT, or_more=True)


def _filled(tokens: int) -> int:
    return tokens + -tokens % Z_IMAGE_UNIT


def _z_image_grid(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of latents ``[C, frames, rows, cols]``, one per row; refuse several."""
    if isinstance(given["x"][0], list):
        raise InvalidTypeError(
            "Z-Image Omni puts captions, several images and SigLIP's view of them after "
            "each other in a row, and which tokens are the words' is not known. Text-to-image "
            "pipelines of Z-Image can be watched."
        )
    frames, rows, cols = given["x"][0].shape[1:]
    patch = given.get("patch_size", 2)
    return frames // given.get("f_patch_size", 1), rows // patch, cols // patch


def _z_image_spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    start = _filled(cells)
    lengths = (_filled(len(caption)) for caption in given["cap_feats"])
    return [(slice(0, cells), slice(start, start + length)) for length in lengths]


_Z_IMAGE = """
ZImagePipeline ZImageImg2ImgPipeline ZImageInpaintPipeline ZImageControlNetPipeline
ZImageControlNetInpaintPipeline
"""

FAMILIES = (
    Family(
        name="ERNIE-Image",
        denoisers=("ErnieImageTransformer2DModel",),
        layers={"layers.*.self_attention": ("single", "joint")},
        joined="image first",
        half="float16",
        readers={"ErnieImage": read_ernie},
        preset="joint",
        guidance={"ErnieImagePipeline": NEGATIVE_FIRST},
        text_options=("use_pe",),
        names=Names(text="text_bth"),
    ),
    # In each row its own text and then the image.
    Family(
        name="Lumina 2",
        denoisers=("Lumina2Transformer2DModel",),
        layers={
            "noise_refiner.*.attn": ("block", "self"),
            "context_refiner.*.attn": ("block", "text"),
            "layers.*.attn": ("single", "joint"),
        },
        joined="text first",
        spans=_lumina2_spans,
        spans_arguments=("encoder_attention_mask",),
        timestep_unit=-1000.0,
        timestep_start=1000.0,
        readers={"Lumina2": read_lumina2},
        guidance={"Lumina2Pipeline": IN_TURN},
        text_options=("max_sequence_length", "system_prompt"),
        preset="joint",
    ),
    # The text is padded in its middle.
    Family(
        name="Krea 2",
        denoisers=("Krea2Transformer2DModel",),
        layers={
            "text_fusion.*.attn": ("block", "text"),
            "transformer_blocks.*.attn": ("single", "joint"),
        },
        joined="text first",
        grid=partial(grid_of_ids, name="position_ids", after_text=True),
        grid_argument="position_ids",
        timestep_unit=1000.0,
        patch=2,  # cut by the pipeline
        readers={"Krea2": read_krea2},
        guidance=dict.fromkeys(("Krea2Pipeline", "Krea2TurboModularPipeline"), IN_TURN),
        preset="joint",
    ),
    # In each row padding, its own text and then the image; the negative branch is another model,
    # which gets no text.
    Family(
        name="Ideogram 4",
        denoisers=("Ideogram4Transformer2DModel",),
        layers={"layers.*.attention": ("single", "joint")},
        joined="text first",
        # of text and image, [B, S, (time, row, col)]
        grid=partial(grid_of_ids, name="position_ids", made=_IDEOGRAM4_OFFSET),
        grid_argument="position_ids",
        spans=_ideogram4_spans,
        spans_arguments=("indicator",),
        timestep_unit=-1000.0,
        timestep_start=1000.0,
        patch=2,  # cut by the pipelines
        readers={"Ideogram4": read_ideogram4},
        guidance=dict.fromkeys(("Ideogram4Pipeline", "Ideogram4ModularPipeline"), IN_TURN),
        text_options=("max_sequence_length", "prompt_upsampling"),
        reads_ids="language_model.embed_tokens",
        preset="joint",
    ),
    # The image and then the caption, each row with its own length.
    Family(
        name="Z-Image",
        denoisers=("ZImageTransformer2DModel",),
        layers={
            "noise_refiner.*.attention": ("block", "self"),
            "context_refiner.*.attention": ("block", "text"),
            "layers.*.attention": ("single", "joint"),
        },
        joined="image first",
        grid=_z_image_grid,
        spans=_z_image_spans,
        timestep_unit=-1000.0,
        timestep_start=1000.0,
        patch=2,
        readers={"ZImage": read_z_image, "ZImageOmni": refuse_unknown},
        # cfg_truncation ends the guidance in the middle of a run, or before its first step
        guidance=dict.fromkeys(
            _Z_IMAGE.split(), Guidance(("conditional", "unconditional"), known_by="truncation")
        ),
        names=Names(latents="x", timestep=("t",), text=""),
        preset="joint",
    ),
)
