"""Two runs side by side: the heatmaps of each word and their difference."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import InvalidTypeError, InvalidValueError, SdattnWarning, refuse, warn
from ...maps.presets import Preset
from ..folder import SavedRun, load_run
from ..imagerun import ImageRun
from ..info import RunSettings
from ..run import Run
from .comparison import Comparison
from .matching import choose_words, match_words

RunLike = str | Path | SavedRun | Run | tuple[Run, int]

_NOT_COMPARED = {"id", "line", "fingerprint", "command"}


def diff(
    a: RunLike,
    b: RunLike,
    *,
    words: Sequence[str] | None = None,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two runs word by word: two prompts, two seeds, with a LoRA and without.

    Words are matched by their text, ignoring case: the second "a" of one prompt with the second "a"
    of the other.

    Args:
        a, b: a run's folder, the result of ``load_run``, an item of ``open_batch``, a ``Run`` of
            one image, or ``(run, number)`` for one image of a ``Run``.
        words: compare only these words and phrases, in this order.
        names: names for A and B (default: their folders' names).

    Returns:
        Comparison: images, maps, differences, and the settings that differ.

    Raises:
        ValueError: the images have different proportions, the maps different presets or values that
            are not finite, or a ``Run`` of several images was given without a number.
        KeyError: a word is in neither run.
        TypeError: a video.

    Warns:
        UserWarning: the maps come from different layers.
    """
    if isinstance(words, str):
        raise refuse("words", words, "a list of words and phrases, or None for all")
    first = _side(a)
    second = _side(b)
    _check(first, second)
    if words is None:
        compared = match_words(first.heatmaps, second.heatmaps)
    else:
        compared = []
        for phrase in words:
            compared += choose_words(first.heatmaps, second.heatmaps, phrase)
    of_a = _settings(first.settings)
    of_b = _settings(second.settings)
    differing = {}
    for name in of_a | of_b:
        if of_a.get(name) != of_b.get(name):
            differing[name] = of_a.get(name), of_b.get(name)
    return Comparison(
        names=names or _names(first, second),
        prompts=(first.heatmaps.prompt.text, second.heatmaps.prompt.text),
        image_a=first.image,
        image_b=second.image,
        words=compared,
        settings=differing,
        heatmaps=(first.heatmaps, second.heatmaps),
    )


def _side(run: RunLike) -> ImageRun:
    """Return one of the two runs that :func:`diff` takes."""
    if isinstance(run, (str, Path)):
        run = load_run(run)
    if isinstance(run, SavedRun):
        return run
    run, number = run if isinstance(run, tuple) else (run, None)
    if not isinstance(run, Run):
        raise InvalidTypeError(
            f"Asked to compare a {type(run).__name__}. Pass a run's folder, a SavedRun or a Run."
        )
    last = len(run) - 1
    number = 0 if number is None and last == 0 else number
    if number is None or not 0 <= number <= last:
        asked = "none was chosen" if number is None else f"asked for {number}"
        raise InvalidValueError(
            f"The run has {last + 1} image(s), and {asked}. Pass one of (run, 0) to (run, {last})."
        )
    return run[number]


def _check(a: ImageRun, b: ImageRun) -> None:
    """Refuse runs that cannot be compared; warn where their layers differ."""
    if a.video is not None or b.video is not None:
        raise InvalidTypeError(
            "Comparisons work on images, but these are videos. Compare a frame of each, .frame(0)."
        )
    # Values are compared, so they must be values of one thing: one preset, as many steps where
    # these are summed, images of one shape.
    preset_a = _comparable(a.heatmaps.preset).to_json()
    preset_b = _comparable(b.heatmaps.preset).to_json()
    differing = [name for name in preset_a if preset_a[name] != preset_b[name]]
    if differing:
        with_a = ", ".join(f"{name}={preset_a[name]!r}" for name in differing)
        with_b = ", ".join(f"{name}={preset_b[name]!r}" for name in differing)
        raise InvalidValueError(
            f"The maps were made by different presets: A with {with_a}, B with {with_b}. Their "
            "values cannot be compared; make both runs with one preset."
        )
    if a.heatmaps.preset.steps == "sum" and a.layers.passes != b.layers.passes:
        passes = f"{a.layers.passes} and {b.layers.passes}"
        raise InvalidValueError(
            f"The maps are sums over {passes} steps. Make both runs with as many steps."
        )
    ratios = [side.image.width / side.image.height for side in (a, b)]
    if max(ratios) > 1.01 * min(ratios):
        size_a, size_b = (f"{side.image.width}x{side.image.height}" for side in (a, b))
        raise InvalidValueError(
            f"A's image has {size_a} pixels and B's {size_b}. Make both runs with one size."
        )
    for name, side in (("A", a), ("B", b)):
        if not torch.isfinite(side.heatmaps.maps).all():
            raise InvalidValueError(
                f"The maps of {name} hold values that are not finite. If the model runs in "
                "float16, try bfloat16 or float32."
            )
    only_a = sorted(a.layers.layers.keys() - b.layers.layers.keys())
    only_b = sorted(b.layers.layers.keys() - a.layers.layers.keys())
    if only_a or only_b:
        warn(
            f"The maps come from different layers: {len(only_a)} that only A has, {len(only_b)} "
            f"that only B has, {[*only_a, *only_b][0]} for one. Compare their values with care, or "
            "make both runs with the same layers.",
            SdattnWarning,
        )


def _comparable(preset: Preset) -> Preset:
    """Return the preset as it is compared: means over any steps are comparable."""
    return preset if preset.part is None else replace(preset, steps="mean")


def _names(a: ImageRun, b: ImageRun) -> tuple[str, str]:
    """Return the folders' names, with as many parent folders as tell them apart, or A and B."""
    folders = [run.folder.resolve() if isinstance(run, SavedRun) else None for run in (a, b)]
    if folders[0] is None or folders[1] is None:
        names = [folder.name if folder else "" for folder in folders]
        return names[0] or "A", names[1] or "B"
    parts = folders[0].parts, folders[1].parts
    for number in range(1, max(map(len, parts))):
        name_a, name_b = ("/".join(path[-number:]) for path in parts)
        if name_a != name_b:
            return name_a, name_b
    return parts[0][-1], parts[1][-1]


def _settings(settings: RunSettings) -> dict[str, object]:
    """Flatten the settings: ``guidance_scale``, ``version of torch``."""
    flat: dict[str, object] = {}
    for name, value in settings.alone().to_json().items():
        if name in ("options", "loading"):
            flat |= value
        elif name == "versions":
            flat |= {f"version of {package}": number for package, number in value.items()}
        elif name not in _NOT_COMPARED:
            flat[name] = value
    return flat
