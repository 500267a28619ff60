"""Where one word went in one image: as values, a mask, numbers, or in colour over it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..attention.core import grid_text
from ..errors import InvalidValueError
from ..models.crops import Crop
from .layermaps import resize_maps
from .laying import grid_of, inside, laid
from .masks import mask_of, smooth
from .statistics import WordStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL import Image


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap:
    """Where one word, phrase or token went in one image. For numpy it is the array of its map.

    Attributes:
        label: what it shows, as written in the prompt.
        values: float32 ``[rows, cols]`` in cells of the finest attention that was read, row 0 at
            the top, >= 0; of a video ``[frames, rows, cols]`` with those of its latent. In the
            default preset the share of a cell's attention that goes to the columns, in [0, 1]: the
            columns of a prompt sum to 1 in cross-attention, and to less in joint attention, where
            the rest goes to the image; those of an image prompt sum to 1 by themselves. In
            presets that sum over steps, heads or layers the sum of shares; in ``gramcol`` and
            ``imap`` z-scores among the words; of a knockout how much the image changed.
        map: the same as ``values``; of a crop the map of the whole image, in cells of about the
            same size, 0 outside the crop.
        columns: the token columns that it comes from.
        top: the highest value that a content word of the same prompt reaches, see
            :attr:`sdattn.Heatmaps.top`; None where that is not known.
        frames: of a video of which some frames were kept, their numbers in its latent; None for
            all.
        crop: the part of the image that was drawn, and that the cells of ``values`` cover;
            None for all of it. What lies outside has no attention: it is in no statistics, and 0 or
            False in a map, a mask or an overlay.
    """

    label: str
    values: Tensor
    columns: tuple[int, ...]
    top: float | None = None
    frames: tuple[int, ...] | None = None
    crop: Crop | None = None

    @property
    def map(self) -> Tensor:
        return self.values if self.crop is None else self._laid(self.values, None)

    def __repr__(self) -> str:
        low, high = self.range
        return f"Heatmap({self.label!r}, {grid_text(self.values.shape)}, {low:.2g} to {high:.2g})"

    @property
    def range(self) -> tuple[float, float]:
        """(smallest, largest) value, in the unit of the values: a share of the attention, a sum of
        shares, or a change of colour."""
        return float(self.values.min()), float(self.values.max())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The map for numpy, ``[(frames,) rows, cols]``, by default in its own memory."""
        values = self.map.detach().numpy()
        # numpy 1 takes no None for copy
        return np.asarray(values, dtype) if copy is None else np.array(values, dtype, copy=copy)

    def statistics(self) -> WordStatistics:
        """Peak, mean, mass, centre, area and entropy; raises ValueError as that class does."""
        found = WordStatistics.of(self.label, self.values, self.columns)
        return found if self.crop is None else found.within(self.crop.parts)

    def resize(self, size: tuple[int, int]) -> Tensor:
        """The values at ``size`` = (height, width) in pixels: float32 ``[(frames,) height,
        width]``, bilinear between cells."""
        return self._laid(self._seen(self.values, size), size)

    def _seen(self, values: Tensor, size: tuple[int, int] | None) -> Tensor:
        """Values at a size, where the map is of a crop the pixels in it alone; the cells as they
        are without a size."""
        if size is None:
            return values
        if min(size) < 1:
            raise InvalidValueError(f"Asked for a size of {size}; pass (height, width) in pixels.")
        if self.crop is not None:
            return inside(values, self.crop, size)
        return resize_maps(values[None], size)[0]

    def _laid(self, seen: Tensor, size: tuple[int, int] | None) -> Tensor:
        """What :meth:`_seen` gave, or a mask of it, as the whole image."""
        if self.crop is None:
            return seen
        if size is None:
            size = grid_of((seen.shape[-2], seen.shape[-1]), self.crop)
            seen = inside(seen.float(), self.crop, size, "nearest").to(seen.dtype)
        return laid(seen, self.crop, size)

    def mask(
        self,
        size: tuple[int, int] | None = None,
        threshold: float | Literal["otsu"] | None = None,
        *,
        quantile: float | None = None,
        largest: bool = False,
        sigma: float = 0.0,
    ) -> Tensor:
        """Where the map is high.

        Args:
            size: (height, width) in pixels; the cells of :attr:`map` by default.
            threshold: share of the range from the lowest value to the highest, in [0, 1], 0.5 by
                default; or ``"otsu"``, which parts the values into the two classes that differ
                most.
            quantile: in place of a threshold: the part of the cells that is left out.
            largest: only the largest connected part.
            sigma: blur the map first, by a Gaussian of so many of its cells.

        Returns:
            bool ``[(frames,) height, width]``; all False for a map of one value. The frames of a
            video have one level; ``largest`` is of each frame.

        Raises:
            ValueError: a threshold, quantile or sigma that cannot be, or more than one of the
                first two.
        """
        seen = self._seen(smooth(self.values, sigma), size)
        mask = mask_of(seen, threshold, quantile=quantile, largest=largest)
        return self._laid(mask, size)

    def frame(self, number: int) -> Heatmap:
        """That of one of the frames of a video's latent that were kept, counted from 0, on the
        scale of them all.

        Raises:
            ValueError: it is of an image, or there is no such frame.
        """
        check_frame(len(self.values) if self.values.ndim == 3 else 0, number, repr(self))
        return replace(self, values=self.values[number], top=self.full, frames=None)

    def of_frames(self, number: int) -> Tensor:
        """The values for each of a video's ``number`` frames: float32 ``[number, rows, cols]``, see
        :func:`latent_frames`.

        Raises:
            ValueError: it is of an image, no video of so many frames has such a latent, or not all
                frames of it were kept.
        """
        if self.values.ndim != 3:
            raise InvalidValueError(f"{self!r} is of an image, which has no frames.")
        if self.frames is not None:
            raise InvalidValueError(
                f"{self!r} has frames {list(self.frames)} of the latent alone, which do not say "
                f"where each of {number} frames comes from. Capture without frames=, or take "
                "heatmap.frame(0) and so on."
            )
        return self.values[latent_frames(len(self.values), number)]

    def overlay(self, image: Image.Image, **options: Any) -> Image.Image:
        """The map in colour over the image, see :func:`sdattn.maps.render.overlay`.

        All words of a prompt have one scale, from 0 to ``top``: where a word has little of the
        attention the image stays bare. ``stretch=True`` shows the shape of a weak map.
        """
        from .render import overlay  # pillow is loaded only when something is drawn

        self._check_image("overlay(image)")
        if not options.get("stretch") and options.get("scale") is None:
            options["scale"] = 0.0, self.full
        return overlay(image, self.values.numpy(), self.label, crop=self.crop, **options)

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the map with matplotlib, a colour a cell, its label above.

        Args:
            ax: to draw into; by default that of a new figure.
            options: of ``Axes.imshow``: ``vmin`` and ``vmax``, by default 0 and ``top``, so that
                the words of a prompt have one scale; over an image of (width, height) that the
                axes show already ``extent=(0, width, height, 0), alpha=0.7``.

        Returns:
            The axes. A colour bar is ``ax.figure.colorbar(ax.images[-1])``.
        """
        from .render import COLORMAP

        self._check_image("plot()")
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots()
        usual = {"cmap": COLORMAP, "interpolation": "nearest", "vmin": 0.0, "vmax": self.full}
        ax.imshow(np.asarray(self), **{**usual, **options})
        ax.set(xticks=[], yticks=[])
        ax.set_title(self.label, parse_math=False)
        return ax

    def _repr_png_(self) -> bytes:
        from .notebook import png

        # of a video its frames in a row
        values = self.map if self.values.ndim == 2 else torch.cat([*self.map], 1)
        return png(self.label, values.numpy(), self.full)

    def _check_image(self, asked: str) -> None:
        if self.values.ndim != 2:
            raise InvalidValueError(
                f"Asked {self!r} for {asked}, which draws one image. Take one of its frames, "
                "heatmap.frame(0)."
            )

    @property
    def full(self) -> float:
        """The value that is drawn at full strength: ``top``, or the map's own highest."""
        return self.range[1] if self.top is None else self.top


