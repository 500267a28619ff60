"""HTML pages in one file: a template of this folder with its styles and script inside, and what
several pages show: a prompt in pieces, images, videos and colours.

A page loads nothing, and a content security policy in it holds the browser to that. Only our own
scripts run, whatever a prompt says: the policy names them by their hash.
"""

import base64
import hashlib
import io
import math
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from ...files.videos import Video
from ...maps import glow, render
from ...maps.heatmap import Heatmap, latent_frames
from ...prompts.tokens import Prompt

_HERE = Path(__file__).parent
MOST_CUT_OFF = 100  # words after the last one seen; the others are one piece
COLORMAPS = (render.COLORMAP, "viridis", "cividis")  # all readable to colour-blind people
MOST_PINS = 4  # words of a page's first view
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


def page(
    name: str,
    *,
    home: Path = _HERE,
    shared: Sequence[str] = (),
    further: Sequence[str] = (),
    images_from: str = "",
    **values: object,
) -> bytes:
    """Return a page as UTF-8 HTML.

    Args:
        name: template ``NAME.html``, with ``theme.css`` and ``theme.js``, then the files named in
            ``shared``, then ``NAME.css`` and ``NAME.js``.
        home: folder of the template, if it is another room's.
        shared: names of styles and scripts here that several pages share.
        further: names of styles and scripts here that come last.
        images: where images may come from besides the page itself, in the syntax of a content
            security policy.
        values: values for the template, which escapes them.
    """
    files = [*(_HERE / part for part in ("theme", *shared)), home / name]
    files += [_HERE / part for part in further]
    styles = (file.with_suffix(".css") for file in files)
    style = "\n".join(_read(file) for file in styles if file.is_file())
    script = "\n".join(_read(file.with_suffix(".js")) for file in files)
    policy = f"default-src 'none'; img-src data: {images_from}; style-src '{_hash(style)}'; "
    policy += f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    values |= {"style": style, "script": script, "policy": policy}
    html: str = _template(home, name).render(**values)
    return html.encode()


@cache
def _template(home: Path, name: str) -> Any:
    import jinja2  # only where a page is made

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader([home, _HERE]),
    )
    environment.filters["direction"] = direction
    return environment.get_template(f"{name}.html")


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


# A prompt in pieces


def direction(text: str) -> str:
    """Return "rtl" if the text's first letter is of a script written from the right, else "ltr".
    A browser's ``dir=auto`` skips the words of a prompt, each of which is isolated in a ``<bdi>``.
    """
    strong = (unicodedata.bidirectional(char) for char in text)
    first = next((kind for kind in strong if kind in {"L", "R", "AL"}), "L")
    return "ltr" if first == "L" else "rtl"


class Piece(NamedTuple):
    """A part of a prompt's text.

    Attributes:
        text: the text.
        number: number of its words' map, or None.
        cut: the text encoder never saw this part.
    """

    text: str
    number: int | None
    cut: bool


def pieces(prompt: Prompt, spans: Mapping[tuple[int, int], int]) -> list[Piece]:
    """Split the text at ``spans`` ((start, end) to a map's number) and at words that were cut
    off."""
    seen = max((i for i, word in enumerate(prompt.words) if word.columns), default=-1) + 1
    unseen = [word for word in prompt.words[: seen + MOST_CUT_OFF] if not word.columns]
    marks: list[tuple[int, int, int | None, bool]]
    marks = [(*span, number, False) for span, number in spans.items()]
    marks += [(word.start, word.end, None, True) for word in unseen]
    parts: list[Piece] = []
    at = 0
    for start, end, number, cut in sorted(marks, key=itemgetter(0)):
        parts.append(Piece(prompt.text[at:start], None, False))
        parts.append(Piece(prompt.text[start:end], number, cut))
        at = end
    parts.append(Piece(prompt.text[at:], None, len(prompt.words) > seen + MOST_CUT_OFF))
    return [part for part in parts if part.text]


def indices_by_span(prompt: Prompt, maps: Sequence[Heatmap]) -> dict[tuple[int, int], int]:
    """Map the (start, end) of words in a prompt to the number of their map.

    Leaves out maps whose words are not consecutive in the text or lie inside another map's words.
    """
    spans: dict[tuple[int, int], int] = {}
    at = 0
    for number in sorted(range(len(maps)), key=lambda i: maps[i].columns):
        columns = set(maps[number].columns)
        ends = ((first, _end(prompt, first, columns)) for first in range(at, len(prompt.words)))
        first, end = next(((first, end) for first, end in ends if end), (0, 0))
        if end:
            spans[prompt.words[first].start, prompt.words[end - 1].end] = number
            at = end
    return spans


def _end(prompt: Prompt, first: int, columns: set[int]) -> int:
    """Return the end of the words from ``first`` on that have exactly these columns, or 0."""
    covered: set[int] = set()
    for number, word in enumerate(prompt.words[first:], start=first + 1):
        if not word.columns or not columns.issuperset(word.columns):
            return 0
        covered.update(word.columns)
        if covered == columns:
            return number
    return 0


# Images, videos and colours


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
def look_data() -> Mapping[str, object]:
    """Return what :func:`sdattn.maps.glow.glow` knows of colours, for the script that draws as it
    does; a colour map is 256 colours, red, green and blue, as base64."""
    tables = {name: render.color_table(name).tobytes() for name in COLORMAPS}
    return {
        "colormaps": {name: base64.b64encode(table).decode() for name, table in tables.items()},
        "pins": glow.WORD_COLORS,
        "alpha": glow.OPACITY,
        "luma": glow.LUMA,
        "brightness": glow.BRIGHTNESS,
        "fade": glow.FADE,
        "outline": glow.OUTLINE,
    }
