"""Videos as one sequence: Wan 2.1 and 2.2, SkyReels V2, LTX-Video, LTX-2 and MiniMax-H3."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ...attention.joint_processor import Spans
from ...errors import InvalidTypeError, InvalidValueError, OptionError
from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..denoiser_call import Timestep, grid_of_places, unwrapped
from ..encode_prompt import read_each_encoded, read_encoded
from ..encoders import (
    TextCall,
    refuse_mixed_masks,
    refuse_rewriting,
    refuse_unknown,
    zero_filled,
)
from ..family import Family
from ..layers import SELF_THEN_CROSS
from ..parts import IN_TURN, NEGATIVE_FIRST, Names
from ..pipeline import Given, Model

# Of an image's tokens and the text's, diffusers takes so many, the last, for the text's
# (transformer_wan.py, WanAttnProcessor).
_TEXT_BESIDE_IMAGE = 512


def read_wan(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read UMT5, then zeros, which attract attention, since no mask hides them."""
    read = read_encoded(call, texts)
    _check_image(call, len(read[0].tokens))
    return read


def _check_image(call: TextCall, length: int) -> None:
    """Refuse videos from an image that would fail (texts of another length than diffusers expects,
    several videos per prompt) or be that image alone."""
    pipe = call.pipe
    kind = type(pipe).__name__
    transformer = getattr(pipe, "transformer", None)
    if transformer is not None and _attends_to_image(transformer):
        if length != _TEXT_BESIDE_IMAGE:
            raise OptionError("max_sequence_length", length, _advice(transformer))
        videos = call.options.get("num_videos_per_prompt") or 1
        if videos > 1:
            text = (
                f"a {kind} gives the image to the first video of a prompt alone, and fails. Pass "
                "the prompt once per video."
            )
            raise OptionError("num_videos_per_prompt", videos, text)
    frames = call.options.get("num_frames")
    from_image = call.options.get("image") is not None
    if frames == 1 and from_image and getattr(pipe.config, "expand_timesteps", False):
        text = (
            f"a {kind} of this model gives back the image as the first frame. Pass "
            f"{1 + pipe.vae_scale_factor_temporal}, for example."
        )
        raise OptionError("num_frames", frames, text)


def _attends_to_image(model: Model) -> bool:
    return getattr(model.config, "added_kv_proj_dim", None) is not None


def _advice(model: Model) -> str:
    return (
        f"the layers of this {type(unwrapped(model)).__name__} attend to an image as well, and "
        f"diffusers takes the last {_TEXT_BESIDE_IMAGE} tokens for the text's. Pass "
        f"`max_sequence_length={_TEXT_BESIDE_IMAGE}`."
    )


class _Wan(Family):
    """Wan, with the image's columns after the text's where layers attend to both."""

    def image_columns(self, model: Model, given: Given, batch: int) -> int:
        image = given.get("encoder_hidden_states_image")
        if not _attends_to_image(model):
            if image is not None:
                raise InvalidValueError(
                    f"A {type(unwrapped(model)).__name__} without added_kv_proj_dim was given "
                    "encoder_hidden_states_image. Its layers attend to image and text in one "
                    "softmax, which no published model does, so its columns are not known."
                )
            return 0
        n_text = given[self.names.text].shape[1]
        if n_text != _TEXT_BESIDE_IMAGE:
            raise OptionError("max_sequence_length", n_text, _advice(model))
        # a first and a last image are separate rows, and each video has both
        return 0 if image is None else len(image) * image.shape[1] // batch


def _ltx_grid(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of a sequence of latents, from its sizes or its cells' positions ``[B, 3,
    N]``; raise ValueError if it begins with frames that the video continues from."""
    coordinates = given.get("video_coords")
    if coordinates is None:
        return given["num_frames"], given["height"], given["width"]
    advice = (
        "The cells of given frames that are not the first come before the video's: give the video "
        "its first frame alone."
    )
    return grid_of_places("video_coords", coordinates[0].float().T, advice)


def read_ltx2(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Gemma, padded on the left. The connectors move the prompt to the front and append
    learned registers, which belong to no token and attract attention. Source: pipeline_ltx2.py,
    ``_get_gemma_prompt_embeds``, which some diffusers have normalise the states; connectors.py,
    ``LTX2ConnectorTransformer1d.forward``."""
    pipe = call.pipe
    length = call.option("max_sequence_length")
    if call.columns is not None and "max_sequence_length" not in call.options:
        length = call.columns
    call.check(length, f"`max_sequence_length={length}`")
    how = "Call pipe.enhance_prompt(prompt, system_prompt) yourself"
    refuse_rewriting(call, "enable_prompt_enhancement", how)
    read = []
    for text in texts:
        source = Source.of(text).strip()
        options = filled(length)
        padded = read_source(pipe.tokenizer, source, padding_side="left", **options)
        del options["padding"]
        bare = read_source(pipe.tokenizer, source, **options)
        read.append((padded, replace(bare, encoded=padded.encoded)))
    refuse_mixed_masks(call, "num_videos_per_prompt", (len(bare.tokens) for _, bare in read))
    if pipe.connectors.config.video_connector_num_learnable_registers is None:
        return [padded for padded, _ in read]  # such connectors leave all where it is
    return zero_filled([bare for _, bare in read], length)


