"""Cross-attention to the text: PixArt, Sana and Kandinsky 5."""

import math
from dataclasses import replace
from functools import cached_property, partial

from ..denoiser_call import Timestep, grid_of_patches
from ..encode_prompt import read_encoded
from ..encoders import refuse_unknown
from ..family import Family
from ..layers import SELF_THEN_CROSS
from ..parts import IN_TURN, NEGATIVE_FIRST, NEGATIVE_FIRST_IN_CALL
from ..pipeline import Given, Model, Pipeline


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


class Kandinsky5(Family):
    """One class of models for images and videos, which have pipelines of their own."""

    def within(self, pipeline: Pipeline) -> Family:
        is_video = any(cls.__name__ in _OF_VIDEOS for cls in type(pipeline).__mro__)
        if is_video:
            return replace(self, video=True)
        return self


_OF_VIDEOS = ("Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline")
_KANDINSKY5 = ("Kandinsky5T2IPipeline", *_OF_VIDEOS)

FAMILIES = (
    Family(
        name="PixArt",
        denoisers=("PixArtTransformer2DModel",),
        layers=SELF_THEN_CROSS,
        half="float16",
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
        readers={
            # after an instruction, which a negative prompt lacks: pipeline_sana.py, encode_prompt
            "Sana": partial(read_encoded, negative_apart=True),
            "SanaWM": refuse_unknown,
        },
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
        guidance=dict.fromkeys(_KANDINSKY5, IN_TURN),
    ),
)
