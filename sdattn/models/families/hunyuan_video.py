"""HunyuanVideo (Kong et al. 2024): videos as one sequence, joint attention, the video first, with
Llama inside a template."""

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt
from ..attention_layer import DOUBLE_THEN_SINGLE
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall, in_template, read_inside, refuse_unknown
from ..family import IN_TURN, Family


def read_hunyuan_video(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Llama's tokens after the template's, padded; CLIP gives one pooled vector. Source:
    pipeline_hunyuan_video.py, ``_get_llama_prompt_embeds``."""
    tokenizer, template = call.pipe.tokenizer, call.option("prompt_template")
    crop = template.get("crop_start")
    if crop is None:
        # the pipeline takes the two last for the end of the turn and the place of the prompt
        crop = len(tokenizer(template["template"], padding="max_length")["input_ids"]) - 2
    sources = map(in_template(template["template"]), texts)
    return read_inside(tokenizer, sources, crop, **filled(crop + call.length()))


FAMILY = Family(
    name="HunyuanVideo",
    denoisers=("HunyuanVideoTransformer3DModel",),
    layers={
        "context_embedder.token_refiner.refiner_blocks.*.attn": ("block", "text"),
        **DOUBLE_THEN_SINGLE,
    },
    joined="image first",
    grid=grid_of_patches,
    video=True,
    fps=24,
    readers={
        "HunyuanVideo": read_hunyuan_video,
        "HunyuanSkyreels": read_hunyuan_video,
        "HunyuanVideoImageToVideo": refuse_unknown,  # Llava's, behind the tokens of an image
        "HunyuanVideoFramepack": refuse_unknown,
    },
    guidance=dict.fromkeys(
        ("HunyuanVideoPipeline", "HunyuanSkyreelsImageToVideoPipeline"), IN_TURN
    ),
    text_options=("max_sequence_length", "prompt_template"),
)
