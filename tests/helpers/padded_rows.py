"""The rows of the support matrix whose pipelines or models fill up each text in a way of their own:
to a multiple of some tokens, on the left, in the middle, or not at all."""

from typing import Any

import torch
from diffusers import (
    CogView4ControlPipeline,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanDiT2DModel,
    HunyuanDiTPipeline,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    ZImageControlNetModel,
    ZImageControlNetPipeline,
    ZImageImg2ImgPipeline,
    ZImageInpaintPipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)

from helpers.newer import newer
from helpers.rows import PROMPTS, Options, Row, Way, new_images, sized
from helpers.tiny_encoders import (
    tiny_bert,
    tiny_gemma_encoder,
    tiny_glm_encoder,
    tiny_qwen3,
    tiny_qwen3_vl,
    tiny_t5_encoder,
)
from helpers.tiny_pipelines import make_scheduler, tiny, tiny_model
from helpers.tiny_tokenizers import (
    tiny_bert_tokenizer,
    tiny_gemma,
    tiny_glm,
    tiny_qwen,
    tiny_t5,
)
from helpers.transformer_rows import own_norms, qwen_vae, vae


def z_image(kind: Any = ZImagePipeline, **parts: Any) -> Any:
    sizes = {"dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    sizes |= {"axes_dims": [4, 6, 6], "axes_lens": [512, 64, 64]}
    model = tiny_model(ZImageTransformer2DModel, in_channels=4, cap_feat_dim=16, **sizes)
    for name in ("x_pad_token", "cap_pad_token"):  # learned, so not zero
        torch.nn.init.normal_(getattr(model, name))
    made = vae(shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False)
    return tiny(kind, own_norms(model), made, (tiny_qwen3(), tiny_qwen()), **parts)


def z_image_controlled() -> Any:
    torch.manual_seed(5)
    control = ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=4,
        add_control_noise_refiner="control_noise_refiner",
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    return z_image(ZImageControlNetPipeline, controlnet=control.eval())


def controlled(pipe: Any, way: Way) -> Options:
    return {**above_nothing(pipe, way), "control_image": new_images(way, 1)}


LONG = "a turquoise cat on the sofa, a red dog"  # of more than 32 tokens in a chat


def prompts_of(way: Way) -> list[str]:
    return [PROMPTS[0], LONG][: way.prompts]


def above_nothing(pipe: Any, way: Way) -> Options:
    """Guidance is the prompt's weight beyond 1, and off at 0; two prompts of unlike lengths."""
    prompts: Options = {"prompt": prompts_of(way)} if way.prompts > 1 else {}
    return {**sized(pipe, way), "guidance_scale": 4.0 if way.guided else 0.0, **prompts}


def from_image(pipe: Any, way: Way) -> Options:
    return {**above_nothing(pipe, way), "image": new_images(way, way.total), "strength": 1.0}


def inpainted(pipe: Any, way: Way) -> Options:
    mask = torch.ones(way.total, 1, *way.size)
    return {**from_image(pipe, way), "mask_image": mask}


def chat_lengths(pipe: Any, way: Way) -> list[int]:
    """Of captions in a chat, filled up to multiples of 32 tokens."""
    lengths = []
    for prompt in prompts_of(way):
        chat = pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        n_tokens = len(pipe.tokenizer(chat)["input_ids"])
        lengths += [-(-n_tokens // 32) * 32] * way.images
    return lengths


def lumina2() -> Any:
    sizes = {"hidden_size": 32, "num_refiner_layers": 1, "num_kv_heads": 1, "multiple_of": 16}
    sizes |= {"sample_size": 16, "in_channels": 4, "cap_feat_dim": 16}
    axes = {"axes_dim_rope": (4, 4, 8), "axes_lens": (300, 64, 64)}
    model = own_norms(tiny_model(Lumina2Transformer2DModel, **sizes, **axes))
    text = tiny_gemma_encoder(), tiny_gemma()
    return tiny(Lumina2Pipeline, model, vae(shift_factor=0.1), text)


def with_system_prompt(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "system_prompt": "Paint"}


def system_lengths(pipe: Any, way: Way) -> list[int]:
    """The masks of several images of each prompt are repeated prompt by prompt, the text states
    image by image: pipeline_lumina2.py, ``encode_prompt``."""
    prompts = [f"Paint <Prompt Start> {prompt}" for prompt in PROMPTS[: way.prompts]]
    return [len(pipe.tokenizer(prompt)["input_ids"]) for prompt in prompts] * way.images


def cogview4(kind: Any = CogView4Pipeline, channels: int = 4) -> Any:
    sizes = {"attention_head_dim": 8, "text_embed_dim": 16, "time_embed_dim": 8}
    sizes |= {"condition_dim": 4, "sample_size": 16, "patch_size": 2, "rope_axes_dim": (16, 16)}
    model = tiny_model(CogView4Transformer2DModel, in_channels=channels, out_channels=4, **sizes)
    shifted = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return tiny(kind, model, vae(), (tiny_glm_encoder(), tiny_glm()), scheduler=shifted)


def cogview4_control(pipe: Any, way: Way) -> Options:
    torch.manual_seed(0)  # the pipeline draws the control's latents without its generator
    return {**sized(pipe, way), "control_image": new_images(way, 1)}


def krea2() -> Any:
    model = tiny_model(
        newer("Krea2Transformer2DModel"),
        in_channels=16,
        num_key_value_heads=1,
        intermediate_size=16,
        timestep_embed_dim=8,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
    )
    pipe = tiny(
        newer("Krea2Pipeline"),
        float_norms(own_norms(model)),
        qwen_vae(),
        (tiny_qwen3_vl(), tiny_qwen()),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        text_encoder_select_layers=(1, 2),
    )
    return counted(pipe)


def float_norms(model: Any) -> Any:
    """Its norms stay in float32 whatever it is cast to, as from_pretrained() leaves them."""
    for module in model.modules():
        if type(module).__name__ == "Krea2RMSNorm":
            module._apply = lambda *_, own=module: own
    return model


def counted(pipe: Any) -> Any:
    """Krea 2's template has other numbers of tokens with the tiny tokenizer."""
    prefix, suffix = pipe.prompt_template_encode_prefix, pipe.prompt_template_encode_suffix
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(prefix)["input_ids"])
    pipe.prompt_template_encode_num_suffix_tokens = len(pipe.tokenizer(suffix)["input_ids"])
    return pipe


def krea2_options(pipe: Any, way: Way) -> Options:
    options = {**sized(pipe, way), "guidance_scale": 4.0 if way.guided else 0.0}
    return {**options, "max_sequence_length": 40}


def hunyuan_dit() -> Any:
    sizes = {"attention_head_dim": 8, "hidden_size": 16, "sample_size": 16, "patch_size": 2}
    sizes |= {"cross_attention_dim": 16, "cross_attention_dim_t5": 32, "pooled_projection_dim": 16}
    gelu = {"activation_fn": "gelu-approximate"}
    model = tiny_model(HunyuanDiT2DModel, in_channels=4, **sizes, **gelu)
    return tiny(
        HunyuanDiTPipeline,
        own_norms(model),
        vae(),
        (tiny_bert(), tiny_bert_tokenizer()),
        (tiny_t5_encoder(), tiny_t5()),
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def unbinned(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "use_resolution_binning": False}


def first_half(batch: int) -> range:
    return range(batch // 2)


Z_IMAGE: Options = {"joint": "image first", "layers": 2, "unit": 16, "cell": 16, "filled": 32}
IN_TURN: Options = {"joint": "text first", "layers": 2, "unit": 16, "cell": 16}
IN_TURN |= {"in_turn": True, "prompt_rows": None, "processors": ()}
Z_IMAGE |= {"prompt_rows": first_half, "lengths": chat_lengths, "processors": ()}

PADDED = (
    Row("Z-Image", z_image, above_nothing, **Z_IMAGE),
    Row("Z-Image, image to image", lambda: z_image(ZImageImg2ImgPipeline), from_image, **Z_IMAGE),
    Row("Z-Image, inpainting", lambda: z_image(ZImageInpaintPipeline), inpainted, **Z_IMAGE),
    Row("Z-Image, ControlNet", z_image_controlled, controlled, **Z_IMAGE),
    Row("Lumina 2", lumina2, with_system_prompt, lengths=system_lengths, **IN_TURN),
    Row("CogView4", cogview4, sized, **IN_TURN),
    Row(
        "CogView4, control",
        lambda: cogview4(CogView4ControlPipeline, channels=8),
        cogview4_control,
        **IN_TURN,
    ),
    Row("Krea 2", krea2, krea2_options, n_text=40, needs="Krea2Pipeline", **IN_TURN),
    Row("HunyuanDiT", hunyuan_dit, unbinned, layers=2, unit=16, cell=16, processors=("fused",)),
)
