"""One stream of joint attention: Lumina 2, Krea 2, ERNIE-Image, Ideogram 4 and Z-Image."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...attention.joint_processor import Spans
from ...errors import InvalidTypeError
from ...prompts.tokens import Prompt, read_source
from ..denoiser_call import grid_of_ids
from ..encode_prompt import read_encoded
from ..encoders import (
    PLACEHOLDER,
    TextCall,
    filled_to_longest,
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
    """Read prompts, with zeros up to the longest in the batch, negative prompts included. Source:
    pipeline_ernie_image.py, ``_pad_text``."""
    if None not in (call.pipe.pe, call.pipe.pe_tokenizer):
        refuse_rewriting(call, "use_pe", "Take its revised_prompts of a run")
    return read_encoded(call, texts, or_more=True)


def _lumina2_spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    lengths: list[int] = given["encoder_attention_mask"].sum(dim=1).tolist()
    return [(slice(length, length + cells), slice(0, length)) for length in lengths]


def read_ideogram4(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3-VL's chat format without its padding, zeros in front that the model masks.
    Source: pipeline_ideogram4.py, ``encode_prompt``."""
    refuse_rewriting(call, "prompt_upsampling", "Make that caption first")
    tokenizer = call.pipe.tokenizer

    def render(text: str) -> str:
        chat = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return str(whole)

    read = []
    for text in texts:
        prompt = read_source(tokenizer, rendered(text, render), add_special_tokens=False)
        padding = (0,) * (call.option("max_sequence_length") - len(prompt.tokens))
        read.append(replace(prompt, encoded=(padding + prompt.encoded[0],)))
    return filled_to_longest(call, read)


def _ideogram4_spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    kinds = given["indicator"]  # [B, S]
    start = kinds.shape[1] - cells
    lengths = (kinds == _IDEOGRAM4_TEXT).sum(dim=1).tolist()
    return [(slice(start, start + cells), slice(start - length, start)) for length in lengths]


def read_z_image(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read prompts that the model pads to a multiple of 32 tokens, and the map to the longest row.
    Source: transformer_z_image.py, ``patchify_and_embed``."""
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
    chat = [{"role": "user", "content": PLACEHOLDER}]
    whole = call.pipe.tokenizer.apply_chat_template(chat, **options)
    before, _, after = whole.partition(PLACEHOLDER)
    # The pipeline replaces prompts in a list by their rendered form.
    bare = [text.removeprefix(before).removesuffix(after) for text in texts]
    return read_encoded(call, bare, unit=Z_IMAGE_UNIT, or_more=True)


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
        # the system prompt comes before a prompt alone: pipeline_lumina2.py, encode_prompt
        readers={"Lumina2": partial(read_encoded, masked=True, negative_apart=True)},
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
