"""The rows of the support matrix whose pipelines or models fill up each text in a way of their own:
to a multiple of some tokens, on the left, in the middle, or not at all."""

from functools import partial
from typing import Any

import torch

from helpers.rows import PROMPTS, Options, Row, Way, also_images, new_images, sized
from helpers.tiny_pipelines import by_default, tiny
from helpers.transformer_rows import PATCHES

z_image = by_default("ZImagePipeline")
lumina2 = by_default("Lumina2Pipeline")
cogview4 = by_default("CogView4Pipeline")
hunyuan_dit = by_default("HunyuanDiTPipeline")
LONG = "a turquoise cat on the sofa, a red dog"  # of more than 32 tokens in a chat


def prompts_of(way: Way) -> list[str]:
    return [PROMPTS[0], LONG][: way.prompts]


def above_nothing(pipe: Any, way: Way) -> Options:
    """Guidance is the prompt's weight beyond 1, and off at 0; two prompts of unlike lengths."""
    prompts: Options = {"prompt": prompts_of(way)} if way.prompts > 1 else {}
    return sized(pipe, way, guidance_scale=4.0 if way.guided else 0.0, **prompts)


def controlled(pipe: Any, way: Way) -> Options:
    return {**above_nothing(pipe, way), "control_image": new_images(way, 1)}


z_from_image = also_images(above_nothing, strength=1.0)


def inpainted(pipe: Any, way: Way) -> Options:
    return {**z_from_image(pipe, way), "mask_image": torch.ones(way.total, 1, *way.size)}


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


def system_lengths(pipe: Any, way: Way) -> list[int]:
    """The masks of several images of each prompt are repeated prompt by prompt, the text states
    image by image: pipeline_lumina2.py, ``encode_prompt``."""
    prompts = [f"Paint <Prompt Start> {prompt}" for prompt in PROMPTS[: way.prompts]]
    return [len(pipe.tokenizer(prompt)["input_ids"]) for prompt in prompts] * way.images


def cogview4_control(pipe: Any, way: Way) -> Options:
    torch.manual_seed(0)  # the pipeline draws the control's latents without its generator
    return sized(pipe, way, control_image=new_images(way, 1))


def krea2(**changes: Any) -> Any:
    """Its norms stay in float32 whatever it is cast to, as from_pretrained() leaves them, and its
    template has other numbers of tokens with the tiny tokenizer."""
    pipe = tiny("Krea2Pipeline", **changes)
    for module in pipe.transformer.modules() if pipe.transformer else ():
        if type(module).__name__ == "Krea2RMSNorm":
            module._apply = lambda *_, own=module: own
    prefix, suffix = pipe.prompt_template_encode_prefix, pipe.prompt_template_encode_suffix
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(prefix)["input_ids"])
    pipe.prompt_template_encode_num_suffix_tokens = len(pipe.tokenizer(suffix)["input_ids"])
    return pipe


def krea2_options(pipe: Any, way: Way) -> Options:
    return {**sized(pipe, way), "guidance_scale": 4.0 if way.guided else 0.0, **LENGTH}


LENGTH = {"max_sequence_length": 40}
Z_IMAGE: Options = {**PATCHES, "joint": "image first", "layers": 2, "filled": 32}
Z_IMAGE |= {"lengths": chat_lengths, "processors": ()}
Z_IMAGE |= {"prompt_rows": lambda batch: range(batch // 2)}
IN_TURN: Options = {**PATCHES, "joint": "text first", "layers": 2}
IN_TURN |= {"in_turn": True, "prompt_rows": None, "processors": ()}

PADDED = (
    Row("Z-Image", z_image, above_nothing, **Z_IMAGE),
    Row("Z-Image, image to image", partial(tiny, "ZImageImg2ImgPipeline"), z_from_image, **Z_IMAGE),
    Row("Z-Image, inpainting", partial(tiny, "ZImageInpaintPipeline"), inpainted, **Z_IMAGE),
    Row(
        "Z-Image, ControlNet",
        partial(tiny, "ZImageControlNetPipeline"),
        controlled,
        casts=False,  # its control network writes float32 into a bfloat16 tensor
        **Z_IMAGE,
    ),
    Row(
        "Lumina 2",
        lumina2,
        partial(sized, system_prompt="Paint"),
        lengths=system_lengths,
        **IN_TURN,
    ),
    Row("CogView4", cogview4, sized, **IN_TURN),
    Row(
        "CogView4, control",
        partial(tiny, "CogView4ControlPipeline", in_channels=8),
        cogview4_control,
        **IN_TURN,
    ),
    Row("Krea 2", krea2, krea2_options, n_text=40, needs="Krea2Pipeline", **IN_TURN),
    Row(
        "HunyuanDiT",
        hunyuan_dit,
        partial(sized, use_resolution_binning=False),
        **PATCHES,
        layers=2,
        processors=("fused",),
    ),
)
