"""Joint attention of several streams: Stable Diffusion 3 (Esser et al. 2024), AuraFlow,
CogView3-Plus and CogView4, HiDream-I1, and the videos of CogVideoX and Mochi."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...attention.joint_processor import Spans
from ...errors import InvalidValueError
from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, join_prompts, read_source
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches
from ..encode_prompt import read_encoded
from ..encoders import TextCall
from ..family import Family
from ..parts import (
    IN_TURN,
    NEGATIVE_FIRST,
    NEGATIVE_FIRST_IN_CALL,
    Edits,
    ImageLatents,
    Names,
    shifted_latents,
    text_then_image,
)
from ..pipeline import Given, Model

AURAFLOW_REGISTERS = 8  # transformer: AuraFlowTransformer2DModel.register_tokens


def read_sd3(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read two CLIPs in the first columns, then T5, whose columns are zeros if it is left out."""
    names = ("CLIP", "T5")
    read = read_encoded(call, texts, most=512, encoders=names)
    if call.pipe.text_encoder_3 is None:
        n_clip = call.pipe.tokenizer.model_max_length
        lengths = (n_clip, len(read[0].tokens) - n_clip)
        encoders = tuple(zip(names, lengths, strict=True))
        read = [replace(one, encoders=encoders) for one in read]
    return read


