"""LTX-2: videos with sound, in two streams. The video stream has cross-attention to Gemma."""

import math
from dataclasses import replace

from ...errors import InvalidValueError
from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..encoders import TextCall, refuse_mixed_masks, refuse_rewriting, refuse_unknown, zero_filled
from ..family import NEGATIVE_FIRST, Family
from ..parts import Names
from ..pipeline import Given, Model


def read_ltx2(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Gemma, padded on the left. The connectors move the prompt to the front and append
    learned registers, which belong to no token and attract attention. Source: pipeline_ltx2.py,
    ``_get_gemma_prompt_embeds``; connectors.py, ``LTX2ConnectorTransformer1d.forward``."""
    pipe, length = call.pipe, call.length()
    how = "Call pipe.enhance_prompt(prompt, system_prompt) yourself"
    refuse_rewriting(call, "enable_prompt_enhancement", how)
    read = []
    for text in texts:
        source, options = Source.of(text).strip(), filled(length)
        padded = read_source(pipe.tokenizer, source, padding_side="left", **options)
        del options["padding"]
        bare = read_source(pipe.tokenizer, source, **options)
        read.append((padded, replace(bare, encoded=padded.encoded)))
    refuse_mixed_masks(call, "num_videos_per_prompt", (len(bare.tokens) for _, bare in read))
    if pipe.connectors.config.video_connector_num_learnable_registers is None:
        return [padded for padded, _ in read]  # such connectors leave all where it is
    return zero_filled([bare for _, bare in read], length)


def _grid(model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of packed latents ``[B, frames * rows * cols, C]``; raise ValueError if it is
    not a video of this size."""
    sizes = [given.get(name) for name in ("num_frames", "height", "width")]
    patches = model.config.patch_size_t, model.config.patch_size, model.config.patch_size
    grid = [(size or 0) // patch for size, patch in zip(sizes, patches, strict=True)]
    tokens = given["hidden_states"].shape[1]
    if math.prod(grid) != tokens:
        raise InvalidValueError(
            f"A {type(model).__name__} was called with {tokens} tokens of a video and num_frames, "
            f"height and width {sizes}, which are {math.prod(grid)}. With images or keyframes "
            "behind the video, or a part of it at a time, where each token lies is not known. "
            "LTX2Pipeline and LTX2ImageToVideoPipeline can be watched."
        )
    return tuple(grid)


_AUDIO = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")

FAMILY = Family(
    name="LTX-2",
    denoisers=("LTX2VideoTransformer3DModel",),
    layers={
        "transformer_blocks.*.attn1": ("block", "self"),
        "transformer_blocks.*.attn2": ("block", "cross"),
        **{f"transformer_blocks.*.{name}": ("block", "audio") for name in _AUDIO},
    },
    grid=_grid,
    video=True,
    fps=24,
    default_frames=121,
    names=Names(
        # of a video that begins with an image, the timesteps of this image's tokens are 0; sigma
        # is the step's. Source: pipeline_ltx2_image2video.py, __call__
        timestep=("sigma", "timestep"),
        # guidance compares with passes without some of the layers
        skips=("spatio_temporal_guidance_blocks", "isolate_modalities"),
    ),
    readers={
        "LTX2": refuse_unknown,
        "LTX2Pipeline": read_ltx2,
        "LTX2ImageToVideoPipeline": read_ltx2,
    },
    guidance=dict.fromkeys(("LTX2Pipeline", "LTX2ImageToVideoPipeline"), NEGATIVE_FIRST),
)
