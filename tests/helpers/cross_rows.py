"""Further rows of the support matrix with cross-attention."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from diffusers import EulerDiscreteScheduler, Kandinsky5Transformer3DModel, SCMScheduler

from helpers.rows import Options, Row, Way, from_image, middle_third, sized
from helpers.tiny_pipelines import by_default, tiny
from helpers.transformer_rows import PATCHES, SANA, unbinned, with_instruction

kandinsky5 = by_default("Kandinsky5T2IPipeline")


def sprint() -> Any:
    return tiny("SanaSprintPipeline", scheduler=SCMScheduler(), guidance_embeds=True)


def kolors(kind: str = "KolorsPipeline") -> Any:
    return tiny(kind, scheduler=EulerDiscreteScheduler())


def of_resolution(pipe: Any, way: Way) -> Options:
    """The pipeline takes sizes of its list only, and some parts of its model stay in float32."""
    pipe.resolutions = [way.size[::-1]]
    for name, module in getattr(pipe, "transformer", torch.nn.Module()).named_modules():
        if any(part in name for part in Kandinsky5Transformer3DModel._keep_in_fp32_modules):
            module.float()
    return sized(pipe, way)


# half of the steps are run
half_from_image = partial(from_image, num_inference_steps=4)
KANDINSKY: Options = {**PATCHES, "in_turn": True, "prompt_rows": None, "layers": 2}
KOLORS = (
    Row("Kolors", kolors, sized),
    Row("Kolors, image to image", lambda: kolors("KolorsImg2ImgPipeline"), half_from_image),
)
CROSS: tuple[Row, ...] = (
    Row(
        "PixArt Sigma, PAG",
        partial(tiny, "PixArtSigmaPAGPipeline"),
        partial(unbinned, pag_scale=3.0),
        prompt_rows=middle_third,
        unguided_rows=lambda batch: range(batch // 2),
        **PATCHES,
        layers=2,
        processors=(),
    ),
    Row(
        "SanaSprint",
        sprint,
        partial(with_instruction, negative_prompt=None),
        **{**SANA, "prompt_rows": None},
    ),
    Row("Kandinsky 5", kandinsky5, of_resolution, processors=(), **KANDINSKY),
)
if find_spec("sentencepiece"):
    CROSS += KOLORS
