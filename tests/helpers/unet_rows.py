"""The rows of the support matrix whose denoiser is a UNet."""

from typing import Any

import torch
from diffusers import (
    AnimateDiffPipeline,
    ControlNetModel,
    DDIMScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    MotionAdapter,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionXLImg2ImgPipeline,
    T2IAdapter,
)
from transformers import CLIPTextModelWithProjection

from helpers.rows import Options, Row, Way, first_third, from_image, middle_third, new_images, sized
from helpers.tiny_pipelines import (
    make_pipeline,
    make_scheduler,
    make_sdxl_pipeline,
    make_sdxl_unet,
    make_small_unet,
    make_unet,
    make_vae,
    small_pipeline,
    tiny,
    tiny_text_encoder,
)
from helpers.tiny_tokenizers import tiny_tokenizer


def sd2():
    """v-prediction, and heads that vary by level with one width, as SD 2.x has them."""
    unet = make_unet(attention_head_dim=(1, 2, 4, 4), use_linear_projection=True)
    scheduler = DDIMScheduler.from_config(make_scheduler().config, prediction_type="v_prediction")
    return make_pipeline(unet=unet, scheduler=scheduler)


def refiner():
    return tiny(
        StableDiffusionXLImg2ImgPipeline,
        make_sdxl_unet(conditions=5, text_width=32),
        make_vae(),
        (None, None),
        (tiny_text_encoder(CLIPTextModelWithProjection), tiny_tokenizer()),
        scheduler=make_scheduler(),
        requires_aesthetics_score=True,
    )


def lcm():
    scheduler = LCMScheduler.from_config(make_scheduler().config)
    unet = make_small_unet(time_cond_proj_dim=32)
    return make_pipeline(LatentConsistencyModelPipeline, unet=unet, scheduler=scheduler)


def controlnet(count: int):
    def make():
        unet = make_small_unet()
        torch.manual_seed(3)
        nets = [ControlNetModel.from_unet(unet, "rgb", (4, 8, 8, 8)).eval() for _ in range(count)]
        for net in nets:  # they begin as zeros, which would hide them
            for parameter in net.controlnet_mid_block.parameters():
                torch.nn.init.normal_(parameter)
        one_or_more = nets if count > 1 else nets[0]
        return make_pipeline(StableDiffusionControlNetPipeline, unet=unet, controlnet=one_or_more)

    return make


def conditioned(count: int):
    def options(pipe: Any, way: Way) -> Options:
        image = new_images(way, way.prompts)
        return {**sized(pipe, way), "image": [image] * count if count > 1 else image}

    return options


def t2i_adapter():
    torch.manual_seed(3)
    adapter = T2IAdapter(
        in_channels=3, channels=(8, 16, 16, 16), num_res_blocks=2, downscale_factor=8
    ).eval()
    return make_pipeline(StableDiffusionAdapterPipeline, adapter=adapter)


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


def scaled_lora(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "cross_attention_kwargs": {"scale": 0.5}}


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


def animatediff():
    torch.manual_seed(6)
    adapter = MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
    )
    return tiny(
        AnimateDiffPipeline,
        make_small_unet(),
        make_vae(),
        (tiny_text_encoder(), tiny_tokenizer()),
        scheduler=make_scheduler(),
        motion_adapter=adapter,
    )


def scheduled(kind: Any):
    def make():
        return small_pipeline(scheduler=kind.from_config(make_scheduler().config))

    return make


def inpainting(pipe: Any, way: Way) -> Options:
    mask = torch.zeros(way.prompts, 1, *way.size)
    mask[..., : way.size[1] // 2] = 1
    return {**sized(pipe, way), "image": new_images(way, way.prompts), "mask_image": mask}


def pag():
    return small_pipeline(StableDiffusionPAGPipeline, pag_applied_layers=["mid"])


def lcm_options(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "negative_prompt": None}


def never_guided(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "guidance_scale": 0.0}


def frames(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "num_frames": 3, "decode_chunk_size": 3}


# fuse_qkv_projections of diffusers leaves a LoRA that is loaded out
APART = ("AttnProcessor", "sliced", "TorchAttnProcessor")

UNETS = (
    Row("Stable Diffusion 1.x", make_pipeline, sized),
    Row("Stable Diffusion 2.x (v-prediction)", sd2, sized),
    Row("SDXL", make_sdxl_pipeline, sized, layers=12),
    Row("SDXL-Turbo", make_sdxl_pipeline, never_guided, prompt_rows=None, layers=12),
    Row(
        "SDXL refiner",
        refiner,
        lambda pipe, way: {**from_image(pipe, way), "num_inference_steps": 8},  # 0.3 of them run
        layers=12,
    ),
    Row("LCM", lcm, lcm_options, prompt_rows=None, layers=4),
    Row(
        "image to image",
        lambda: small_pipeline(StableDiffusionImg2ImgPipeline),
        from_image,
        layers=4,
    ),
    Row(
        "inpainting (9 channels)",
        lambda: make_pipeline(StableDiffusionInpaintPipeline, unet=make_small_unet(in_channels=9)),
        inpainting,
        layers=4,
    ),
    Row(
        "InstructPix2Pix",
        lambda: make_pipeline(
            StableDiffusionInstructPix2PixPipeline, unet=make_small_unet(in_channels=8)
        ),
        from_image,
        prompt_rows=first_third,
        layers=4,
    ),
    Row(
        "PAG",
        pag,
        lambda pipe, way: {**sized(pipe, way), "pag_scale": 3.0},
        prompt_rows=middle_third,
        unguided_rows=lambda batch: range(batch // 2),
        processors=(),
        layers=4,
    ),
    Row("ControlNet", controlnet(1), conditioned(1), layers=4),
    Row("ControlNet, two at once", controlnet(2), conditioned(2), layers=4),
    Row("T2I-Adapter", t2i_adapter, conditioned(1), unit=64),
    Row("IP-Adapter", ip_adapter(1), with_image_prompts(1), processors=(), layers=4),
    Row("IP-Adapter, two at once", ip_adapter(2), with_image_prompts(2), processors=(), layers=4),
    Row("LoRA", lora("loaded"), sized, processors=APART, layers=4),
    Row("LoRA, fused", lora("fused"), sized, layers=4),
    Row("LoRA, unfused", lora("unfused"), sized, processors=APART, layers=4),
    Row("LoRA, scaled", lora("loaded"), scaled_lora, processors=APART, layers=4),
    Row("textual inversion", learned_token, says_the_learned_token, layers=4),
    Row("FreeU", freeu, sized, layers=4),
    Row("AnimateDiff", animatediff, frames, frames=3, frame_rows=3, images_option=None, layers=4),
    Row(
        "Euler scheduler (fractional timesteps)", scheduled(EulerDiscreteScheduler), sized, layers=4
    ),
    Row("Heun scheduler (second order)", scheduled(HeunDiscreteScheduler), sized, layers=4),
)
