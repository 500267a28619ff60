"""Values of a call's options, judged without a pipeline. No torch, so that the command line refuses
them at once."""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Real
from operator import index
from typing import Any

from ..errors import InvalidTypeError, InvalidValueError, OptionError, option_names, refuse
from .pipeline import Options

LARGEST_SEED = 2**63 - 1  # of a torch.Generator
LONGEST = 10_000  # characters; no text encoder here reads so many tokens
# The options that say how many images, or videos, are made of one prompt
EACH = ("num_images_per_prompt", "num_videos_per_prompt")
# The options of a pipeline's call that a run sets itself
OURS = {"generator", "output_type", "prompt_embeds", "return_dict"}
LARGEST_SIDE = 16_384  # pixels; four times what the largest models here make


def check_values(options: Options) -> None:
    """Refuse (ValueError) options that no pipeline can be given here: those that the run sets
    itself, a crop, numbers that are not finite, numbers of images or frames that are not whole and
    above 0, and texts as :func:`check_text` does."""
    if taken := sorted(OURS & set(options)):
        seeds = ", or pass `seed` for the noise" if "generator" in taken else ""
        advice = f"Use `capture()` around the pipeline{seeds}."
        text = f"{option_names(taken)} cannot be chosen here. {advice}"
        raise InvalidValueError(text)
    refuse_crop(options)
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise refuse(name, value, "a finite number")
        for text in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(text, str):
                check_text(text, name)
    for name in (*EACH, "num_frames"):
        if options.get(name) is not None and (whole(options[name]) or 0) < 1:
            raise refuse(name, options[name], "a whole number from 1")


def refuse_crop(options: Options) -> None:
    """Refuse (ValueError) a call that draws only the mask's surroundings, whose maps do not cover
    the image."""
    if options.get("padding_mask_crop") is not None:
        text = (
            "only a crop of the image is drawn, so its maps would not fit the image. Crop the "
            "image and the mask yourself, and leave it out."
        )
        raise OptionError("padding_mask_crop", options["padding_mask_crop"], text)


def check_side(side: str, value: object, unit: int) -> None:
    """Refuse a width or height that is not a multiple of a model's ``unit`` in pixels."""
    given = whole(value)
    if given is None:
        raise refuse(side, value, "a whole number of pixels")
    if given > LARGEST_SIDE:
        raise refuse(side, value, f"a multiple of {unit} pixels, at most {LARGEST_SIDE:,}")
    if given < unit or given % unit:
        # The two sizes to choose from, for the message.
        lower = max(unit, given // unit * unit)
        text = (
            f"this model makes sizes that are a multiple of {unit} pixels. The nearest are "
            f"{lower} and {lower + unit}."
        )
        raise OptionError(side, given, text)


def no_videos(frames: object, kind: str) -> OptionError:
    """Return the error for a number of frames that was asked of a pipeline for images."""
    return OptionError("num_frames", frames, f"a {kind} makes images, not videos. Leave it out.")


def checked_seeds(seed: object, images: int = 1) -> list[int]:
    """Return the seeds of a run's images: ``seed`` and the numbers after it; raise ValueError if
    one of them is not a whole number from 0 to 2**63 - 1."""
    first = whole(seed)
    if first is None or not 0 <= first <= LARGEST_SEED - images + 1:
        most = "2**63 - 1" if images == 1 else f"2**63 - {images}, for {images} images"
        raise refuse("seed", seed, f"a whole number from 0 to {most}")
    return [first + i for i in range(images)]


def seeds_of(seed: int | Sequence[int] | None, images: int = 1) -> list[int]:
    """Return a run's seeds, one per image, from a user's value: None draws the first one at random,
    a list has each image's own (else ValueError), and for a number see :func:`checked_seeds`."""
    if seed is None:
        return checked_seeds(secrets.randbelow(2**32), images)
    is_no_list = isinstance(seed, (str, bytes, Mapping, Set))
    if whole(seed) is not None or is_no_list or not isinstance(seed, Iterable):
        return checked_seeds(seed, images)
    seeds = list[int]()
    for one in seed:
        seeds += checked_seeds(one)
    if len(seeds) != images:
        text = (
            f"this run makes {images} image(s). Pass one seed for each, or the first one's alone."
        )
        raise OptionError("seed", list(seed), text)
    return seeds


def checked_prompts(prompt: object) -> list[Any]:
    """Return one prompt, or several, as a list; raise TypeError for anything else."""
    if not isinstance(prompt, Sequence):
        kind = type(prompt).__name__
        raise InvalidTypeError(f"The prompt is of type {kind}. Pass a text, or a list of some.")
    return [prompt] if isinstance(prompt, str) else list(prompt)


def whole(value: Any) -> int | None:
    """Return a whole number of any kind, numpy's and torch's too, as an int. Return None for
    anything else, also for a bool or a list of one number."""
    is_truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    is_list = getattr(value, "ndim", None) not in (None, 0)
    try:
        return None if is_truth or is_list else index(value)
    except TypeError:
        return None


def number(value: Any) -> float | None:
    """Return a number of any kind, numpy's and torch's too, as a float; None for anything else,
    True and False too."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return number(value.item())
    counted = whole(value)
    return None if counted is None else float(counted)


def checked_whole(name: str, value: object, least: int = 1) -> int:
    """Return a whole number from ``least``; raise ValueError for anything else."""
    found = whole(value)
    if found is None or found < least:
        raise refuse(name, value, f"a whole number from {least}")
    return found


def checked_part(name: str, value: object) -> float:
    """Return a number from 0 to 1; raise ValueError for anything else."""
    found = number(value)
    if found is None or not 0 <= found <= 1:
        raise refuse(name, value, "a number from 0 to 1")
    return found


def checked_truth(name: str, value: object) -> bool:
    """Return True or False; raise ValueError for anything else."""
    if not isinstance(value, bool):
        raise refuse(name, value, (True, False))
    return value


def check_text(text: str, name: str) -> None:
    """Refuse (ValueError) a text of over :data:`LONGEST` characters, which no encoder reads, or one
    that is not valid Unicode: bytes that are not UTF-8, as the command line passes them on, or lone
    surrogates."""
    if len(text) > LONGEST:
        raise InvalidValueError(
            f"The {name} has {len(text):,} characters. Write at most {LONGEST:,}; text encoders "
            "read 77 to some 1,000 tokens."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValueError(
            f"The {name} is not UTF-8: its character {error.start + 1} is "
            f"{text[error.start]!r}. Write it as UTF-8."
        ) from None
