"""Cross-attention to the text: PixArt, Sana, Kandinsky 5, LTX-Video and LTX-2."""

import math
import re
from dataclasses import replace
from functools import cached_property, partial

from ...errors import InvalidValueError
from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..attention_layer import SELF_THEN_CROSS
from ..denoiser_call import Timestep, grid_of_patches, grid_of_places
from ..encoders import (
    PLACEHOLDER,
    TextCall,
    as_cleaned,
    cleaned,
    read_captions,
    read_inside,
    read_t5,
    refuse_mixed_masks,
    refuse_rewriting,
    refuse_unknown,
    zero_filled,
)
from ..family import IN_TURN, NEGATIVE_FIRST, NEGATIVE_FIRST_IN_CALL, Family
from ..parts import Names
from ..pipeline import Given, Model, Pipeline


def read_sana(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Gemma after an instruction; its start is kept, and as much of its end as fits. Source:
    pipeline_sana.py, ``_get_gemma_prompt_embeds`` and ``encode_prompt``."""
    tokenizer = call.pipe.tokenizer
    length = call.length()
    lines = None if call.negative else call.option("complex_human_instruction")
    if not lines:
        return read_captions(call, texts, padding_side="right")
    instruction = "\n".join(lines)
    options = filled(len(tokenizer.encode(instruction)) + length - 2)
    return [
        read_source(
            tokenizer,
            cleaned(call, text).within(instruction, ""),
            keep=lambda n: [0, *range(n - length + 1, n)],
            padding_side="right",
            **options,
        )
        for text in texts
    ]


class SprintTimestep(Timestep):
    """SanaSprint's timestep: its scheduler has angles ``a`` in [0, pi / 2], and the model gets
    ``sin a / (cos a + sin a)``. Source: pipeline_sana_sprint.py, ``__call__``."""

    @cached_property
    def _read(self) -> float:
        given = super()._read
        return math.atan2(given, 1 - given)


class Sana(Family):
    """Sana, and SanaSprint, which has the same class with an embedding of the guidance."""

    def timestep(self, model: Model, given: Given) -> Timestep:
        if model.config.guidance_embeds:
            return SprintTimestep(given["timestep"])
        return Timestep(given["timestep"], 1 / getattr(model.config, "timestep_scale", 1.0))


def read_kandinsky5(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen2.5-VL inside a template, without its first tokens, padded to the longest prompt in
    the batch; CLIP gives one pooled vector. Source: pipeline_kandinsky_t2i.py,
    ``_encode_prompt_qwen``."""
    pipe = call.pipe
    tokenizer = getattr(pipe.tokenizer, "tokenizer", pipe.tokenizer)
    drop = pipe.prompt_template_encode_start_idx
    most = call.option("max_sequence_length")
    before, _, after = pipe.prompt_template.format(PLACEHOLDER).partition(PLACEHOLDER)
    sources = [_cleaned(call, text).within(before, after) for text in texts]
    longest = max(len(tokenizer(source.text)["input_ids"]) for source in sources)
    if longest > drop + most:
        raise InvalidValueError(
            f"A {type(pipe).__name__} cuts prompts of more than {most} tokens in a way that is not "
            f"known, and the longest of {texts} makes {longest - drop}. Write less."
        )
    call.check(longest - drop, "these prompts")
    return read_inside(tokenizer, sources, drop, padding="max_length", max_length=longest)


def _cleaned(call: TextCall, text: str) -> Source:
    """Return the prompt with single spaces; refuse it if ``prompt_clean`` would change more."""
    from diffusers.pipelines.kandinsky5.pipeline_kandinsky_t2i import prompt_clean

    source = Source.of(text).strip()
    kept = [match.start() for match in re.finditer(r"\S|\s(?!\s)", source.text)]
    spaced = "".join(" " if source.text[i].isspace() else source.text[i] for i in kept)
    source = Source(text, spaced, tuple(source.origins[i] for i in kept))
    return as_cleaned(call, source, prompt_clean(text), "prompt_clean")


class Kandinsky5(Family):
    """One class of models for images and videos, which have pipelines of their own."""

    def within(self, pipeline: Pipeline) -> Family:
        is_video = any(cls.__name__ in _OF_VIDEOS for cls in type(pipeline).__mro__)
        if is_video:
            return replace(self, video=True)
        return self


def _ltx_grid(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of a sequence of latents, from its sizes or its cells' positions ``[B, 3,
    N]``; raise ValueError if it begins with frames that the video continues from."""
    coordinates = given.get("video_coords")
    if coordinates is None:
        return given["num_frames"], given["height"], given["width"]
    advice = (
        "The cells of given frames that are not the first come before the video's: give the video "
        "its first frame alone."
    )
    return grid_of_places("video_coords", coordinates[0].float().T, advice)


def read_ltx2(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Gemma, padded on the left. The connectors move the prompt to the front and append
    learned registers, which belong to no token and attract attention. Source: pipeline_ltx2.py,
    ``_get_gemma_prompt_embeds``; connectors.py, ``LTX2ConnectorTransformer1d.forward``."""
    pipe = call.pipe
    length = call.length()
    how = "Call pipe.enhance_prompt(prompt, system_prompt) yourself"
    refuse_rewriting(call, "enable_prompt_enhancement", how)
    read = []
    for text in texts:
        source = Source.of(text).strip()
        options = filled(length)
        padded = read_source(pipe.tokenizer, source, padding_side="left", **options)
        del options["padding"]
        bare = read_source(pipe.tokenizer, source, **options)
        read.append((padded, replace(bare, encoded=padded.encoded)))
    refuse_mixed_masks(call, "num_videos_per_prompt", (len(bare.tokens) for _, bare in read))
    if pipe.connectors.config.video_connector_num_learnable_registers is None:
        return [padded for padded, _ in read]  # such connectors leave all where it is
    return zero_filled([bare for _, bare in read], length)


def _ltx2_grid(model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of packed latents ``[B, frames * rows * cols, C]``; raise ValueError if it is
    not a video of this size."""
    sizes = [given.get(name) for name in ("num_frames", "height", "width")]
    config = model.config
    patches = (config.patch_size_t, config.patch_size, config.patch_size)
    grid = [(size or 0) // patch for size, patch in zip(sizes, patches, strict=True)]
    tokens = given["hidden_states"].shape[1]
    if math.prod(grid) != tokens:
        raise InvalidValueError(
            f"A {type(model).__name__} was called with {tokens} tokens of a video and num_frames, "
            f"height and width {sizes}, which are {math.prod(grid)}. With images or keyframes "
            "behind the video, or a part of it at a time, where each token lies is not known. "
            "LTX2Pipeline and LTX2ImageToVideoPipeline can be watched."
        )
    return tuple(grid)


_OF_VIDEOS = ("Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline")
_KANDINSKY5 = ("Kandinsky5T2IPipeline", *_OF_VIDEOS)
_AUDIO = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_LTX2 = ("LTX2Pipeline", "LTX2ImageToVideoPipeline")

FAMILIES = (
    # T5, in lower case: pipeline_pixart_alpha.py, encode_prompt.
    Family(
        name="PixArt",
        denoisers=("PixArtTransformer2DModel",),
        layers=SELF_THEN_CROSS,
        grid=grid_of_patches,
        half="float16",
        readers={"PixArt": read_captions},
        guidance=dict.fromkeys(
            ("PixArtAlphaPipeline", "PixArtSigmaPipeline", "PixArtSigmaPAGPipeline"),
            NEGATIVE_FIRST_IN_CALL,
        ),
        text_options=("max_sequence_length", "clean_caption"),
    ),
    Sana(
        name="Sana",
        denoisers=("SanaTransformer2DModel",),
        layers={
            "transformer_blocks.*.attn1": ("block", "linear"),
            "transformer_blocks.*.attn2": ("block", "cross"),
        },
        grid=grid_of_patches,
        readers={"Sana": read_sana, "SanaWM": refuse_unknown},
        guidance={
            **dict.fromkeys(("SanaPipeline", "SanaControlNetPipeline"), NEGATIVE_FIRST),
            # distilled: the guidance is an input of the model
            **dict.fromkeys(("SanaSprintPipeline", "SanaSprintImg2ImgPipeline"), IN_TURN),
        },
        text_options=("max_sequence_length", "clean_caption", "complex_human_instruction"),
    ),
    # The model first encodes the text further.
    Kandinsky5(
        name="Kandinsky 5",
        denoisers=("Kandinsky5Transformer3DModel",),
        layers={
            "text_transformer_blocks.*.self_attention": ("block", "text"),
            "visual_transformer_blocks.*.self_attention": ("block", "self"),
            "visual_transformer_blocks.*.cross_attention": ("block", "cross"),
        },
        grid=partial(grid_of_patches, axes=(1, 2, 3)),  # latents [B, frames, rows, cols, C]
        patch=2,
        fps=24,
        readers=dict.fromkeys(_KANDINSKY5, read_kandinsky5),
        guidance=dict.fromkeys(_KANDINSKY5, IN_TURN),
    ),
    Family(
        name="LTX-Video",
        denoisers=("LTXVideoTransformer3DModel",),
        layers=SELF_THEN_CROSS,
        grid=_ltx_grid,
        grid_argument="video_coords",
        video=True,
        fps=25,
        patch=1,
        readers={"LTX": read_t5},
        guidance=dict.fromkeys(
            ("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"), NEGATIVE_FIRST
        ),
    ),
    # Videos with sound, in two streams; the video's attends to Gemma.
    Family(
        name="LTX-2",
        denoisers=("LTX2VideoTransformer3DModel",),
        layers={
            **SELF_THEN_CROSS,
            **{f"transformer_blocks.*.{name}": ("block", "audio") for name in _AUDIO},
        },
        grid=_ltx2_grid,
        video=True,
        fps=24,
        default_frames=121,
        names=Names(
            # of a video that begins with an image, the timesteps of this image's tokens are 0;
            # sigma is the step's. Source: pipeline_ltx2_image2video.py, __call__
            timestep=("sigma", "timestep"),
            # guidance compares with passes without some of the layers
            skips=("spatio_temporal_guidance_blocks", "isolate_modalities"),
        ),
        readers={"LTX2": refuse_unknown, **dict.fromkeys(_LTX2, read_ltx2)},
        guidance=dict.fromkeys(_LTX2, NEGATIVE_FIRST),
    ),
)
