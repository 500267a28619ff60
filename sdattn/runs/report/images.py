"""Images, videos and colours inside a page."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

import numpy as np
from PIL import Image

from ...files.videos import Video
from ...maps import render
from ...maps.heatmap import latent_frames

COLORMAPS = (render.COLORMAP, "viridis", "cividis")  # all readable to colour-blind people
# Okabe and Ito 2008, "Color Universal Design": told apart by colour-blind people too
PIN_COLORS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
MOST_PINS = 3  # words of a page's first view
LARGEST = 420_000  # bytes of an image
LARGEST_VIDEO = 3_600_000  # bytes of all frames of a video
_TRIED = 6  # frames that tell how large a video is
_NEAR = 1.05  # how nearly they tell it
_SIDES = (1536, 768, 384)  # pixels of its longer side at most, the first that does it
_SMALL_SIDES = (256, 160)  # for a very long video
_KINDS: list[tuple[str, dict[str, int]]] = [
    ("png", {}),
    *(("webp", {"quality": quality, "method": 2}) for quality in (90, 75, 50, 25)),
]


def as_uri(image: Image.Image, largest: int = LARGEST) -> str:
    """Return an image as a data URI: PNG, or WebP and smaller if that exceeds ``largest`` bytes."""
    [uri] = as_uris([image], largest, _SIDES)
    return uri


def video_data(video: Video, latent: int) -> tuple[dict[str, object], str]:
    """Return a video's data for the script, and the data URI of its middle frame, which the page
    opens with.

    Args:
        video: frames and their rate.
        latent: number of frames that the maps have.

    Returns:
        ``frames``, a data URI each, "" for the middle frame; ``latent``, the maps' frame for each;
        ``rate``, frames per second; ``middle``, the number of the middle frame.
    """
    # all frames are compressed alike, or the video would flicker
    uris = as_uris(video, LARGEST_VIDEO, (*_SIDES, *_SMALL_SIDES))
    middle = uris[video.middle]
    uris[video.middle] = ""
    shown = latent_frames(latent, len(video))
    data = {"frames": uris, "latent": shown, "rate": video.rate, "middle": video.middle}
    return data, middle


def as_uris(images: Sequence[Image.Image], largest: int, sides: Sequence[int]) -> list[str]:
    """Return images as data URIs, all compressed alike: by the first way that needs at most
    ``largest`` bytes together, or by the smallest."""
    few = images[:: math.ceil(len(images) / _TRIED)]
    ways = [*product(sides, _KINDS)]
    for side, (kind, options) in ways:
        is_last = (side, (kind, options)) == ways[-1]
        # coding a whole video for each way that is too large would take long
        files = [_coded(image, side, kind, options) for image in few]
        if sum(map(len, files)) / len(few) * len(images) > _NEAR * largest and not is_last:
            continue
        if len(few) < len(images):
            files = [_coded(image, side, kind, options) for image in images]
        if sum(map(len, files)) <= largest:
            break
    return [f"data:image/{kind};base64,{base64.b64encode(file).decode()}" for file in files]


def _coded(image: Image.Image, side: int, kind: str, options: Mapping[str, int]) -> bytes:
    shown = image.copy()
    shown.thumbnail((side, side))
    buffer = io.BytesIO()
    shown.save(buffer, kind, **options)
    return buffer.getvalue()


@cache
def colour_tables() -> Mapping[str, str]:
    """Return 256 colours for each colour map, red, green and blue, as base64."""
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]
    tables = {name: render.colorize(ramp, (0.0, 1.0), name) for name in COLORMAPS}
    return {name: base64.b64encode(table.tobytes()).decode() for name, table in tables.items()}
