"""Further rows of the support matrix with joint attention: the kin of FLUX and others."""

import math
from functools import partial
from typing import Any

import numpy as np
from diffusers.guiders import AdaptiveProjectedMixGuidance
from PIL import Image

from helpers.rows import PROMPTS, Options, Row, Way, also_images, in_turn, short, sized
from helpers.tiny_pipelines import by_default, tiny
from helpers.transformer_rows import FLUX, HALF, PATCHES

chroma = by_default("ChromaPipeline")
auraflow = by_default("AuraFlowPipeline")
bria = by_default("BriaPipeline")
cogview3 = by_default("CogView3PlusPipeline")
longcat = by_default("LongCatImagePipeline")
hidream = by_default("HiDreamImagePipeline")
ovis = by_default("OvisImagePipeline")
ernie = by_default("ErnieImagePipeline")
hunyuan_image = by_default("HunyuanImagePipeline")
qwen_edit = by_default("QwenImageEditPipeline")


def of_area(pipe: Any, way: Way) -> Options:
    """The pipeline scales every image to about the area of this many cells a side, and rounds
    down."""
    pipe.default_sample_size = 1 + math.isqrt(way.size[0] * way.size[1]) // 8
    return short(pipe, way)


def guided(pipe: Any, way: Way) -> Options:
    """Guidance is a part of the pipeline."""
    pipe.guider = AdaptiveProjectedMixGuidance(enabled=way.guided)
    return {"height": way.size[0], "width": way.size[1]}


def quoting(pipe: Any, way: Way) -> Options:
    quoted = ['a "red" cat', *PROMPTS[1:]][: way.prompts]
    return {**guided(pipe, way), "prompt": quoted if way.prompts > 1 else quoted[0]}


def wide_images(number: int) -> list[Image.Image]:
    noise = np.random.default_rng(1).integers(0, 256, (number, 30, 120, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in noise]


def one_each(pipe: Any, way: Way) -> Options:
    made = wide_images(way.prompts)
    return in_turn(pipe, way, image=made if way.prompts > 1 else made[0])


BATCHED: Options = {**PATCHES, "joint": "text first", "layers": 4, "processors": ()}
IMAGE_FIRST: Options = {**BATCHED, "joint": "image first"}
UNFUSED: Options = {**FLUX, "in_turn": True, "processors": ()}
HUNYUAN: Options = {"joint": "image first", "n_text": 190 + 16, "layers": 4, "processors": ()}
HUNYUAN |= {"in_turn": True, "prompt_rows": None}
EDIT: Options = {**FLUX, "n_text": None, "in_turn": True, "layers": 2, "unit": 64, "cell": 64}
CELLS = (512 // 64) * (2048 // 64)  # of an image of 1 : 4 at a megapixel

JOINT = (
    Row("Chroma", chroma, short, **{**UNFUSED, "processors": ("fused",)}),
    Row(
        "Chroma, image to image",
        partial(tiny, "ChromaImg2ImgPipeline"),
        also_images(short, **HALF),
        **UNFUSED,
    ),
    Row("AuraFlow", auraflow, short, n_text=8 + 24, **{**BATCHED, "processors": ("fused",)}),
    Row("Bria", bria, short, n_text=24, **BATCHED),
    Row("CogView3-Plus", cogview3, short, n_text=24, **{**BATCHED, "layers": 2}),
    Row("HiDream-I1", hidream, of_area, n_text=3 * 24, **IMAGE_FIRST),
    # the tiny tokenizer spells its instruction in letters
    Row(
        "Ovis-Image",
        ovis,
        partial(sized, max_sequence_length=160),
        **{**UNFUSED, "n_text": 160},
    ),
    Row("ERNIE-Image", ernie, sized, needs="ErnieImagePipeline", **{**IMAGE_FIRST, "layers": 2}),
    Row("LongCat-Image", longcat, partial(sized, enable_prompt_rewrite=False), **UNFUSED),
)
HUNYUAN_IMAGES = (
    Row("HunyuanImage 2.1", hunyuan_image, guided, **HUNYUAN),
    Row("HunyuanImage 2.1, quoted text", hunyuan_image, quoting, **HUNYUAN),
)
QWEN_EDITS = (
    Row("Qwen-Image-Edit", qwen_edit, one_each, references=CELLS, **EDIT),
    Row(
        "Qwen-Image-Edit-Plus, two images",
        partial(tiny, "QwenImageEditPlusPipeline"),
        partial(in_turn, image=wide_images(2)),
        references=2 * CELLS,
        batched=False,
        **{**EDIT, "processors": ()},
    ),
)
