"""The rows of the support matrix of Qwen-Image's pipelines that edit images."""

from typing import Any

import numpy as np
from diffusers import (
    AutoencoderKLQwenImage,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
)
from PIL import Image

from helpers.rows import Options, Row, Way
from helpers.tiny_encoders import tiny_qwen_vl
from helpers.tiny_pipelines import tiny
from helpers.tiny_processors import tiny_qwen_processor
from helpers.transformer_rows import FLUX, in_turn, own_norms, qwen_transformer


def qwen_edit(kind: Any = QwenImageEditPipeline) -> Any:
    """With a VAE of few cells and channels: the pipelines resize images to a megapixel."""
    model = own_norms(qwen_transformer())
    made = AutoencoderKLQwenImage(
        base_dim=2,
        z_dim=4,
        dim_mult=[1] * 6,
        num_res_blocks=0,
        temperal_downsample=[False] * 5,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    processor = tiny_qwen_processor()
    text = tiny_qwen_vl(processor.tokenizer), processor.tokenizer
    return tiny(kind, model, made.eval(), text, processor=processor)


def new_images(number: int) -> list[Image.Image]:
    noise = np.random.default_rng(1).integers(0, 256, (number, 30, 120, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in noise]


def one_each(pipe: Any, way: Way) -> Options:
    made = new_images(way.prompts)
    return {**in_turn(pipe, way), "image": made if way.prompts > 1 else made[0]}


def two(pipe: Any, way: Way) -> Options:
    return {**in_turn(pipe, way), "image": new_images(2)}


EDIT: Options = {**FLUX, "n_text": None, "in_turn": True, "layers": 2, "unit": 64, "cell": 64}
CELLS = (512 // 64) * (2048 // 64)  # of an image of 1 : 4 at a megapixel

QWEN_EDITS = (
    Row("Qwen-Image-Edit", qwen_edit, one_each, references=CELLS, **EDIT),
    Row(
        "Qwen-Image-Edit-Plus, two images",
        lambda: qwen_edit(QwenImageEditPlusPipeline),
        two,
        references=2 * CELLS,
        batched=False,
        **{**EDIT, "processors": ()},
    ),
)
