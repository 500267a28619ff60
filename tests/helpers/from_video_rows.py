"""Rows of the support matrix: videos that begin with an image or a video, and those of Kandinsky
5."""

from functools import partial
from typing import Any

import torch

from helpers.cross_rows import KANDINSKY, of_resolution
from helpers.joint_video_rows import COG
from helpers.rows import Options, Row, Way, also_images
from helpers.tiny_pipelines import tiny
from helpers.video_rows import BY_32, FRAMES, VIDEO, long_video, video

with_condition = also_images(long_video, 1)  # its first frame, for all videos alike


def given(way: Way) -> torch.Tensor:
    """A video for each prompt, ``[prompts, frames, 3, height, width]``."""
    frames = torch.Generator().manual_seed(1)
    return torch.rand(way.prompts, FRAMES, 3, *way.size, generator=frames)


def from_video(pipe: Any, way: Way) -> Options:
    """With a strength at which all steps run."""
    return video(pipe, way, num_frames=None, video=given(way), strength=1.0)


def controlled(pipe: Any, way: Way) -> Options:
    return video(pipe, way, num_frames=None, control_video=given(way))


def kandinsky_video(pipe: Any, way: Way) -> Options:
    """Its template is long, and longer in letters."""
    of_resolution(pipe, way)  # what it keeps in float32
    return video(pipe, way, max_sequence_length=1024)


KANDINSKY_VIDEO: Options = {**KANDINSKY, "frames": 2, "images_option": None, "processors": ()}

FROM_VIDEOS = (
    Row(
        "LTX-Video, from an image",
        partial(tiny, "LTXImageToVideoPipeline"),
        also_images(long_video),
        **BY_32,
    ),
    Row("LTX-Video, conditions", partial(tiny, "LTXConditionPipeline"), with_condition, **BY_32),
    Row(
        "Wan 2.1, from a video",
        partial(tiny, "WanVideoToVideoPipeline"),
        from_video,
        in_turn=True,
        # diffusers gives one video a prompt, whatever it is told
        **{**VIDEO, "images_option": None},
    ),
    Row(
        "CogVideoX, from a video",
        partial(tiny, "CogVideoXVideoToVideoPipeline"),
        from_video,
        **COG,
    ),
    Row(
        "CogVideoX, control",
        partial(tiny, "CogVideoXFunControlPipeline", in_channels=8),
        controlled,
        **COG,
    ),
    Row(
        "Kandinsky 5, videos",
        partial(tiny, "Kandinsky5T2VPipeline"),
        kandinsky_video,
        **KANDINSKY_VIDEO,
    ),
    Row(
        "Kandinsky 5, videos from an image",
        partial(tiny, "Kandinsky5I2VPipeline", visual_cond=True),
        # five frames of a latent, the fewest with a number that is not NaN
        also_images(kandinsky_video, 1, num_frames=17),
        batched=False,
        **{**KANDINSKY_VIDEO, "frames": 5},
    ),
)
