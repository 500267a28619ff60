"""Notebook output: stills that survive where scripts are removed, and pages in a frame."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape

from PIL import Image

from .glow import overlay
from .heatmap import Heatmap
from .render import colorize

_SIDE = 160  # pixels of a still's longer side


def stills(maps: Iterable[Heatmap], image: Image.Image | None = None) -> str:
    """Return maps in colour next to each other, each on its own scale; an ``image`` comes first,
    and the maps lie over it."""
    figures: list[tuple[Image.Image, str, str]] = [] if image is None else [(image, "", "")]
    for heatmap in maps:
        figures.append((_in_colour(heatmap, image), heatmap.label, f"peak {heatmap.peak:.2g}"))
    return figures_of(figures)


def video_stills(
    maps: Iterable[Heatmap], frames: Sequence[tuple[str, int, Image.Image | None]]
) -> str:
    """Return key frames of a video's maps, one row per word, each on its own scale; ``frames`` are
    (name, number, image), to lie over the images."""
    rows = [[(image, name, "") for name, _, image in frames if image is not None]]
    for heatmap in maps:
        row = []
        for name, at, image in frames:
            of_frame = heatmap.frame(at)
            note = f"{name}, peak {of_frame.peak:.2g}"
            row.append((_in_colour(of_frame, image), heatmap.label, note))
        rows.append(row)
    return "".join(figures_of(row) for row in rows if row)


def _in_colour(heatmap: Heatmap, image: Image.Image | None) -> Image.Image:
    if image is None:
        return Image.fromarray(colorize(heatmap.map.numpy(), heatmap.scale()))
    return overlay(_small(image), [heatmap])


def figures_of(parts: Iterable[tuple[Image.Image, str, str]]) -> str:
    """Return small images next to each other, each with an escaped label and note below."""
    figures = []
    for image, label, note in parts:
        small = _small(image)
        text = f'<bdi>{escape(label)}</bdi><br><span style="opacity:.7">{escape(note)}</span>'
        figures.append(
            f'<figure style="margin:0;max-width:{_SIDE}px">'
            f'<img src="{_data(small)}" alt="{escape(label)}" '
            f'width="{small.width}" height="{small.height}">'
            f'<figcaption style="font-size:12px;overflow-wrap:anywhere">{text}</figcaption>'
            "</figure>"
        )
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px">{"".join(figures)}</div>'


def whole(image: Image.Image, label: str) -> str:
    """Return an image in its own size, or as wide as there is room, with ``label`` as alt text."""
    width, height = image.size
    return (
        f'<img src="{_data(image)}" alt="{escape(label)}" width="{width}" height="{height}" '
        'style="max-width:100%;height:auto">'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts, escaped here; the first of each row is its header."""
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td><bdi>{escape(text)}</bdi></td>" for text in rest)
        body += f'<tr><th scope="row"><bdi>{escape(first)}</bdi></th>{cells}</tr>'
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def framed(page: bytes, still: str = "") -> str:
    """Return a page in a frame of its own: it can run its script, save files, and reach nothing
    around it except to report its height, see theme.js.

    The frame lies over a ``still`` in HTML, which is seen where frames are removed: on GitHub, and
    in a notebook that is not trusted.
    """
    round_corner = "" if still else ";border-radius:10px"  # the still would be seen behind it
    style = f"width:100%;height:820px;border:0{round_corner}"
    frame = (
        f'<iframe style="{style}" sandbox="allow-scripts allow-downloads" '
        f'allow="clipboard-write" title="sdattn" srcdoc="{escape(page.decode())}"></iframe>'
    )
    if not still:
        return frame
    place = "grid-area:1/1;max-height:820px;overflow:auto"
    below = f'<div style="{place}">{still}</div>'
    return f'<div style="display:grid">{below}<div style="grid-area:1/1">{frame}</div></div>'


def _small(image: Image.Image) -> Image.Image:
    share = _SIDE / max(image.size)
    size = max(1, round(image.width * share)), max(1, round(image.height * share))
    return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def _data(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
