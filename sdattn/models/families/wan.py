"""Wan 2.1 and 2.2: videos as one sequence, cross-attention to UMT5, and in Wan 2.1 to the image
that a video begins with."""

import sys

from ...errors import InvalidValueError, MissingPackageError, OptionError
from ...prompts.tokens import Prompt
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches, unwrapped
from ..encoders import TextCall, as_cleaned, read_then_zeros
from ..family import IN_TURN, Family
from ..pipeline import Given, Model

# Of an image's tokens and the text's, diffusers takes so many, the last, for the text's
# (transformer_wan.py, WanAttnProcessor).
_TEXT_BESIDE_IMAGE = 512


def read_wan(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read UMT5, then zeros, which attract attention, since no mask hides them. Source:
    pipeline_wan.py, ``prompt_clean`` and ``_get_t5_prompt_embeds``."""
    _check_image(call, call.length())
    return read_then_zeros(call, texts, _cleaned)


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


def _cleaned(call: TextCall, text: str) -> Source:
    """Return the prompt as the pipeline leaves it, if it only strips spaces at the ends."""
    names = [cls.__module__ for cls in type(call.pipe).__mro__]
    names += [f"{name.rpartition('.')[0]}.encoders" for name in names]  # in modular pipelines
    modules = [sys.modules[name] for name in names if name in sys.modules]
    clean = next(one.prompt_clean for one in modules if hasattr(one, "prompt_clean"))
    try:
        cleaned = clean(text)
    except NameError as error:  # all but text to video use ftfy without asking whether it is there
        raise MissingPackageError(
            f"A {type(call.pipe).__name__} cleans its prompts with ftfy, which is not installed. "
            "Install it: pip install 'sdattn[video]'"
        ) from error
    return as_cleaned(call, Source.of(text).strip(), cleaned, "prompt_clean")


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


_PIPELINES = ("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline")

FAMILIES = (
    _Wan(
        name="Wan",
        denoisers=("WanTransformer3DModel",),
        layers={"blocks.*.attn1": ("block", "self"), "blocks.*.attn2": ("block", "cross")},
        grid=grid_of_patches,
        video=True,
        fps=16,
        patch=2,
        readers={"Wan": read_wan},
        guidance=dict.fromkeys(_PIPELINES, IN_TURN),
    ),
)