def read_hidream(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read T5, then Llama's last layer and the block's own layer, with the same number of columns
    each; the CLIPs give one pooled vector. Source: pipeline_hidream_image.py,
    ``_get_t5_prompt_embeds`` and ``_get_llama3_prompt_embeds``; transformer_hidream_image.py,
    ``forward``."""
    asked = int(call.option("max_sequence_length"))
    columns = 3 * asked if call.columns is None else call.columns
    length, rest = divmod(columns, 3)
    if rest or not length or call.options.get("max_sequence_length") not in (None, length):
        raise call.unexplained(f"`max_sequence_length={asked!r}` makes {3 * asked}")
    read = []
    for text in texts:
        parts = []
        for tokenizer in (call.pipe.tokenizer_3, call.pipe.tokenizer_4):
            own_length = min(length, tokenizer.model_max_length)
            parts.append(read_source(tokenizer, Source.of(text), **filled(own_length)))
        t5, llama = parts
        joined = join_prompts([t5, llama, llama], ("T5", "Llama", "Llama, the block's layer"))
        read.append(replace(joined, encoded=t5.encoded + llama.encoded))
    return read


def _hidream_grid(model: Model, given: Given) -> tuple[int, ...]:
    if given["hidden_states"].ndim != 4:
        raise InvalidValueError(
            "HiDream was called with patches that were cut elsewhere, whose grid is not known. "
            "Call it with latents [B, C, rows, cols], as its pipeline does."
        )
    return grid_of_patches(model, given)


def _hidream_spans(model: Model, given: Given, cells: int) -> Sequence[Spans]:
    """Return the spans. Patches of images that are not square are padded to the largest number."""
    rows, cols = given["hidden_states"].shape[-2:]
    start = cells if rows == cols else model.max_seq
    n_t5 = given["encoder_hidden_states_t5"].shape[1]
    n_llama = given["encoder_hidden_states_llama3"].shape[2]
    end = start + n_t5 + 2 * n_llama
    return [(slice(0, cells), slice(start, end))] * len(given["hidden_states"])


_SD3 = """
StableDiffusion3Pipeline StableDiffusion3Img2ImgPipeline StableDiffusion3InpaintPipeline
StableDiffusion3ControlNetPipeline StableDiffusion3ControlNetInpaintingPipeline
"""
_COGVIDEOX = """
CogVideoXPipeline CogVideoXImageToVideoPipeline CogVideoXVideoToVideoPipeline
CogVideoXFunControlPipeline
"""

FAMILIES = (
    Family(
        name="Stable Diffusion 3",
        denoisers=("SD3Transformer2DModel",),
        layers={
            "transformer_blocks.*.attn": ("double", "joint"),
            "transformer_blocks.*.attn2": ("double", "self"),
        },
        joined="image first",
        half="float16",
        readers={"StableDiffusion3": read_sd3},
        text_stream=lambda model, states: model.context_embedder(states),
        preset="joint",
        guidance=dict.fromkeys(_SD3.split(), NEGATIVE_FIRST),
        image_latents=ImageLatents(
            pipelines={"StableDiffusion3Pipeline": {"guidance_scale": 1.0}},
            encode=shifted_latents,
            noise="flow",
            invertible=True,
        ),
        # Measured on demo-mmdit, docs/editing.md: in the first half it has no effect there.
        edits=Edits(
            pipelines=("StableDiffusion3Pipeline",), depth=(0.5, 1.0), cross=0.3, self_=0.3
        ),
    ),
    # The registers are before the text, as one stream.
    Family(
        name="AuraFlow",
        denoisers=("AuraFlowTransformer2DModel",),
        layers={
            "joint_transformer_blocks.*.attn": ("double", "joint"),
            "single_transformer_blocks.*.attn": ("single", "joint"),
        },
        joined="text first",
        spans=partial(text_then_image, before=AURAFLOW_REGISTERS),
        timestep_unit=1000.0,
        half="float16",
        readers={"AuraFlow": partial(read_encoded, before=AURAFLOW_REGISTERS)},
        preset="joint",
        guidance={"AuraFlowPipeline": NEGATIVE_FIRST_IN_CALL},
    ),
    # Zheng et al. 2024. Here and in CogView4 both streams go through the same projections.
    Family(
        name="CogView3-Plus",
        denoisers=("CogView3PlusTransformer2DModel",),
        layers={"transformer_blocks.*.attn1": ("double", "joint")},
        joined="text first",
        guidance={"CogView3PlusPipeline": NEGATIVE_FIRST},
        preset="joint",
    ),
    Family(
        name="CogView4",
        denoisers=("CogView4Transformer2DModel",),
        layers={"transformer_blocks.*.attn1": ("double", "joint")},
        joined="text first",
        guidance=dict.fromkeys(("CogView4Pipeline", "CogView4ControlPipeline"), IN_TURN),
        preset="joint",
    ),
    Family(
        name="HiDream-I1",
        denoisers=("HiDreamImageTransformer2DModel",),
        layers={
            "double_stream_blocks.*.block.attn1": ("double", "joint"),
            "single_stream_blocks.*.block.attn1": ("single", "joint"),
        },
        joined="image first",
        grid=_hidream_grid,
        spans=_hidream_spans,
        names=Names(timestep=("timesteps",), text="encoder_hidden_states_t5"),
        readers={"HiDreamImage": read_hidream},
        preset="joint",
        guidance={"HiDreamImagePipeline": NEGATIVE_FIRST},
    ),
    # Yang et al. 2024: videos as one sequence, in version 1.5 two frames together.
    Family(
        name="CogVideoX",
        denoisers=("CogVideoXTransformer3DModel",),
        layers={"transformer_blocks.*.attn1": ("double", "joint")},
        joined="text first",
        grid=partial(grid_of_patches, axes=(1, 3, 4)),  # latents [B, frames, C, rows, cols]
        video=True,
        fps=lambda model: 16 if model.config.patch_size_t else 8,  # of 1.5 or 1.0 (model cards)
        frame_unit=2,  # its VAE decodes two at a time, and of an even number makes three more
        half="float16",
        # The call decides from the guidance scale at the beginning of a run, which then changes.
        guidance=dict.fromkeys(_COGVIDEOX.split(), NEGATIVE_FIRST_IN_CALL),
    ),
    # Genmo 2024: each row of a batch attends alone, to the text that its mask leaves.
    Family(
        name="Mochi",
        denoisers=("MochiTransformer3DModel",),
        layers={"transformer_blocks.*.attn1": ("double", "joint")},
        joined="image first",
        video=True,
        fps=30,
        guidance={"MochiPipeline": NEGATIVE_FIRST},
    ),
)
