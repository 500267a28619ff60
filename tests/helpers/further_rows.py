"""Rows of the support matrix: further pipelines of UNets, with random weights."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetXSAdapter,
    DDIMInverseScheduler,
    DDPMScheduler,
    SemanticStableDiffusionPipeline,
    StableDiffusionControlNetXSPipeline,
    StableDiffusionDiffEditPipeline,
    StableDiffusionGLIGENPipeline,
    StableDiffusionLDM3DPipeline,
    StableDiffusionSAGPipeline,
    StableDiffusionUpscalePipeline,
    StableDiffusionXLControlNetXSPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
)

from helpers.rows import Options, Row, Way, first_third, middle_third, new_images, sized
from helpers.tiny_pipelines import (
    make_pipeline,
    make_scheduler,
    make_sdxl_pipeline,
    make_sdxl_unet,
    make_small_unet,
    make_vae,
    tiny,
    tiny_text_encoder,
)
from helpers.tiny_tokenizers import tiny_tokenizer


def small(kind: Any, unet: Any = None, **parts: Any) -> Any:
    return make_pipeline(kind, unet=unet or make_small_unet(), **parts)


def upscaler() -> Any:
    """It has the image in three of its channels, and a class for each level of noise."""
    vae = make_vae()
    vae.register_to_config(scaling_factor=0.08333)
    return tiny(
        StableDiffusionUpscalePipeline,
        make_small_unet(in_channels=7, num_class_embeds=1000),
        vae,
        (tiny_text_encoder(), tiny_tokenizer()),
        scheduler=make_scheduler(),
        low_res_scheduler=DDPMScheduler(),
    )


def upscaled(_pipe: Any, way: Way) -> Options:
    """An image of a pixel for each cell of the latent."""
    image = new_images(way, way.prompts)[:, :, ::8, ::8]
    return {"image": image, "guidance_scale": 5.0 if way.guided else 1.0}


def with_depth() -> Any:
    torch.manual_seed(1)
    sides = {"block_out_channels": (4, 8, 8, 8), "norm_num_groups": 4, "latent_channels": 4}
    sides |= {"down_block_types": ("DownEncoderBlock2D",) * 4}
    sides |= {"up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = AutoencoderKL(in_channels=6, out_channels=6, **sides).eval()
    return small(StableDiffusionLDM3DPipeline, vae=vae, image_encoder=None)


def decoded(pipe: Any, way: Way) -> Options:
    """LDM3D hands out no latents."""
    return {**sized(pipe, way), "output_type": "np"}


def diffedit() -> Any:
    return small(
        StableDiffusionDiffEditPipeline,
        inverse_scheduler=DDIMInverseScheduler.from_config(make_scheduler().config),
    )


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
    unet = make_small_unet(attention_type="gated")
    for module in unet.modules():
        if hasattr(module, "alpha_attn"):
            module.alpha_attn.data.fill_(0.5)
            module.alpha_dense.data.fill_(0.5)
    return small(StableDiffusionGLIGENPipeline, unet)


def in_a_box(pipe: Any, way: Way) -> Options:
    boxes = {"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.2, 0.6, 0.9]]}
    return {**sized(pipe, way), **boxes, "gligen_scheduled_sampling_beta": 0.5}


def adapter(unet: Any, heads: Any) -> ControlNetXSAdapter:
    torch.manual_seed(3)
    made = ControlNetXSAdapter.from_unet(
        unet,
        size_ratio=0.5,
        learn_time_embedding=True,
        time_embedding_mix=0.95,
        conditioning_embedding_out_channels=(2, 2, 2, 2),
        num_attention_heads=heads,
    )
    for name, parameter in made.named_parameters():  # they begin as zeros, which would hide them
        if "_to_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made.eval()


def controlnet_xs() -> Any:
    unet = make_small_unet(layers_per_block=2)
    return small(StableDiffusionControlNetXSPipeline, unet, controlnet=adapter(unet, 2))


def controlnet_xs_of_sdxl() -> Any:
    unet = make_sdxl_unet()
    parts = {"controlnet": adapter(unet, 2), "feature_extractor": None}
    return make_sdxl_pipeline(StableDiffusionXLControlNetXSPipeline, unet, **parts)


def conditioned(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "image": new_images(way, way.prompts)}


def self_attention() -> Any:
    """The pipeline takes the heads of all blocks to be as many."""
    return small(
        StableDiffusionSAGPipeline, make_small_unet(attention_head_dim=4), image_encoder=None
    )


def from_images(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "image": new_images(way, way.total)}


def edited(pipe: Any, way: Way) -> Options:
    """A chunk for each prompt that edits."""
    return {**sized(pipe, way), "editing_prompt": ["a blue dog"], "edit_warmup_steps": 0}


FEW: dict[str, Any] = {"layers": 4}

FURTHER = (
    Row("upscaler", upscaler, upscaled, unit=64, **FEW),
    Row("LDM3D", with_depth, decoded, **FEW),
    Row("DiffEdit", diffedit, inside_a_mask, **FEW),
    Row("GLIGEN", grounded, in_a_box, processors=(), **FEW),
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
        self_attention,
        sized,
        twice=True,
        processors=("AttnProcessor",),
        **FEW,
    ),
    Row(
        "Semantic guidance",
        lambda: small(SemanticStableDiffusionPipeline),
        edited,
        prompt_rows=middle_third,
        **FEW,
    ),
    Row(
        "InstructPix2Pix of SDXL",
        lambda: make_sdxl_pipeline(
            StableDiffusionXLInstructPix2PixPipeline, make_sdxl_unet(in_channels=8)
        ),
        from_images,
        prompt_rows=first_third,
        layers=12,
    ),
)
