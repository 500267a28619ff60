"""Two runs side by side: the heatmaps of each word and their difference."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import InvalidTypeError, InvalidValueError, SdattnWarning, refuse, warn
from ...maps.presets import Preset
from ..folder import SavedRun, load_run
from ..imagerun import ImageRun
from ..run import Run
from ..settings import RunSettings
from .comparison import Comparison
from .matching import choose_words, match_words

RunLike = str | Path | SavedRun | Run | tuple[Run, int]

_OF_A_BATCH = {"id", "line", "fingerprint"}


def diff(
    a: RunLike,
    b: RunLike,
    *,
    words: Sequence[str] | None = None,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two runs word by word: of two prompts, two seeds, with a LoRA and without.

    Words are matched by their text, letter case ignored, the second "a" of one prompt with the
    second "a" of the other.

    Args:
        a, b: each a run's folder, what ``load_run`` or an item of ``open_batch`` gave, a ``Run``
            of one image, or a ``Run`` and the number of the image, ``(run, 1)``.
        words: compare these words and phrases only, in this order.
        names: what A and B are called; by default after their folders.

    Returns:
        Comparison: images, maps, differences, and the settings that differ.

    Raises:
        ValueError: images of different proportions, maps of different presets, maps that are not
            finite, a ``Run`` of several images without a number.
        KeyError: a word that is in neither run.
        TypeError: a video.
        FileNotFoundError: as by ``load_run``.

    Warns:
        UserWarning: the maps come from different layers.
    """
    if isinstance(words, str):
        raise refuse("words", words, "a list of words and phrases, or None for all")
    first, second = _side(a), _side(b)
    _check(first, second)
    maps = first.heatmaps, second.heatmaps
    found = (
        match_words(*maps)
        if words is None
        else [w for phrase in words for w in choose_words(*maps, phrase)]
    )
    return Comparison(
        names or _names(first, second),
        (first.heatmaps.prompt.text, second.heatmaps.prompt.text),
        first.image,
        second.image,
        found,
        _differing(first, second),
        maps,
    )


def _side(run: RunLike) -> ImageRun:
    """One of the two that :func:`diff` takes."""
    if isinstance(run, (str, Path)):
        run = load_run(run)
    if isinstance(run, SavedRun):
        return run
    run, number = run if isinstance(run, tuple) else (run, None)
    if not isinstance(run, Run):
        raise InvalidTypeError(
            f"Asked to compare a {type(run).__name__}. Pass a run's folder, or what load_run() or "
            "generate() returned."
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
    """Refuse what cannot be compared; warn where the layers differ."""
    if a.video is not None or b.video is not None:
        raise InvalidTypeError(
            "Comparisons are of images, and these are videos. Compare one frame of each, "
            "diff(load_run(A).frame(0), load_run(B).frame(0))."
        )
    # Values are compared, so they must be values of one thing: one preset, as many steps where
    # these are summed, images of one shape.
    presets = [_in_unit(side.heatmaps.preset).to_json() for side in (a, b)]
    if differ := [name for name in presets[0] if presets[0][name] != presets[1][name]]:
        unlike = (", ".join(f"{name}={preset[name]!r}" for name in differ) for preset in presets)
        raise InvalidValueError(
            "The maps were made by different presets: A with {}, B with {}. Their values cannot be "
            "compared; make both runs with one preset.".format(*unlike)
        )
    if a.heatmaps.preset.steps == "sum" and a.layers.passes != b.layers.passes:
        passes = f"{a.layers.passes} and {b.layers.passes}"
        raise InvalidValueError(
            f"The maps are sums over {passes} steps, so their values cannot be "
            "compared. Make both runs with one number of steps, or with another preset."
        )
    ratios = [side.image.width / side.image.height for side in (a, b)]
    if max(ratios) > 1.01 * min(ratios):
        sizes = [f"{side.image.width}x{side.image.height}" for side in (a, b)]
        raise InvalidValueError(
            f"The image of A has {sizes[0]} pixels and that of B {sizes[1]} (width x height), "
            "which are other proportions. Make both runs with one width and height."
        )
    for name, side in (("A", a), ("B", b)):
        if not torch.isfinite(side.heatmaps.maps).all():
            raise InvalidValueError(
                f"The maps of {name} hold values that are not finite. If the model runs in "
                "float16, try bfloat16 or float32."
            )
    _compare_layers([*a.layers.layers], [*b.layers.layers])


def _in_unit(preset: Preset) -> Preset:
    """The preset as far as values are compared by it: a mean over other steps is one too, as of a
    run that was drawn and of an image that was explained."""
    return preset if preset.part is None else replace(preset, steps="mean")


def _compare_layers(a: Sequence[str], b: Sequence[str]) -> None:
    of_a, of_b = (sorted({*x}.difference(y)) for x, y in ((a, b), (b, a)))
    if of_a or of_b:
        warn(
            f"The maps come from different layers: {len(of_a)} that only A has, {len(of_b)} that "
            f"only B has, {(of_a or of_b)[0]} for one. Compare their values with care, or make "
            "both runs with the same layers.",
            SdattnWarning,
        )


def _names(a: ImageRun, b: ImageRun) -> tuple[str, str]:
    """The folders' names, with as many of those above as tell them apart; A and B without."""
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


def _differing(a: ImageRun, b: ImageRun) -> dict[str, tuple[object, object]]:
    """What the two runs were asked for and is not the same, name to (A's, B's)."""
    of_a, of_b = _settings(a.settings), _settings(b.settings)
    names = [name for name in {**of_a, **of_b} if of_a.get(name) != of_b.get(name)]
    return {name: (of_a.get(name), of_b.get(name)) for name in names}


def _settings(settings: RunSettings) -> dict[str, object]:
    """Flat: ``guidance_scale``, ``version of torch``."""
    flat: dict[str, object] = {}
    for name, value in settings.alone().to_json().items():
        if name in ("options", "loading"):
            flat |= value
        elif name == "versions":
            flat |= {f"version of {package}": number for package, number in value.items()}
        elif name not in _OF_A_BATCH:
            flat[name] = value
    return flat
