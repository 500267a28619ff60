"""Rows of the support matrix: videos that begin with an image or a video, and those of Kandinsky 5,
with random weights."""

from typing import Any

import torch
from diffusers import (
    CogVideoXFunControlPipeline,
    CogVideoXVideoToVideoPipeline,
    Kandinsky5I2VPipeline,
    Kandinsky5T2VPipeline,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    WanVideoToVideoPipeline,
)

from helpers.cross_rows import KANDINSKY, kandinsky5, of_resolution
from helpers.joint_video_rows import COG, cogvideox, hunyuan_vae
from helpers.rows import Options, Row, Way, new_images
from helpers.video_rows import BATCHED, FRAMES, VIDEO, long_video, ltx, video, wan

LTX: dict[str, Any] = {**BATCHED, "unit": 32, "cell": 32}
WHOLE = {"strength": 1.0}  # so that all steps run


def given(way: Way) -> torch.Tensor:
    """A video for each prompt, ``[prompts, frames, 3, height, width]``."""
    frames = torch.Generator().manual_seed(1)
    return torch.rand(way.prompts, FRAMES, 3, *way.size, generator=frames)


def from_first_frame(pipe: Any, way: Way) -> Options:
    return {**long_video(pipe, way), "image": new_images(way, way.total)}


def with_condition(pipe: Any, way: Way) -> Options:
    """Its first frame, for all videos alike."""
    return {**long_video(pipe, way), "image": new_images(way, 1)}


def from_video(pipe: Any, way: Way) -> Options:
    options = {**video(pipe, way), "video": given(way), **WHOLE}
    return {name: value for name, value in options.items() if name != "num_frames"}


def controlled(pipe: Any, way: Way) -> Options:
    options = {**video(pipe, way), "control_video": given(way)}
    return {name: value for name, value in options.items() if name != "num_frames"}


def kandinsky_video(pipe: Any, way: Way) -> Options:
    """Its template is long, and longer in letters."""
    of_resolution(pipe, way)  # what it keeps in float32
    return {**video(pipe, way), "max_sequence_length": 1024}


def kandinsky_video_from_image(pipe: Any, way: Way) -> Options:
    """Five frames of a latent, the fewest with a number that is not NaN."""
    return {**kandinsky_video(pipe, way), "num_frames": 17, "image": new_images(way, 1)}


KANDINSKY_VIDEO: dict[str, Any] = {
    **KANDINSKY,
    "frames": 2,
    "images_option": None,
    "processors": (),
}

FROM_VIDEOS = (
    Row("LTX-Video, from an image", lambda: ltx(LTXImageToVideoPipeline), from_first_frame, **LTX),
    Row("LTX-Video, conditions", lambda: ltx(LTXConditionPipeline), with_condition, **LTX),
    Row(
        "Wan 2.1, from a video",
        lambda: wan(WanVideoToVideoPipeline),
        from_video,
        in_turn=True,
        **{
            **VIDEO,
            "images_option": None,
        },  # diffusers gives one video a prompt, whatever it is told
    ),
    Row(
        "CogVideoX, from a video",
        lambda: cogvideox(CogVideoXVideoToVideoPipeline),
        from_video,
        **COG,
    ),
    Row(
        "CogVideoX, control",
        lambda: cogvideox(CogVideoXFunControlPipeline, in_channels=8),
        controlled,
        **COG,
    ),
    Row(
        "Kandinsky 5, videos",
        lambda: kandinsky5(Kandinsky5T2VPipeline, hunyuan_vae),
        kandinsky_video,
        **KANDINSKY_VIDEO,
    ),
    Row(
        "Kandinsky 5, videos from an image",
        lambda: kandinsky5(Kandinsky5I2VPipeline, hunyuan_vae, visual_cond=True),
        kandinsky_video_from_image,
        batched=False,
        **{**KANDINSKY_VIDEO, "frames": 5},
    ),
)
