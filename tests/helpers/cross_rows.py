"""Further rows of the support matrix with cross-attention."""

from importlib.util import find_spec
from typing import Any

from diffusers import (
    EulerDiscreteScheduler,
    KolorsImg2ImgPipeline,
    KolorsPipeline,
    SanaSprintPipeline,
    SCMScheduler,
)

from helpers.rows import Options, Row, Way, pictures, sized
from helpers.tiny_pipelines import make_unet
from helpers.transformer_rows import SANA, quiet, sana, vae, with_instruction


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
    pipe = kind(
        vae=vae(),
        text_encoder=tiny_chatglm(),
        tokenizer=tiny_chatglm_tokenizer(),
        unet=unet,
        scheduler=EulerDiscreteScheduler(),
    )
    return quiet(pipe)


def from_picture(pipe: Any, way: Way) -> Options:
    # half of the steps are run
    options = {**sized(pipe, way), "image": pictures(way, way.total), "num_inference_steps": 4}
    return {name: value for name, value in options.items() if name not in ("height", "width")}


KOLORS = (
    Row("Kolors", kolors, sized),
    Row("Kolors, image to image", lambda: kolors(KolorsImg2ImgPipeline), from_picture),
)
CROSS = (Row("SanaSprint", sprint, without_negative, **{**SANA, "prompt_rows": None}),)
if find_spec("sentencepiece"):
    CROSS += KOLORS
