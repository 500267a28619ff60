"""The rows of the support matrix whose denoiser is a transformer."""

from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    FlowMatchHeunDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxImg2ImgPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from helpers.rows import Options, Row, Way, new_images, sized
from helpers.tiny_encoders import (
    TextProcessor,
    tiny_gemma_encoder,
    tiny_mistral3,
    tiny_qwen3,
    tiny_qwen_vl,
    tiny_t5_encoder,
)
from helpers.tiny_pipelines import make_scheduler, tiny, tiny_model, tiny_text_encoder
from helpers.tiny_tokenizers import tiny_gemma, tiny_mistral, tiny_qwen, tiny_t5, tiny_tokenizer

VAE = {
    "block_out_channels": (4, 8, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "norm_num_groups": 4,
    "latent_channels": 4,
}


def vae(**changes: Any) -> AutoencoderKL:
    torch.manual_seed(1)
    return AutoencoderKL(**{**VAE, **changes}).eval()


def clip(kind: Any = CLIPTextModelWithProjection) -> Any:
    return tiny_text_encoder(kind)


def sd3(
    kind: Any = StableDiffusion3Pipeline, *, t5: bool = True, scheduler: Any = None, **changes: Any
) -> Any:
    sizes = {"num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 8}
    sizes |= {"joint_attention_dim": 64, "caption_projection_dim": 32}
    sizes |= {"pooled_projection_dim": 64, "pos_embed_max_size": 32, "sample_size": 16}
    channels = {"in_channels": 4, "out_channels": 4, "patch_size": 2}
    model = tiny_model(SD3Transformer2DModel, **{**sizes, **channels, **changes})
    return tiny(
        kind,
        own_norms(model),
        vae(shift_factor=0.1),
        (clip(), tiny_tokenizer()),
        (clip(), tiny_tokenizer()),
        (tiny_t5_encoder(64), tiny_t5()) if t5 else (None, None),
        scheduler=scheduler,
    )


def flux(kind: Any = FluxPipeline) -> Any:
    sizes = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "patch_size": 1}
    model = tiny_model(FluxTransformer2DModel, in_channels=16, guidance_embeds=True, **sizes)
    return tiny(
        kind,
        model,
        vae(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        (clip(CLIPTextModel), tiny_tokenizer()),
        (tiny_t5_encoder(), tiny_t5()),
    )


def flux2(kind: Any = Flux2Pipeline) -> Any:
    """FLUX.2, whose text encoder is a Mistral, or its klein, of a Qwen and without guidance."""
    is_klein = kind is Flux2KleinPipeline
    sizes = {"joint_attention_dim": 48, "timestep_guidance_channels": 16, "patch_size": 1}
    sizes |= {"axes_dims_rope": (4, 4, 4, 4), "in_channels": 16}
    model = tiny_model(Flux2Transformer2DModel, guidance_embeds=not is_klein, **sizes)
    made = AutoencoderKLFlux2(**VAE).eval()
    if is_klein:
        return tiny(kind, model, made, (tiny_qwen3(28), tiny_qwen()))
    tokenizer = tiny_mistral()
    processor = TextProcessor(tokenizer, chat_template=tokenizer.chat_template)
    return tiny(kind, model, made, (tiny_mistral3(30), processor))


def klein() -> Any:
    return flux2(Flux2KleinPipeline)


def qwen_vae() -> AutoencoderKLQwenImage:
    made = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return made.eval()


def qwen_transformer() -> QwenImageTransformer2DModel:
    return tiny_model(QwenImageTransformer2DModel, patch_size=2, in_channels=16, out_channels=4)


def qwen_image() -> Any:
    return tiny(QwenImagePipeline, qwen_transformer(), qwen_vae(), (tiny_qwen_vl(), tiny_qwen()))


def own_norms(model: Any) -> Any:
    """Give the norms of queries and keys weights of their own, which a training would."""
    generator = torch.Generator().manual_seed(4)
    for name, weight in model.named_parameters():
        if ".norm_q." in name or ".norm_k." in name or ".norm_added_" in name:
            weight.data = 8 * torch.rand(weight.shape, generator=generator)
    return model


def pixart(kind: Any, **parts: Any) -> Any:
    model = tiny_model(
        PixArtTransformer2DModel,
        sample_size=16,
        patch_size=2,
        attention_head_dim=8,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
    )
    text = tiny_t5_encoder(), tiny_t5()
    return tiny(kind, model, vae(), text, scheduler=make_scheduler(), **parts)


def sana(kind: Any = SanaPipeline, *, scheduler: Any = None, **changes: Any) -> Any:
    sizes = {"attention_head_dim": 8, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8}
    sizes |= {"cross_attention_dim": 16, "caption_channels": 16, "sample_size": 16}
    sizes |= {"patch_size": 1, "in_channels": 4, "out_channels": 4}
    model = tiny_model(SanaTransformer2DModel, **sizes, **changes)
    made = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "ResBlock"),
        decoder_block_types=("ResBlock", "ResBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.4,
    )
    text = tiny_gemma_encoder(), tiny_gemma()
    return tiny(kind, own_norms(model), made.eval(), text, scheduler=scheduler)


def short(pipe: Any, way: Way) -> Options:
    """T5's columns are many; a few suffice here."""
    return {**sized(pipe, way), "max_sequence_length": 24}


def in_turn(pipe: Any, way: Way) -> Options:
    """True guidance, a second call of the model for the negative prompt."""
    return {
        "height": way.size[0],
        "width": way.size[1],
        "true_cfg_scale": 4.0 if way.guided else 1.0,
        "negative_prompt": ([" "] * way.prompts if way.prompts > 1 else " ")
        if way.guided
        else None,
    }


def flux_options(pipe: Any, way: Way) -> Options:
    return {**in_turn(pipe, way), "max_sequence_length": 24}


def from_image(pipe: Any, way: Way) -> Options:
    # half of the steps are run
    return {**short(pipe, way), "image": new_images(way, way.total), "num_inference_steps": 4}


def flux_from_image(pipe: Any, way: Way) -> Options:
    image = new_images(way, way.total)
    return {**flux_options(pipe, way), "image": image, "num_inference_steps": 4}


def kontext(pipe: Any, way: Way) -> Options:
    image = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    options = {**flux_options(pipe, way), "image": image, "_auto_resize": False}
    return {**options, "max_area": way.size[0] * way.size[1]}  # it fits sizes into an area


def without_negative(pipe: Any, way: Way) -> Options:
    length = 160 if isinstance(pipe, Flux2Pipeline) else 24  # its system message is long
    return {**sized(pipe, way), "max_sequence_length": length, "negative_prompt": None}


def unbinned(pipe: Any, way: Way) -> Options:
    return {**short(pipe, way), "use_resolution_binning": False}


def with_instruction(pipe: Any, way: Way) -> Options:
    return {**unbinned(pipe, way), "complex_human_instruction": ["Paint:"]}


SD3: Options = {"joint": "image first", "layers": 3, "unit": 16, "cell": 16}
SD3 |= {"processors": ("fused",)}
FLUX: Options = {"joint": "text first", "n_text": 24, "layers": 4, "unit": 16, "cell": 16}
FLUX |= {"prompt_rows": None, "processors": ("fused",)}
CROSS: Options = {"layers": 2, "unit": 16, "cell": 16}
CROSS |= {"processors": ("AttnProcessor", "TorchAttnProcessor", "fused")}
SANA: Options = {"layers": 2, "unit": 32, "cell": 2, "processors": ()}

TRANSFORMERS = (
    Row("Stable Diffusion 3", sd3, short, **SD3),
    Row("Stable Diffusion 3 without T5", lambda: sd3(t5=False), short, **SD3),
    Row(
        "Stable Diffusion 3.5 (dual attention, normed)",
        lambda: sd3(dual_attention_layers=(0, 1), qk_norm="rms_norm"),
        short,
        **{**SD3, "processors": ()},  # diffusers' fused processor does not know dual attention
    ),
    Row(
        "Stable Diffusion 3, second-order scheduler",
        lambda: sd3(scheduler=FlowMatchHeunDiscreteScheduler()),
        short,
        **SD3,
    ),
    Row(
        "Stable Diffusion 3, image to image",
        lambda: sd3(StableDiffusion3Img2ImgPipeline),
        from_image,
        **SD3,
    ),
    Row("FLUX.1", flux, flux_options, in_turn=True, **FLUX),
    Row(
        "FLUX.1, image to image",
        lambda: flux(FluxImg2ImgPipeline),
        flux_from_image,
        in_turn=True,
        **FLUX,
    ),
    Row("FLUX.1 Kontext", lambda: flux(FluxKontextPipeline), kontext, in_turn=True, **FLUX),
    Row("FLUX.2", flux2, without_negative, **{**FLUX, "n_text": 160}),
    Row("FLUX.2 klein", klein, without_negative, in_turn=True, **FLUX),
    Row("Qwen-Image", qwen_image, in_turn, in_turn=True, **{**FLUX, "n_text": None, "layers": 2}),
    Row("PixArt Alpha", lambda: pixart(PixArtAlphaPipeline), unbinned, **CROSS),
    Row("PixArt Sigma", lambda: pixart(PixArtSigmaPipeline), unbinned, **CROSS),
    Row("Sana", sana, with_instruction, **SANA),
    Row(
        "Sana (normed across heads)",
        lambda: sana(qk_norm="rms_norm_across_heads"),
        with_instruction,
        **SANA,
    ),
)
