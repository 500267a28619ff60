from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..attention.core import grid_text
from ..errors import InvalidValueError, access_error, known_options, refuse
from ..models.values import whole
from .layermaps import fits, resize_maps
from .masks import mask_of, smooth
from .statistics import WordStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL import Image

    from ..files.images import AnyImage
    from .glow import Scale, Style

    Pixels = tuple[int, int] | AnyImage


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap:
    """Map of one word, phrase or token in one image. For numpy and torch, ``np.asarray(heatmap)``
    and ``torch.as_tensor(heatmap)``, it is the array of its map; ``heatmap - other`` is an array.

    Attributes:
        label: word, phrase or token shown, as written in the prompt.
        values: float32 ``[rows, cols]`` in cells of the finest attention read, row 0 at the top, >=
            0; ``[frames, rows, cols]`` with the latent's frames for a video. By default the share
            of a cell's attention that goes to the columns, in [0, 1]: a prompt's columns sum to 1
            in cross-attention, to less in joint attention, whose rest goes to the image; an image
            prompt's sum to 1 by themselves. Presets that sum give sums of shares; a knockout
            the change of the image.
        map: ``values``.
        columns: the token columns that it comes from.
        top: the highest value in a content word's map, see :attr:`sdattn.Heatmaps.top`, or None.
        frames: numbers, in a video's latent, of the frames kept; None for all.
        ends: the (lowest, highest) value of its own colour scale before it is dimmed, see
            :func:`sdattn.maps.glow.own_scale`; None for 0 and its peak.
    """

    label: str
    values: Tensor
    columns: tuple[int, ...]
    top: float | None = None
    frames: tuple[int, ...] | None = None
    ends: tuple[float, float] | None = None

    @property
    def map(self) -> Tensor:
        return self.values

    def __repr__(self) -> str:
        low, high = self.range
        return f"Heatmap({self.label!r}, {grid_text(self.values.shape)}, {low:.2g} to {high:.2g})"

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, cols) of the map in cells, or (frames, rows, cols)."""
        return tuple(self.values.shape)

    @property
    def range(self) -> tuple[float, float]:
        """(smallest, largest) value, in the unit of the values."""
        return float(self.values.min()), float(self.values.max())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the map for numpy, ``[(frames,) rows, cols]``, in its own memory by default."""
        values = self.map.detach().numpy()
        # numpy 1 takes no None for copy
        return np.asarray(values, dtype) if copy is None else np.array(values, dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        """Return the map for ``torch.as_tensor(heatmap)``, in its own memory and without its graph,
        which :attr:`values` has."""
        return self.values.detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()

    def __sub__(self, other: Any) -> Any:
        """Return the difference to another map, an array, a tensor or a number, ``[(frames,) rows,
        cols]``: an array, or a tensor if the other is one; likewise ``+``, ``*`` and ``/``."""
        return self._as(other) - other

    def __rsub__(self, other: Any) -> Any:
        return other - self._as(other)

    def __add__(self, other: Any) -> Any:
        return self._as(other) + other

    def __mul__(self, other: Any) -> Any:
        return self._as(other) * other

    def __truediv__(self, other: Any) -> Any:
        return self._as(other) / other

    __radd__ = __add__
    __rmul__ = __mul__

    def _as(self, other: object) -> Tensor | np.ndarray:
        return self.values if isinstance(other, Tensor) else np.asarray(self)

    def statistics(self) -> WordStatistics:
        """Return peak, mean, mass, centre, area and entropy; raise as that class does."""
        return WordStatistics.of(self.label, self.values, self.columns)

    def resize(self, size: Pixels) -> Tensor:
        """Return float32 ``[(frames,) height, width]`` at (height, width) pixels, or as large as an
        image of the run, bilinear."""
        return resize_maps(self.values[None], self.pixels(size))[0]

    def pixels(self, size: Pixels) -> tuple[int, int]:
        """Return the (height, width) that a size or an image is; raise ValueError for anything
        else, and for an image that is no such map's."""
        if isinstance(size, (tuple, list)):
            sides = [side for side in map(whole, size) if side is not None and side > 0]
            if len(sides) == len(size) == 2:
                height, width = sides
                self._refuse_swapped(height, width)
                return height, width
        elif size is not None and not isinstance(size, (int, float)):
            from ..files.images import as_image  # pillow is loaded only here
            from .render import check_proportions

            image = as_image(size)
            grid = self.values.shape[-2:]
            check_proportions(image, tuple(grid))
            return image.height, image.width
        raise refuse("size", size, "(height, width) in pixels, or the image")

    def _refuse_swapped(self, height: int, width: int) -> None:
        grid = tuple(self.values.shape[-2:])
        if fits((width, height), grid) and not fits((height, width), grid):
            text = f"(height, width), here {(width, height)}: the map has {grid_text(grid)} cells"
            raise refuse("size", (height, width), text)

    def mask(
        self,
        size: Pixels | None = None,
        threshold: float | Literal["otsu"] | None = None,
        *,
        quantile: float | None = None,
        largest: bool = False,
        sigma: float = 0.0,
    ) -> Tensor:
        """Return a mask of the cells where the map is high; raise ValueError for a value out of
        range, or both a threshold and a quantile.

        Args:
            size: (height, width) in pixels, or the image (default: the cells of :attr:`map`).
            threshold: share of the range from the lowest value to the highest, in [0, 1] (default
                0.5), or ``"otsu"``, which splits the values into the two classes that differ most.
            quantile: instead of a threshold, the share of the cells to leave out.
            largest: keep only the largest connected part.
            sigma: standard deviation, in cells, of a Gaussian blur applied first.

        Returns:
            bool ``[(frames,) height, width]``; all False for a flat map. A video's frames share one
            level; ``largest`` is applied to each.
        """
        values = smooth(self.values, sigma)
        if size is not None:
            values = resize_maps(values[None], self.pixels(size))[0]
        return mask_of(values, threshold, quantile=quantile, largest=largest)

    def frame(self, number: int) -> Heatmap:
        """Return the map of one frame of a video's latent, counted from 0, with the video's colour
        scale; raise ValueError for an image, or if the frame was not kept."""
        check_frame(len(self.values) if self.values.ndim == 3 else 0, number, repr(self))
        ends = self.ends or (0.0, self.peak)
        return replace(self, values=self.values[number], top=self.full, frames=None, ends=ends)

    def of_frames(self, number: int) -> Tensor:
        """Return the values for each of a video's ``number`` frames, float32 ``[number, rows,
        cols]``; raise ValueError for an image, for a number that no such latent makes (see
        :func:`latent_frames`), or if frames were not kept."""
        if self.values.ndim != 3:
            raise InvalidValueError(f"{self!r} shows an image, which has no frames.")
        if self.frames is not None:
            raise InvalidValueError(
                f"{self!r} has only frames {list(self.frames)} of the latent, too few to map "
                f"each of {number} video frames. Capture without frames=, or take "
                "heatmap.frame(0) and so on."
            )
        return self.values[latent_frames(len(self.values), number)]

    @property
    def peak(self) -> float:
        """The highest value, in the unit of the values."""
        return self.range[1]

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return float(self.values.mean())

    @known_options(colormap="cmap", opacity="alpha", stretch="scale")
    def overlay(
        self,
        image: AnyImage,
        *,
        caption: bool = True,
        cmap: str = "inferno",
        alpha: float = 0.85,
        scale: Scale = "own",
        style: Style = "heat",
    ) -> Image.Image:
        """Draw the map glowing over the run's image, dark and in grey; raise ValueError if they
        differ in proportions or an option cannot be.

        Args:
            image: a PIL image, an array, or a file's path.
            caption: write the label and the peak below, and enlarge a small image so that they can
                be read. Without, the result has the image's own size.
            cmap: name of a matplotlib colormap.
            alpha: opacity at the highest value, in [0, 1].
            scale: ``"own"``: the word's own, on which a weak word is darker than a strong one but
                seen; ``"shared"``: from 0 to ``top``, the same for all words of a prompt; or the
                (lowest, highest) value, such as :attr:`range`.
            style: ``"heat"``, or ``"spotlight"``: the image in its own colours where the word
                looked.

        :func:`sdattn.maps.glow.overlay` draws several words at once, each in its colour.
        """
        from ..files.images import as_image  # pillow is loaded only when something is drawn
        from .glow import overlay
        from .render import caption as captioned
        from .render import check_proportions, enlarge

        self._check_image("overlay(image)")
        base = as_image(image)
        check_proportions(base, self.shape)
        base = enlarge(base) if caption else base
        drawn = overlay(base, [self], scale=scale, style=style, cmap=cmap, alpha=alpha)
        return captioned(drawn, self.label, f"peak {self.peak:.2g}") if caption else drawn

    def scale(self, kind: Scale = "own") -> tuple[float, float]:
        """Return the (lowest, highest) value of a colour scale, as :meth:`overlay` takes it; a
        video's frames share it. Raise ValueError for any other."""
        ground, peak = self.ends or (0.0, self.peak)
        if kind == "own":
            from .glow import own_scale

            return own_scale(peak, self.full, ground)
        if kind == "shared":
            return ground, self.full
        if isinstance(kind, (tuple, list)) and len(kind) == 2:
            return float(kind[0]), float(kind[1])
        raise refuse("scale", kind, "'own', 'shared' or a (lowest, highest) value")

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the map with matplotlib, one colour per cell, its label above.

        Args:
            ax: axes to draw into (default: a new figure's).
            options: arguments of ``Axes.imshow`` (default: ``vmin=0, vmax=top``); over an image of
                (width, height) on the axes pass ``extent=(0, width, height, 0), alpha=0.7``.

        Returns:
            The axes. For a colour bar call ``ax.figure.colorbar(ax.images[-1])``.
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

    def save(self, path: str | Path) -> Path:
        """Write the map in colour, as a notebook shows it, with label and peak below; a video's
        frames are in a row. :meth:`overlay` draws it over the image. Return the path.

        Raises:
            ValueError: the name does not end in ``.png``, ``.jpg`` or ``.webp``; values that are
                not finite.
            OSError: the file cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
            raise refuse("path", str(path), "a file's name that ends in .png, .jpg or .webp")
        image = self._image()
        try:
            image.save(path)
        except OSError as error:
            raise access_error(error, path) from error
        return path

    def _repr_png_(self) -> bytes:
        from ..files.images import png

        return png(self._image())

    def _image(self) -> Image.Image:
        from .render import drawn  # pillow is loaded only when something is drawn

        values = self.map if self.values.ndim == 2 else torch.cat([*self.map], 1)
        return drawn(values.numpy(), self.label, self.scale())

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
    """Raise if there is no such frame; ``frames`` is 0 for an image."""
    if not 0 <= number < frames:
        there = f"{frames} frames, 0 to {frames - 1}" if frames else "no frames: it shows an image"
        raise InvalidValueError(f"Asked for frame {number} of {what}, which has {there}.")


def latent_frames(latent: int, frames: int) -> list[int]:
    """Return the latent frame, from 0, that each of a video's ``frames`` frames comes from.

    A VAE of videos codes the first frame alone and then an even number at a time (Wan,
    HunyuanVideo, CogVideoX four: 81 frames are 21 of the latent; Mochi six, LTX eight) or, if that
    does not fit, equally many always (Allegro four). CogVideoX 1.5 makes one latent frame of two
    and pads an odd latent at the beginning. Frames that are a batch map to themselves.

    >>> latent_frames(3, 9)
    [0, 1, 1, 1, 1, 2, 2, 2, 2]
    """
    each, rest = divmod(frames - 1, latent - 1) if 1 < latent <= frames else (0, 1)
    # what CogVideoX 1.5 was asked for if its latent is even: its video has three frames more
    is_shorter = frames == 8 * latent - 3
    if rest == 0 and (each % 2 == 0 or frames % latent) and not is_shorter:
        return [0, *(1 + frame // each for frame in range(frames - 1))]
    if not 1 <= latent <= frames or frames % latent or is_shorter:
        raise InvalidValueError(
            f"A video of {frames} frames has no latent of {latent} frames: the first stands for "
            "one frame, the others for equally many each. Pass this run's number of frames."
        )
    return [frame // (frames // latent) for frame in range(frames)]