def check_frame(frames: int, number: int, what: str) -> None:
    """Refuse the number of a frame that something has not; ``frames`` is 0 of an image."""
    if not 0 <= number < frames:
        there = f"{frames} frames, 0 to {frames - 1}" if frames else "none: it is of an image"
        raise InvalidValueError(f"Asked for frame {number} of {what}, which has {there}.")


def latent_frames(latent: int, frames: int) -> list[int]:
    """Which frame of a latent each frame of a video comes from.

    A VAE of videos codes the first frame alone and then an even number at a time (Wan,
    HunyuanVideo, CogVideoX four: 81 frames are 21 of the latent; Mochi six, LTX eight); where the
    numbers do not fit that, as many each (Allegro four, CogVideoX of an even latent). CogVideoX 1.5
    makes one of two frames of its latent, and fills up an odd one at the beginning. Frames that are
    a batch are their own.

    Args:
        latent: frames of the latent.
        frames: of the video.

    Returns:
        ``frames`` numbers from 0 to ``latent - 1``, rising.

    Raises:
        ValueError: no video of so many frames has such a latent.

    >>> latent_frames(3, 9)
    [0, 1, 1, 1, 1, 2, 2, 2, 2]
    """
    each, rest = divmod(frames - 1, latent - 1) if 1 < latent <= frames else (0, 1)
    # what CogVideoX 1.5 was asked for where its latent is even: its video has three frames more
    is_shorter = frames == 8 * latent - 3
    if rest == 0 and (each % 2 == 0 or frames % latent) and not is_shorter:
        return [0, *(1 + frame // each for frame in range(frames - 1))]
    if not 1 <= latent <= frames or frames % latent or is_shorter:
        raise InvalidValueError(
            f"A video of {frames} frames has no latent of {latent}: the first of them stands for "
            "one frame, each other for as many as any. Pass the number of frames of this very run."
        )
    return [frame // (frames // latent) for frame in range(frames)]
