"""The page of two pictures: one over the other with a slider between, their words linked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from ...maps.heatmap import Heatmap
from ...prompts.tokens import Prompt
from ...prompts.words import is_content_word
from .images import LARGEST, MOST_PINS, PIN_COLORS, as_uri, colour_tables
from .maps import packed_heatmaps
from .pages import page
from .text import indices_by_span, pieces

Link = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Picture:
    """One of the pictures.

    Attributes:
        name: what it is called, "source" or a run's.
        image: the picture.
        prompt: of it.
        maps: of words and phrases of the prompt, each in one link or more.
    """

    name: str
    image: Image.Image
    prompt: Prompt
    maps: Sequence[Heatmap]


@dataclass(frozen=True, eq=False)
class Counterpart:
    """A picture to be seen beside the first.

    Attributes:
        picture: it.
        links: numbers of a map of the first picture and of one of this; None where one has none.
        about: numbers of the links that the comparison is about, which the page opens with.
    """

    picture: Picture
    links: Sequence[Link]
    about: Sequence[int] = ()


def pair_page(
    title: str,
    first: Picture,
    others: Sequence[Counterpart],
    *,
    unit: str,
    differing: Mapping[str, Sequence[str]],
    facts: Mapping[str, str] | None = None,
) -> bytes:
    """The page of a picture and others that it is compared with, one at a time.

    All maps have one scale, from 0 to the peak of the strongest content word.

    Args:
        title: of the page.
        first: the picture on the left.
        others: those on the right, one or more.
        unit: of the maps' values.
        differing: name to a text for each picture.
        facts: what holds for all of them, name to text.

    Returns:
        UTF-8 HTML.
    """
    pictures = [first, *(other.picture for other in others)]
    maps = [heatmap for picture in pictures for heatmap in picture.maps]
    shapes, cells = packed_heatmaps(maps)
    data = {
        "sides": _sides(pictures),
        "links": [other.links for other in others],
        "first": [_first_pins(first, other) for other in others],
        "top": max((heatmap.full for heatmap in maps), default=0.0),
        "unit": unit,
        "maps": shapes,
        "data": cells,
        "colormaps": colour_tables(),
        "pins": PIN_COLORS,
    }
    shown = [_shown(picture, 2 * LARGEST // len(pictures)) for picture in pictures]
    return page(
        "pair",
        shared=("heat", "spot"),
        data=data,
        title=title,
        pictures=shown,
        one_size=len({picture.image.size for picture in pictures}) == 1,
        facts=facts or {},
        differing=differing,
    )


def _sides(pictures: Sequence[Picture]) -> list[dict[str, object]]:
    """What the script knows of each picture; ``start`` is the number of its first map."""
    sides: list[dict[str, object]] = []
    start = 0
    for picture in pictures:
        words = [heatmap.label for heatmap in picture.maps]
        crop = picture.maps[0].crop if picture.maps else None
        about = {"size": picture.image.size, "part": crop and crop.parts}
        sides.append({"name": picture.name, "words": words, "start": start, **about})
        start += len(words)
    return sides


def _shown(picture: Picture, largest: int) -> dict[str, object]:
    """What the template knows of a picture; ``more`` are words that stand nowhere in the text."""
    spans = indices_by_span(picture.prompt, picture.maps)
    apart = sorted({*range(len(picture.maps))}.difference(spans.values()))
    return {
        "name": picture.name,
        "text": picture.prompt.text,
        "uri": as_uri(picture.image, largest),
        "size": picture.image.size,
        "pieces": pieces(picture.prompt, spans),
        "more": [(number, picture.maps[number].label) for number in apart],
    }


def _first_pins(first: Picture, other: Counterpart) -> list[int]:
    """The strongest links with a content word, of those that it is about; else the strongest."""
    peaks: dict[int, float] = {}
    for number, link in enumerate(other.links):
        both = zip((first, other.picture), link, strict=True)
        maps = [picture.maps[at] for picture, at in both if at is not None]
        if any(is_content_word(heatmap.label) for heatmap in maps):
            peaks[number] = max(heatmap.range[1] for heatmap in maps)
    ordered = sorted(peaks, key=lambda number: -peaks[number])
    return [number for number in ordered if number in other.about][:MOST_PINS] or ordered[:1]
