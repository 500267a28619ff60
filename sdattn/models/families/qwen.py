"""Qwen-Image and its variants for editing: joint attention, prompts inside a template."""

from torch import Tensor

from ...prompts.tokens import Prompt
from ..encoders import PLACEHOLDER, TextCall, refuse_unknown
from ..family import IN_TURN, Family
from ..parts import Edits, ImageLatents, packed, vae_latents
from ..pipeline import Given, Model, Pipeline
from ..qwen_chats import read_edit, read_edit_plus, read_filled


def read_qwen(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen2.5-VL inside a template, without its first tokens, cut, and padded with zeros to
    the longest prompt in the batch. Source: pipeline_qwenimage.py, ``_get_qwen_prompt_embeds``."""
    most, start = call.option("max_sequence_length"), "prompt_template_encode_start_idx"
    limit = call.setting("tokenizer_max_length") + call.setting(start)
    template = call.setting("prompt_template_encode").format(PLACEHOLDER)
    return read_filled(
        call, texts, [template] * len(texts), most, truncation=True, max_length=limit
    )


def _grid_of_shapes(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid from ``img_shapes``: per row the (frames, rows, cols) of its images, the
    generated one first, or of that one alone."""
    shape = given["img_shapes"][0]
    return tuple(shape if isinstance(shape[0], int) else shape[0])


def _encode(pipe: Pipeline, pixels: Tensor) -> Tensor:
    """Encode to one frame of a video VAE, packed (pipeline_qwenimage_img2img.py,
    ``_encode_vae_image``)."""
    latents, config = vae_latents(pipe.vae, pixels[:, :, None])[:, :, 0], pipe.vae.config
    known = latents.new_tensor([config.latents_mean, config.latents_std])
    mean, std = known[..., None, None]  # [C, 1, 1] each
    return packed(pipe, (latents - mean) / std)


_PIPELINES = """
QwenImagePipeline QwenImageImg2ImgPipeline QwenImageInpaintPipeline QwenImageControlNetPipeline
QwenImageControlNetInpaintPipeline QwenImageEditPipeline QwenImageEditInpaintPipeline
QwenImageEditPlusPipeline
"""

FAMILY = Family(
    name="Qwen-Image",
    denoisers=("QwenImageTransformer2DModel",),
    layers={"transformer_blocks.*.attn": ("double", "joint")},
    joined="text first",
    grid=_grid_of_shapes,
    timestep_unit=1000.0,
    patch=2,  # cut by the pipelines
    readers={
        "QwenImage": read_qwen,
        "QwenImageEdit": read_edit,
        "QwenImageEditPlus": read_edit_plus,
        "QwenImage21": refuse_unknown,
    },
    # the images that the text encoder gets are variables of the running call
    text_options=("max_sequence_length", "prompt_image", "condition_images"),
    preset="joint",
    guidance=dict.fromkeys(_PIPELINES.split(), IN_TURN),
    image_latents=ImageLatents(
        pipelines={"QwenImagePipeline": {"true_cfg_scale": 1.0}}, encode=_encode, noise="flow"
    ),
    edits=Edits(pipelines=("QwenImagePipeline",), cross=0.3, self_=0.3),  # SD3's
)
