"""Further rows of the support matrix with cross-attention."""

from importlib.util import find_spec
from typing import Any

import torch
from diffusers import (
    EulerDiscreteScheduler,
    Kandinsky5T2IPipeline,
    Kandinsky5Transformer3DModel,
    KolorsImg2ImgPipeline,
    KolorsPipeline,
    PixArtSigmaPAGPipeline,
    SanaSprintPipeline,
    SCMScheduler,
)
from transformers import CLIPTextModel

from helpers.rows import Options, Row, Way, middle_third, new_images, sized
from helpers.tiny_encoders import tiny_qwen_vl
from helpers.tiny_pipelines import make_unet, tiny, tiny_model
from helpers.tiny_processors import tiny_qwen_processor
from helpers.tiny_tokenizers import tiny_tokenizer
from helpers.transformer_rows import (
    SANA,
    clip,
    pixart,
    sana,
    unbinned,
    vae,
    with_instruction,
)


def sprint() -> Any:
    return sana(SanaSprintPipeline, scheduler=SCMScheduler(), guidance_embeds=True)


def without_negative(pipe: Any, way: Way) -> Options:
    return {**with_instruction(pipe, way), "negative_prompt": None}


def kolors(kind: Any = KolorsPipeline) -> Any:
    from helpers.tiny_chatglm import tiny_chatglm, tiny_chatglm_tokenizer

    unet = make_unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
        encoder_hid_dim=32,
        encoder_hid_dim_type="text_proj",
    )
    text = tiny_chatglm(), tiny_chatglm_tokenizer()
    return tiny(kind, unet, vae(), text, scheduler=EulerDiscreteScheduler())


def from_image(pipe: Any, way: Way) -> Options:
    # half of the steps are run
    options = {**sized(pipe, way), "image": new_images(way, way.total), "num_inference_steps": 4}
    return {name: value for name, value in options.items() if name not in ("height", "width")}


def kandinsky5(kind: Any = Kandinsky5T2IPipeline, vae: Any = vae, **changes: Any) -> Any:
    sizes = {"model_dim": 24, "ff_dim": 16, "time_dim": 16, "axes_dims": (4, 4, 4)}
    sizes |= {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 32}
    sizes |= {"num_text_blocks": 1, "num_visual_blocks": 2}
    model = tiny_model(Kandinsky5Transformer3DModel, **sizes, **changes)
    for name, weight in model.named_parameters():
        if "modulation" in name or "_norm.weight" in name:  # zeros and ones as they are made
            torch.nn.init.normal_(weight)
    processor = tiny_qwen_processor()
    qwen = tiny_qwen_vl(processor.tokenizer), processor
    return tiny(kind, model, vae(), qwen, (clip(CLIPTextModel), tiny_tokenizer()))


def of_resolution(pipe: Any, way: Way) -> Options:
    """The pipeline takes sizes of its list only, and some parts of its model stay in float32."""
    pipe.resolutions = [way.size[::-1]]
    for name, module in getattr(pipe, "transformer", torch.nn.Module()).named_modules():
        if any(part in name for part in Kandinsky5Transformer3DModel._keep_in_fp32_modules):
            module.float()
    return sized(pipe, way)


KANDINSKY: Options = {"in_turn": True, "prompt_rows": None, "layers": 2, "unit": 16, "cell": 16}
KOLORS = (
    Row("Kolors", kolors, sized),
    Row("Kolors, image to image", lambda: kolors(KolorsImg2ImgPipeline), from_image),
)
CROSS: tuple[Row, ...] = (
    Row(
        "PixArt Sigma, PAG",
        lambda: pixart(PixArtSigmaPAGPipeline, pag_applied_layers=["blocks.1"]),
        lambda pipe, way: {**unbinned(pipe, way), "pag_scale": 3.0},
        prompt_rows=middle_third,
        unguided_rows=lambda batch: range(batch // 2),
        layers=2,
        unit=16,
        cell=16,
        processors=(),
    ),
    Row("SanaSprint", sprint, without_negative, **{**SANA, "prompt_rows": None}),
    Row("Kandinsky 5", kandinsky5, of_resolution, processors=(), **KANDINSKY),
)
if find_spec("sentencepiece"):
    CROSS += KOLORS
