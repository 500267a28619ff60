"""What a row of the support matrix is, and the ways to run it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

PROMPTS = ("a red cat", "dog, dog and cat")
NEGATIVE = "red dog"
Options = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One way of running a pipeline."""

    prompts: int = 1
    images: int = 1  # a prompt
    guided: bool = True
    size: tuple[int, int] = (128, 128)  # (height, width)
    dtype: torch.dtype = torch.float32
    autocast: bool = False  # to bfloat16, around the call

    @property
    def total(self) -> int:
        return self.prompts * self.images

    def __str__(self) -> str:
        guided = "guided" if self.guided else "unguided"
        dtype = str(self.dtype).removeprefix("torch.")
        cast = "-autocast" if self.autocast else ""
        return f"{self.prompts}x{self.images}-{guided}-{self.size[0]}x{self.size[1]}-{dtype}{cast}"


def second_half(batch: int) -> range:
    return range(batch // 2, batch)


def first_third(batch: int) -> range:
    return range(batch // 3)


def middle_third(batch: int) -> range:
    return range(batch // 3, 2 * batch // 3)


def every_row(batch: int) -> range:
    return range(batch)


@dataclass(frozen=True)
class Row:
    """A pipeline of the matrix.

    Attributes:
        name: as docs/models.md has it.
        make: builds it, with random weights.
        options: what its call is given beyond the prompt, for a way.
        prompt_rows: which rows of a guided batch belong to the prompt; None where the model is
            never run with guidance in its batch.
        joint: the order in a joint attention, "text first" or "image first"; None for
            cross-attention.
        n_text: columns of the text in a joint attention; None if all but the images'.
        references: tokens of images that follow the one that is made.
        lengths: tokens of each image's text, for a way, where a row has its own text behind or
            before the image and then nothing; None where all rows are alike.
        image_last: whether a row with a text of its own ends with the image, whatever comes before.
        between: tokens between such a text and the image.
        in_parts: whether the image's queries have a call of their own, to all keys.
        row_by_row: whether each row of the batch has a call of the kernel of its own, without the
            tokens that are no text of its.
        filled: in such a row the image is filled up to a multiple of so many tokens.
        text_last: whether a layer attends to an image before the text, whose columns come first.
        in_turn: whether guidance calls the model again, for the negative prompt.
        twice: whether the model is called again in each step, for neither prompt.
        processors: those that may be set in place of its own.
        layers: layers that see the text.
        unit: sizes are rounded up to a multiple of this many pixels.
        cell: pixels a side of the finest cell of the maps.
        frames: of the latent of a video; None of an image.
        frame_rows: how many rows of the batch an image has: the frames of a video where these are
            rows, one after the other.
        images_option: the option for several images a prompt; None where there is none.
        batched: whether the pipeline takes several prompts.
        casts: whether diffusers can run it under autocast.
        needs: the name of its class, where the oldest admitted diffusers lacks that.
    """

    name: str
    make: Callable[[], Any]
    options: Callable[[Any, Way], Options]
    prompt_rows: Callable[[int], range] | None = second_half
    unguided_rows: Callable[[int], range] = every_row
    joint: str | None = None
    n_text: int | None = None
    references: int = 0
    lengths: Callable[[Any, Way], list[int]] | None = None
    image_last: bool = False
    between: int = 0
    in_parts: bool = False
    row_by_row: bool = False
    filled: int = 1
    text_last: bool = False
    in_turn: bool = False
    twice: bool = False
    processors: tuple[str, ...] = ("AttnProcessor", "sliced", "TorchAttnProcessor", "fused")
    layers: int = 16
    unit: int = 8
    cell: int = 8
    frames: int | None = None
    frame_rows: int = 1
    images_option: str | None = "num_images_per_prompt"
    batched: bool = True
    casts: bool = True
    needs: str | None = None

    def __str__(self) -> str:
        return self.name

    def run(self, pipe: Any, way: Way, **more: Any) -> Any:
        """Return the latents; with ``output_type="np"`` images, ``[images, height, width, 3]``.

        What decodes them is no part of what is watched, and takes most of a run.
        """
        prompts = list(PROMPTS[: way.prompts]) if way.prompts > 1 else PROMPTS[0]
        negative = [NEGATIVE] * way.prompts if way.prompts > 1 else NEGATIVE
        options = {
            "prompt": prompts,
            "negative_prompt": negative,
            **({self.images_option: way.images} if self.images_option else {}),
            "num_inference_steps": 2,
            "output_type": "latent",
            "generator": torch.Generator().manual_seed(0),
            **self.options(pipe, way),
            **more,
        }
        given = {name: value for name, value in options.items() if value is not None}
        with torch.autocast("cpu", torch.bfloat16, enabled=way.autocast):
            return self.taken(pipe(**given))

    def taken(self, result: Any) -> Any:
        """Return the images of what a call gave."""
        return result[0]

    def fitted(self, way: Way) -> Way:
        """The way as this pipeline can go it."""
        height, width = (-(-side // self.unit) * self.unit for side in way.size)
        images = way.images if self.images_option else 1
        prompts = way.prompts if self.batched else 1
        return replace(way, size=(height, width), images=images, prompts=prompts)

    def grid(self, way: Way) -> tuple[int, ...]:
        """Of the finest cells: (rows, cols), of a video (frames, rows, cols)."""
        cells = tuple(side // self.cell for side in way.size)
        return cells if self.frames is None else (self.frames, *cells)

    def rows(self, way: Way, batch: int) -> range:
        """The rows of a batch that belong to the prompt."""
        if way.guided and self.prompt_rows is not None:
            return self.prompt_rows(batch)
        return self.unguided_rows(batch)


def sized(_pipe: Any, way: Way, **more: Any) -> Options:
    """Size and guidance, and further options."""
    size = {"height": way.size[0], "width": way.size[1]}
    return {**size, "guidance_scale": 5.0 if way.guided else 1.0, **more}


# T5's columns are many; a few suffice here.
short = partial(sized, max_sequence_length=24)


def in_turn(_pipe: Any, way: Way, **more: Any) -> Options:
    """Size, and true guidance: a second call of the model for the negative prompt."""
    negative = [" "] * way.prompts if way.prompts > 1 else " "
    return {
        "height": way.size[0],
        "width": way.size[1],
        "true_cfg_scale": 4.0 if way.guided else 1.0,
        "negative_prompt": negative if way.guided else None,
        **more,
    }


def new_images(way: Way, number: int) -> torch.Tensor:
    return torch.rand(number, 3, *way.size, generator=torch.Generator().manual_seed(1))


def from_image(_pipe: Any, way: Way, **more: Any) -> Options:
    """Options of pipelines that take the size from an image."""
    scale = 5.0 if way.guided else 1.0
    return {"image": new_images(way, way.total), "guidance_scale": scale, **more}


def also_images(
    options: Callable[[Any, Way], Options], number: str | int = "total", **more: Any
) -> Callable[[Any, Way], Options]:
    """Options with images: so many, or one for each image of the run, or one for each of its
    ``"prompts"``."""

    def both(pipe: Any, way: Way) -> Options:
        images = number if isinstance(number, int) else getattr(way, number)
        return {**options(pipe, way), "image": new_images(way, images), **more}

    return both