def _ltx2_grid(model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of packed latents ``[B, frames * rows * cols, C]``; raise ValueError if it is
    not a video of this size."""
    sizes = [given.get(name) for name in ("num_frames", "height", "width")]
    config = model.config
    patches = (config.patch_size_t, config.patch_size, config.patch_size)
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


def read_h3(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read prompts without images."""
    if any(call.options.get(name) is not None for name in ("image", "last_image", "references")):
        raise InvalidTypeError(
            f"The text encoder of a {type(call.pipe).__name__} reads images before the prompt, so "
            f"the columns of {texts[0]!r} depend on them. Pass labels, for example {{'cat': [2]}}, "
            "and columns=."
        )
    return read_each_encoded(call, texts)


def _h3_grid(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid from the (time, row, col) of the tokens after the sound, the video's."""
    places = given["position_ids"][int(given["audio_indices"].max()) + 1 :]
    return grid_of_places("position_ids", places)


def _h3_spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    """Return the spans: the text first, the generated video last."""
    length = len(given["position_ids"])
    text = given["encoder_hidden_states"]
    return [(slice(length - cells, length), slice(0, text.shape[1]))] * len(text)


class MiniMaxH3(Family):
    """MiniMax-H3, which gets one timestep for each noise level, and the index of each token's."""

    def timestep(self, _model: Model, given: Given) -> Timestep:
        last = given["timestep_indices"][-1:]  # of the generated video
        return Timestep(given["timestep"].index_select(0, last))


_AUDIO = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_LTX2 = ("LTX2Pipeline", "LTX2ImageToVideoPipeline")
_PIPELINES = ("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline")

FAMILIES = (
    # cross-attention to UMT5, and in Wan 2.1 to the image that a video begins with
    _Wan(
        name="Wan",
        denoisers=("WanTransformer3DModel",),
        layers={"blocks.*.attn1": ("block", "self"), "blocks.*.attn2": ("block", "cross")},
        video=True,
        fps=16,
        patch=2,
        readers={"Wan": read_wan},
        guidance=dict.fromkeys(_PIPELINES, IN_TURN),
    ),
    # Wan's blocks. Pipelines with diffusion forcing run the model on parts of a video: unlisted.
    _Wan(
        name="SkyReels V2",
        denoisers=("SkyReelsV2Transformer3DModel",),
        layers={"blocks.*.attn1": ("block", "self"), "blocks.*.attn2": ("block", "cross")},
        video=True,
        fps=24,
        patch=2,
        guidance={"SkyReelsV2Pipeline": IN_TURN},
    ),
    Family(
        name="LTX-Video",
        denoisers=("LTXVideoTransformer3DModel",),
        layers=SELF_THEN_CROSS,
        grid=_ltx_grid,
        grid_argument="video_coords",
        video=True,
        fps=25,
        patch=1,
        guidance=dict.fromkeys(
            ("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"), NEGATIVE_FIRST
        ),
    ),
    # Videos with sound, in two streams; the video's attends to Gemma.
    Family(
        name="LTX-2",
        denoisers=("LTX2VideoTransformer3DModel",),
        layers={
            **SELF_THEN_CROSS,
            **{f"transformer_blocks.*.{name}": ("block", "audio") for name in _AUDIO},
        },
        grid=_ltx2_grid,
        video=True,
        fps=24,
        default_frames=121,
        names=Names(
            # of a video that begins with an image, the timesteps of this image's tokens are 0;
            # sigma is the step's. Source: pipeline_ltx2_image2video.py, __call__
            timestep=("sigma", "timestep"),
            # guidance compares with passes without some of the layers
            skips=("spatio_temporal_guidance_blocks", "isolate_modalities"),
        ),
        readers={"LTX2": refuse_unknown, **dict.fromkeys(_LTX2, read_ltx2)},
        guidance=dict.fromkeys(_LTX2, NEGATIVE_FIRST),
    ),
    # Text, keyframes, sound and, last, the video.
    MiniMaxH3(
        name="MiniMax-H3",
        denoisers=("MiniMaxH3Transformer3DModel",),
        layers={
            "token_refiner.refiner_blocks.*.attn": ("block", "text"),
            "transformer_blocks.*.attn": ("single", "joint"),
        },
        joined="text first",
        grid=_h3_grid,
        grid_argument="position_ids",
        spans=_h3_spans,
        video=True,
        fps=24,
        default_frames=124,
        patch=2,
        readers={"MiniMaxH3": read_h3},
        guidance={"MiniMaxH3ModularPipeline": IN_TURN},
        text_options=("image", "last_image", "references"),
        reads_ids="model",
        preset="joint",
    ),
)
