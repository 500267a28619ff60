"""Rows of the support matrix: further pipelines of UNets."""

from functools import partial
from typing import Any

import torch
from diffusers import ControlNetXSAdapter, DDIMInverseScheduler, DDPMScheduler

from helpers.rows import (
    Options,
    Row,
    Way,
    also_images,
    first_third,
    middle_third,
    new_images,
    sized,
)
from helpers.tiny_pipelines import (
    make_scheduler,
    make_sdxl_pipeline,
    make_sdxl_unet,
    make_small_unet,
    small_pipeline,
)

small = small_pipeline


def upscaler() -> Any:
    """It has the image in three of its channels, and a class for each level of noise."""
    return small(
        "StableDiffusionUpscalePipeline",
        vae={"scaling_factor": 0.08333},
        low_res_scheduler=DDPMScheduler(),
        in_channels=7,
        num_class_embeds=1000,
    )


def upscaled(_pipe: Any, way: Way) -> Options:
    """An image of a pixel for each cell of the latent."""
    image = new_images(way, way.prompts)[:, :, ::8, ::8]
    return {"image": image, "guidance_scale": 5.0 if way.guided else 1.0}


def with_depth() -> Any:
    return small("StableDiffusionLDM3DPipeline", vae={"in_channels": 6, "out_channels": 6})


def diffedit() -> Any:
    inverse = DDIMInverseScheduler.from_config(make_scheduler().config)
    return small("StableDiffusionDiffEditPipeline", inverse_scheduler=inverse)


def inside_a_mask(pipe: Any, way: Way) -> Options:
    """Latents of each step, as invert() gives them."""
    grid = [side // 8 for side in way.size]
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(way.prompts, 1, *grid)
    mask[..., : grid[1] // 2] = 1
    return {
        "mask_image": mask,
        "image_latents": torch.randn(way.prompts, 2, 4, *grid, generator=generator),
        "inpaint_strength": 1.0,
        "guidance_scale": 5.0 if way.guided else 1.0,
    }


def grounded() -> Any:
    """Its gates are closed without weights."""
    pipe = small("StableDiffusionGLIGENPipeline", attention_type="gated")
    for module in pipe.unet.modules():
        if hasattr(module, "alpha_attn"):
            module.alpha_attn.data.fill_(0.5)
            module.alpha_dense.data.fill_(0.5)
    return pipe


def in_a_box(pipe: Any, way: Way) -> Options:
    boxes = {"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.2, 0.6, 0.9]]}
    return {**sized(pipe, way), **boxes, "gligen_scheduled_sampling_beta": 0.5}


def adapter(unet: Any) -> ControlNetXSAdapter:
    torch.manual_seed(3)
    made = ControlNetXSAdapter.from_unet(
        unet,
        size_ratio=0.5,
        learn_time_embedding=True,
        time_embedding_mix=0.95,
        conditioning_embedding_out_channels=(2, 2, 2, 2),
        num_attention_heads=2,
    )
    for name, parameter in made.named_parameters():  # they begin as zeros, which would hide them
        if "_to_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made.eval()


def controlnet_xs() -> Any:
    unet = make_small_unet(layers_per_block=2)
    return small("StableDiffusionControlNetXSPipeline", unet=unet, controlnet=adapter(unet))


def controlnet_xs_of_sdxl() -> Any:
    unet = make_sdxl_unet()
    kind = "StableDiffusionXLControlNetXSPipeline"
    return make_sdxl_pipeline(kind, unet=unet, controlnet=adapter(unet))


conditioned = also_images(sized, "prompts")

FURTHER = (
    Row("upscaler", upscaler, upscaled, unit=64, layers=4),
    # LDM3D hands out no latents
    Row("LDM3D", with_depth, partial(sized, output_type="np"), layers=4),
    Row("DiffEdit", diffedit, inside_a_mask, layers=4),
    Row("GLIGEN", grounded, in_a_box, processors=(), layers=4),
    Row("ControlNet-XS", controlnet_xs, conditioned, processors=(), layers=6, unit=16),
    Row(
        "ControlNet-XS of SDXL",
        controlnet_xs_of_sdxl,
        conditioned,
        processors=(),
        layers=12,
        unit=16,
    ),
    Row(
        "SAG",
        # the pipeline takes the heads of all blocks to be as many
        lambda: small("StableDiffusionSAGPipeline", attention_head_dim=4),
        sized,
        twice=True,
        processors=("AttnProcessor",),
        layers=4,
    ),
    Row(
        "Semantic guidance",
        lambda: small("SemanticStableDiffusionPipeline"),
        # a chunk for each prompt that edits
        partial(sized, editing_prompt=["a blue dog"], edit_warmup_steps=0),
        prompt_rows=middle_third,
        layers=4,
    ),
    Row(
        "InstructPix2Pix of SDXL",
        lambda: make_sdxl_pipeline("StableDiffusionXLInstructPix2PixPipeline", in_channels=8),
        also_images(sized),
        prompt_rows=first_third,
        layers=12,
    ),
)
