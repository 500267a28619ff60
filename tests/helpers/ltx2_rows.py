"""Rows of the support matrix: LTX-2, videos with their sound."""

from functools import partial
from typing import Any

from diffusers import LTX2ImageToVideoPipeline
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

from helpers.newer import needs_argument
from helpers.rows import Options, Row, Way, also_images
from helpers.tiny_pipelines import tiny, tiny_model
from helpers.video_rows import BY_32, long_video

LENGTH = 16  # of the text, a multiple of the connectors' four registers
# What LTX-2.3 has and LTX-2.0 has not.
NEWER: Options = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
    "rope_type": "split",
}
NEWER_CONNECTORS: Options = {
    "audio_connector_attention_head_dim": 4,
    "per_modality_projections": True,
    "video_hidden_dim": 16,
    "audio_hidden_dim": 8,
    "proj_bias": True,
    "rope_type": "split",
}


def connectors(**changes: Any) -> LTX2TextConnectors:
    """Those of LTX-2.3."""
    needs_argument(LTX2TextConnectors.__init__, "per_modality_projections")
    return tiny_model(LTX2TextConnectors, **{**NEWER_CONNECTORS, **changes})


def ltx2(kind: Any = "LTX2Pipeline", *, newer: bool = False, **parts: Any) -> Any:
    if newer:
        parts = {"connectors": connectors(), **NEWER, **parts}
    return tiny(kind, **parts)


def video_and_sound(pipe: Any, way: Way) -> Options:
    """With guidance by the negative prompt alone."""
    scale = 5.0 if way.guided else 1.0
    scales = {"audio_guidance_scale": scale, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0}
    scales |= {"stg_scale": 0.0, "modality_scale": 1.0}
    return long_video(pipe, way, **{**scales, "max_sequence_length": LENGTH})


def alike_videos(pipe: Any, way: Way) -> Options:
    """Prompts of one length: of others the pipeline gives videos each other's masks."""
    prompts = ["a red cat", "a red sofa"][: way.prompts]
    own = {"prompt": prompts if way.prompts > 1 else prompts[0]}
    return {**video_and_sound(pipe, way), **own}


def from_first_frame(pipe: Any, way: Way) -> Options:
    needs_argument(LTX2ImageToVideoPipeline.__call__, "image_crf")
    return also_images(video_and_sound, image_crf=0)(pipe, way)


ONE_A_PROMPT: Options = {**BY_32, "images_option": None}

LTX2_VIDEOS = (
    Row("LTX-2", ltx2, alike_videos, **BY_32),
    Row("LTX-2.3", partial(ltx2, newer=True), video_and_sound, **ONE_A_PROMPT),
    Row(
        "LTX-2, from an image",
        partial(ltx2, "LTX2ImageToVideoPipeline"),
        from_first_frame,
        **ONE_A_PROMPT,
    ),
)
