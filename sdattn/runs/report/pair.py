"""The page of two images: one over the other with a slider between them, their words linked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from ...maps.heatmap import Heatmap
from ...maps.presets import Preset
from ...prompts.tokens import Prompt
from ...prompts.words import is_content_word, name_things
from .maps import packed_heatmaps
from .pages import (
    LARGEST,
    MOST_PINS,
    as_uri,
    indices_by_span,
    look_data,
    page,
    pieces,
)

Link = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Side:
    """One side of the page.

    Attributes:
        name: "source", or a run's name.
        image: the image.
        prompt: its prompt.
        maps: maps of words and phrases of the prompt, each in one or more links.
    """

    name: str
    image: Image.Image
    prompt: Prompt
    maps: Sequence[Heatmap]


@dataclass(frozen=True, eq=False)
class Counterpart:
    """An image to compare with the first.

    Attributes:
        side: the image and its maps.
        links: pairs of map numbers, in the first image and in this one; None for a missing map.
        about: numbers of the links that the page opens with.
    """

    side: Side
    links: Sequence[Link]
    about: Sequence[int] = ()


def pair_page(
    title: str,
    first: Side,
    others: Sequence[Counterpart],
    *,
    preset: Preset,
    differing: Mapping[str, Sequence[str]],
    facts: Mapping[str, str] | None = None,
) -> bytes:
    """Return the page that compares an image with others, one at a time.

    A word has the same scale in both images.

    Args:
        title: title of the page.
        first: image on the left.
        others: images on the right, one or more.
        preset: how all maps were made.
        differing: settings that differ: name to a text for each image.
        facts: settings that all images share, name to text.

    Returns:
        UTF-8 HTML.
    """
    sides = [first, *(other.side for other in others)]
    maps = list[Heatmap]()
    for side in sides:
        maps += side.maps
    shapes, cells = packed_heatmaps(maps)
    data = {
        "sides": _sides(sides),
        "links": [other.links for other in others],
        "first": [_first_pins(first, other) for other in others],
        "top": max((heatmap.full for heatmap in maps), default=0.0),
        "unit": preset.unit,
        "refined": preset.refine is not None,
        "maps": shapes,
        "data": cells,
        **look_data(),
    }
    shown = [_shown(side, 2 * LARGEST // len(sides)) for side in sides]
    return page(
        "pair",
        shared=("heat", "spot"),
        data=data,
        title=title,
        shown=shown,
        one_size=len({side.image.size for side in sides}) == 1,
        facts=facts or {},
        differing=differing,
    )


def _sides(shown: Sequence[Side]) -> list[dict[str, object]]:
    """Return each image's data for the script; ``start`` is the number of its first map."""
    sides: list[dict[str, object]] = []
    start = 0
    for side in shown:
        words = [heatmap.label for heatmap in side.maps]
        sides.append(
            {
                "name": side.name,
                "words": words,
                "content": [is_content_word(word) for word in words],
                "start": start,
                "size": side.image.size,
            }
        )
        start += len(words)
    return sides


def _shown(side: Side, largest: int) -> dict[str, object]:
    """Return an image's data for the template; ``more`` are words from outside its text."""
    spans = indices_by_span(side.prompt, side.maps)
    apart = sorted({*range(len(side.maps))}.difference(spans.values()))
    return {
        "name": side.name,
        "text": side.prompt.text,
        "uri": as_uri(side.image, largest),
        "size": side.image.size,
        "pieces": pieces(side.prompt, spans),
        "more": [(number, side.maps[number].label) for number in apart],
    }


def _first_pins(first: Side, other: Counterpart) -> list[int]:
    """Return the strongest links with a content word among ``about``, or the strongest of all;
    links whose words name a thing come first."""
    sides = first, other.side
    things = []
    for side in sides:
        things.append(name_things([heatmap.label for heatmap in side.maps]))
    peaks: dict[int, tuple[bool, float]] = {}
    for number, link in enumerate(other.links):
        both = zip(sides, link, strict=True)
        maps = [side.maps[at] for side, at in both if at is not None]
        if any(is_content_word(heatmap.label) for heatmap in maps):
            is_thing = any(at in numbers for at, numbers in zip(link, things, strict=True))
            peaks[number] = is_thing, max(heatmap.range[1] for heatmap in maps)
    ordered = sorted(peaks, key=lambda number: peaks[number], reverse=True)
    return [number for number in ordered if number in other.about][:MOST_PINS] or ordered[:1]
