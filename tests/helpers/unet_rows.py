"""The rows of the support matrix whose denoiser is a UNet."""

from functools import partial
from typing import Any

import torch
from diffusers import ControlNetModel, DDIMScheduler, EulerDiscreteScheduler, HeunDiscreteScheduler

from helpers.rows import Options, Row, Way, first_third, from_image, middle_third, new_images, sized
from helpers.tiny_parts import SMALL_UNET
from helpers.tiny_pipelines import (
    by_default,
    make_pipeline,
    make_scheduler,
    make_sdxl_pipeline,
    make_small_unet,
    small_pipeline,
    tiny,
)


def sd2():
    """v-prediction, and heads that vary by level with one width, as SD 2.x has them."""
    scheduler = DDIMScheduler.from_config(make_scheduler().config, prediction_type="v_prediction")
    heads = {"attention_head_dim": (1, 2, 4, 4), "use_linear_projection": True}
    return make_pipeline(unet=heads, scheduler=scheduler)


def refiner():
    """With one text encoder, and five conditions."""
    widths = {"cross_attention_dim": 32, "projection_class_embeddings_input_dim": 5 * 8 + 32}
    return tiny(
        "StableDiffusionXLImg2ImgPipeline",
        unet=widths,
        text_encoder=None,
        tokenizer=None,
        requires_aesthetics_score=True,
    )


def controlnet(count: int):
    def make():
        unet = make_small_unet()
        torch.manual_seed(3)
        nets = [ControlNetModel.from_unet(unet, "rgb", (4, 8, 8, 8)).eval() for _ in range(count)]
        for net in nets:  # they begin as zeros, which would hide them
            for parameter in net.controlnet_mid_block.parameters():
                torch.nn.init.normal_(parameter)
        one_or_more = nets if count > 1 else nets[0]
        return tiny("StableDiffusionControlNetPipeline", unet=unet, controlnet=one_or_more)

    return make


def conditioned(count: int):
    def options(pipe: Any, way: Way) -> Options:
        image = new_images(way, way.prompts)
        return {**sized(pipe, way), "image": [image] * count if count > 1 else image}

    return options


