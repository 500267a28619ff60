"""Rows of the support matrix: videos whose attention is joint."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers.guiders import ClassifierFreeGuidance

from helpers.rows import PROMPTS, Options, Row, Way, also_images
from helpers.tiny_pipelines import by_default, tiny
from helpers.video_rows import BATCHED, FRAMES, VIDEO, long_video, video

cogvideox = by_default("CogVideoXPipeline")
hunyuan_video = by_default("HunyuanVideoPipeline")
mochi = by_default("MochiPipeline")
# Two frames of the latent are one of the grid; three are filled up to four.
cogvideox15 = partial(cogvideox, patch_size_t=2, patch_bias=False)


def hunyuan_video15() -> Any:
    pipe = tiny("HunyuanVideo15Pipeline")
    pipe.vae.enable_slicing()  # in diffusers 0.42 it cannot code two videos at once
    return pipe


def templated_video(pipe: Any, way: Way) -> Options:
    """The pipeline's own template would be 500 tokens here, which spell it in letters."""
    guidance = {"true_cfg_scale": 5.0 if way.guided else 1.0, "guidance_scale": 6.0}
    template = {"template": "[INST]clip: {}[/INST]", "crop_start": 4}
    return video(pipe, way, **guidance, prompt_template=template)


def guided_video(pipe: Any, way: Way) -> Options:
    """Guidance is a part of the pipeline."""
    pipe.guider = ClassifierFreeGuidance(enabled=way.guided)
    return {"height": way.size[0], "width": way.size[1], "num_frames": FRAMES}


def quoting_video(pipe: Any, way: Way) -> Options:
    quoted = ['a "red" cat', PROMPTS[1]][: way.prompts]
    return {**guided_video(pipe, way), "prompt": quoted if way.prompts > 1 else quoted[0]}


def of_masks(options: Callable[[Any, Way], Options]) -> Callable[[Any, Way], list[int]]:
    """The tokens of each video's texts that the pipeline does not mask."""

    def lengths(pipe: Any, way: Way) -> list[int]:
        prompts = options(pipe, way).get("prompt", list(PROMPTS[: way.prompts]))
        with torch.no_grad():
            made = pipe.encode_prompt(prompts, batch_size=way.prompts)
        return [int(n) for n in made[1].sum(1) + made[3].sum(1)]

    return lengths


def of_own_mask(pipe: Any, way: Way) -> list[int]:
    """Of several videos of each prompt diffusers repeats the masks prompt by prompt, the text
    states video by video: pipeline_mochi.py, ``_get_t5_prompt_embeds``."""
    prompts = PROMPTS[: way.prompts]
    return [len(pipe.tokenizer(prompt)["input_ids"]) for prompt in prompts] * way.images


# its pipeline makes one video a prompt, whatever it is told
COG: Options = {**BATCHED, "joint": "text first", "images_option": None}
MOCHI: Options = {**BATCHED, "joint": "image first", "n_text": 12, "row_by_row": True}
HUNYUAN: Options = {**VIDEO, "in_turn": True, "joint": "image first", "n_text": 12}
HUNYUAN15: Options = {**HUNYUAN, "n_text": None, "images_option": None}

JOINT_VIDEOS = (
    Row("CogVideoX", cogvideox, video, **COG),
    Row("CogVideoX 1.5", cogvideox15, long_video, **COG),
    Row(
        "CogVideoX 1.5, from an image",
        partial(cogvideox15, "CogVideoXImageToVideoPipeline", in_channels=8, ofs_embed_dim=2),
        also_images(long_video, "prompts"),
        **COG,
    ),
    Row("HunyuanVideo", hunyuan_video, templated_video, **HUNYUAN),
    Row(
        "HunyuanVideo, SkyReels from an image",
        partial(tiny, "HunyuanSkyreelsImageToVideoPipeline", in_channels=8),
        also_images(templated_video),
        **HUNYUAN,
    ),
    Row(
        "HunyuanVideo 1.5",
        hunyuan_video15,
        guided_video,
        lengths=of_masks(guided_video),
        **HUNYUAN15,
    ),
    Row(
        "HunyuanVideo 1.5, quoted text",
        hunyuan_video15,
        quoting_video,
        lengths=of_masks(quoting_video),
        **HUNYUAN15,
    ),
    # two frames of a latent that is cut by six
    Row("Mochi", mochi, partial(video, num_frames=7), lengths=of_own_mask, **MOCHI),
)
