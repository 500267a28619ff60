"""Rows of the support matrix: films that begin with a picture or a film, and those of Kandinsky 5,
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
from helpers.film_rows import BATCHED, FILM, FRAMES, film, long_film, ltx, wan
from helpers.joint_film_rows import COG, cogvideox, hunyuan_vae
from helpers.rows import Options, Row, Way, new_images

LTX: dict[str, Any] = {**BATCHED, "unit": 32, "cell": 32}
WHOLE = {"strength": 1.0}  # so that all steps run


def given(way: Way) -> torch.Tensor:
    """A film for each prompt, ``[prompts, frames, 3, height, width]``."""
    frames = torch.Generator().manual_seed(1)
    return torch.rand(way.prompts, FRAMES, 3, *way.size, generator=frames)


def from_first_frame(pipe: Any, way: Way) -> Options:
    return {**long_film(pipe, way), "image": new_images(way, way.total)}


def with_condition(pipe: Any, way: Way) -> Options:
    """Its first frame, for all films alike."""
    return {**long_film(pipe, way), "image": new_images(way, 1)}


def from_film(pipe: Any, way: Way) -> Options:
    options = {**film(pipe, way), "video": given(way), **WHOLE}
    return {name: value for name, value in options.items() if name != "num_frames"}


def controlled(pipe: Any, way: Way) -> Options:
    options = {**film(pipe, way), "control_video": given(way)}
    return {name: value for name, value in options.items() if name != "num_frames"}


def kandinsky_film(pipe: Any, way: Way) -> Options:
    """Its template is long, and longer in letters."""
    of_resolution(pipe, way)  # what it keeps in float32
    return {**film(pipe, way), "max_sequence_length": 1024}


def kandinsky_film_from_picture(pipe: Any, way: Way) -> Options:
    """Five frames of a latent, the fewest with a number that is not NaN."""
    return {**kandinsky_film(pipe, way), "num_frames": 17, "image": new_images(way, 1)}


KANDINSKY_FILM: dict[str, Any] = {**KANDINSKY, "frames": 2, "images_option": None, "processors": ()}

FROM_VIDEOS = (
    Row("LTX-Video, from a picture", lambda: ltx(LTXImageToVideoPipeline), from_first_frame, **LTX),
    Row("LTX-Video, conditions", lambda: ltx(LTXConditionPipeline), with_condition, **LTX),
    Row(
        "Wan 2.1, from a film",
        lambda: wan(WanVideoToVideoPipeline),
        from_film,
        in_turn=True,
        **{**FILM, "images_option": None},  # diffusers gives one film a prompt, whatever it is told
    ),
    Row(
        "CogVideoX, from a film", lambda: cogvideox(CogVideoXVideoToVideoPipeline), from_film, **COG
    ),
    Row(
        "CogVideoX, control",
        lambda: cogvideox(CogVideoXFunControlPipeline, in_channels=8),
        controlled,
        **COG,
    ),
    Row(
        "Kandinsky 5, films",
        lambda: kandinsky5(Kandinsky5T2VPipeline, hunyuan_vae),
        kandinsky_film,
        **KANDINSKY_FILM,
    ),
    Row(
        "Kandinsky 5, films from a picture",
        lambda: kandinsky5(Kandinsky5I2VPipeline, hunyuan_vae, visual_cond=True),
        kandinsky_film_from_picture,
        batched=False,
        **{**KANDINSKY_FILM, "frames": 5},
    ),
)