def ip_adapter_weights(unet: Any, seed: int = 0) -> Options:
    """The weights of an IP-Adapter in the format that load_ip_adapter reads."""
    generator = torch.Generator().manual_seed(seed)
    width = unet.config.cross_attention_dim
    layers = {}
    number = 1
    for name in unet.attn_processors:
        if "attn2" in name:
            inner = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
            for part in ("to_k_ip", "to_v_ip"):
                layers[f"{number}.{part}.weight"] = torch.randn(inner, width, generator=generator)
            number += 2
    project = {
        "proj.weight": torch.randn(4 * width, 16, generator=generator),
        "proj.bias": torch.zeros(4 * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    return {"image_proj": project, "ip_adapter": layers}


def ip_adapter(count: int):
    def make():
        pipe = small_pipeline()
        weights = [ip_adapter_weights(pipe.unet, seed) for seed in range(count)]
        pipe.load_ip_adapter(
            weights, subfolder=[""] * count, weight_name=[""] * count, image_encoder_folder=None
        )
        return pipe

    return make


def with_image_prompts(count: int):
    def options(pipe: Any, way: Way) -> Options:
        generator = torch.Generator().manual_seed(1)
        number = 2 if way.guided else 1  # [negative, positive]
        embeds = [torch.randn(number, 2, 16, generator=generator) for _ in range(count)]
        return {**sized(pipe, way), "ip_adapter_image_embeds": [e.to(way.dtype) for e in embeds]}

    return options


def lora(state: str):
    def make():
        from peft import LoraConfig

        pipe = small_pipeline()
        torch.manual_seed(4)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        pipe.unet.add_adapter(config, "style")
        if state in ("fused", "unfused"):
            pipe.fuse_lora()
        if state == "unfused":
            pipe.unfuse_lora()
        return pipe

    return make


def learned_token():
    pipe = small_pipeline()
    torch.manual_seed(5)
    pipe.load_textual_inversion(torch.randn(3, 32), token="<cat-toy>")
    return pipe


def says_the_learned_token(pipe: Any, way: Way) -> Options:
    prompts = ["a red <cat-toy>", "<cat-toy> and dog"][: way.prompts]
    return {**sized(pipe, way), "prompt": prompts if way.prompts > 1 else prompts[0]}


def freeu():
    pipe = small_pipeline()
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    return pipe


animatediff = by_default("AnimateDiffPipeline")


def scheduled(kind: Any):
    return lambda: small_pipeline(scheduler=kind.from_config(make_scheduler().config))


def inpainting(pipe: Any, way: Way) -> Options:
    mask = torch.zeros(way.prompts, 1, *way.size)
    mask[..., : way.size[1] // 2] = 1
    return {**sized(pipe, way), "image": new_images(way, way.prompts), "mask_image": mask}


# fuse_qkv_projections of diffusers leaves a LoRA that is loaded out
APART = ("AttnProcessor", "sliced", "TorchAttnProcessor")
small = partial(Row, layers=4)

UNETS = (
    Row("Stable Diffusion 1.x", make_pipeline, sized),
    Row("Stable Diffusion 2.x (v-prediction)", sd2, sized),
    Row("SDXL", make_sdxl_pipeline, sized, layers=12),
    Row(
        "SDXL-Turbo",
        make_sdxl_pipeline,
        partial(sized, guidance_scale=0.0),
        prompt_rows=None,
        layers=12,
    ),
    # 0.3 of the steps are run
    Row("SDXL refiner", refiner, partial(from_image, num_inference_steps=8), layers=12),
    small(
        "LCM",
        lambda: tiny(
            "LatentConsistencyModelPipeline", unet={**SMALL_UNET, "time_cond_proj_dim": 32}
        ),
        partial(sized, negative_prompt=None),
        prompt_rows=None,
    ),
    small("image to image", lambda: small_pipeline("StableDiffusionImg2ImgPipeline"), from_image),
    small(
        "inpainting (9 channels)",
        lambda: small_pipeline("StableDiffusionInpaintPipeline", in_channels=9),
        inpainting,
    ),
    small(
        "InstructPix2Pix",
        lambda: small_pipeline("StableDiffusionInstructPix2PixPipeline", in_channels=8),
        from_image,
        prompt_rows=first_third,
    ),
    small(
        "PAG",
        lambda: small_pipeline("StableDiffusionPAGPipeline", pag_applied_layers=["mid"]),
        partial(sized, pag_scale=3.0),
        prompt_rows=middle_third,
        unguided_rows=lambda batch: range(batch // 2),
        processors=(),
    ),
    small("ControlNet", controlnet(1), conditioned(1)),
    small("ControlNet, two at once", controlnet(2), conditioned(2)),
    Row("T2I-Adapter", lambda: tiny("StableDiffusionAdapterPipeline"), conditioned(1), unit=64),
    small("IP-Adapter", ip_adapter(1), with_image_prompts(1), processors=()),
    small("IP-Adapter, two at once", ip_adapter(2), with_image_prompts(2), processors=()),
    small("LoRA", lora("loaded"), sized, processors=APART),
    small("LoRA, fused", lora("fused"), sized),
    small("LoRA, unfused", lora("unfused"), sized, processors=APART),
    small(
        "LoRA, scaled",
        lora("loaded"),
        partial(sized, cross_attention_kwargs={"scale": 0.5}),
        processors=APART,
    ),
    small("textual inversion", learned_token, says_the_learned_token),
    small("FreeU", freeu, sized),
    small(
        "AnimateDiff",
        animatediff,
        partial(sized, num_frames=3, decode_chunk_size=3),
        frames=3,
        frame_rows=3,
        images_option=None,
    ),
    small("Euler scheduler (fractional timesteps)", scheduled(EulerDiscreteScheduler), sized),
    small("Heun scheduler (second order)", scheduled(HeunDiscreteScheduler), sized),
)
