"""`report.html`, the page of a run: one file that opens anywhere and loads nothing."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from ...attention.core import grid_text
from ...maps.aggregation import read_by
from ...maps.heatmap import Heatmap
from ...maps.heatmaps import Heatmaps
from ...maps.presets import Preset
from ...maps.statistics import correlation
from ...models.demos import demo_named
from ...prompts.tokens import Prompt
from ...prompts.words import is_content_word, name_things
from ..imagerun import ImageRun, made, plain, step_names
from ..parts import FURTHER
from .maps import PageMaps, page_maps
from .pages import (
    MOST_CUT_OFF,
    MOST_PINS,
    as_uri,
    look_data,
    page,
    pieces,
    video_data,
)

_TITLES = {
    **{name: kind.title for name, kind in FURTHER.items()},
    "special": "Other tokens",
    "phrases": "Phrases",
}
_MOST_SPECIAL = 24  # columns of image prompts can be many
_TIMES = "\N{MULTIPLICATION SIGN}"
_SAME_PLACE = 0.5  # maps of the first view are less alike
_NOISE = 1 / 3  # of the strongest content word: a weaker map shows nothing


def report(run: ImageRun, phrases: Sequence[Heatmap] = ()) -> bytes:
    """Return the HTML page of one image's run.

    The words of the prompt show their maps, pointing at the image lists the words at that spot,
    and the layers and steps that the run kept can be chosen. The page is under 3 MB, whatever the
    run: maps are stored in 256 shades of their range, coarser where there are very many, and an
    image of more than 0.4 MB or 1536 pixels is shown smaller or as WebP.

    The page of a video plays, the words at a spot follow its frames, and strips show how much of
    each frame goes to each pinned word. It is under 8 MB: it holds all frames, compressed more or
    with fewer pixels where there are many.

    Args:
        run: run of one image.
        phrases: further maps of the prompt to offer, for example ``heatmaps.find("a cat")``.

    Returns:
        UTF-8 HTML. The same run gives the same bytes.

    Raises:
        ValueError: a map holds values that are not finite.
    """
    texts = _texts(run, phrases)
    prompt = run.heatmaps.prompt
    demo = demo_named(run.settings.model)
    further = list[Heatmap]()
    titled = []
    for name, text, held in texts:
        further += held
        titled.append((name, _TITLES.get(name, name), text, [one.label for one in held]))
    maps = page_maps(run, further)
    data = _data(run, texts, maps)
    missing = _missing(run)
    image = "" if run.video else as_uri(run.image)
    if run.video:
        data["video"], image = video_data(run.video, len(run.heatmaps.maps))
    scripts = ["card", "framed"]
    if maps.calls:
        scripts.append("steps")
    if run.video:
        scripts.append("video")
    return page(
        "run",
        shared=("heat", "spot"),
        further=scripts,
        run=run,
        data=data,
        image=image,
        parts=pieces(prompt, {(w.start, w.end): n for n, w in enumerate(run.heatmaps.held)}),
        texts=titled,
        unlearnt=demo.unlearnt(word.text for word in prompt.words) if demo else "",
        learnt=demo.learnt() if demo else "",
        missing=missing,
        again=_again(run),
        cut_off=[word.text for word in prompt.truncated],
        most_cut_off=MOST_CUT_OFF,
        tokens=_token_rows(prompt, run.heatmaps.columns),
        settings=_settings(run),
        maps=maps,
    )


def _data(
    run: ImageRun, texts: Sequence[tuple[str, str, list[Heatmap]]], maps: PageMaps
) -> dict[str, object]:
    """Return the data for the page's script."""
    words = [heatmap.label for heatmap in run.heatmaps.occurrences()]
    demo = demo_named(run.settings.model)
    names = dict(zip(run.details.calls, step_names(run), strict=True))
    return {
        "prompt": run.heatmaps.prompt.text[:80],
        "made": made(run),
        "words": words,
        "content": [is_content_word(word) for word in words],
        "first": _first_pins(run.heatmaps, demo.strange(words) if demo else ()),
        "texts": [_text(name, held) for name, _, held in texts],
        "reads": _reads(run),
        "groups": maps.groups,
        "heads": maps.heads,
        "steps": [", ".join(names[call]) for call in maps.calls],
        "maps": maps.maps,
        "data": maps.data,
        "size": run.image.size,
        "spots": None if run.details.spots is None else run.details.spots.shape[:2],
        "means": _means(run),
        "units": _units(run.heatmaps.preset),
        "rest": _sums_to_one(run),
        "refined": run.heatmaps.preset.refine is not None,
        **look_data(),
    }


def _missing(run: ImageRun) -> dict[int, str]:
    """Return why words probably did not arrive, by their numbers in the prompt."""
    if not run.heatmaps.judged():
        return {}
    found = {}
    for word in run.missing():
        doubt = "probably did not arrive" if word.verdict == "missing" else "may be missing"
        why = f"“{word.word}” {doubt}: its peak is {word.lead:.2g} times the other words there"
        if word.instead != word.word:
            why += f", and “{word.instead}” stands where it is highest"
        for number, held in enumerate(run.heatmaps.held):
            if held.columns == word.columns:
                found[number] = why
    return found


def _again(run: ImageRun) -> str:
    """Return the command, or the call in Python, that tries more seeds; "" for a run that has, and
    for an image that was explained or edited."""
    settings = run.settings
    if settings.candidates or settings.explained or settings.edited or settings.seed is None:
        return ""
    if settings.command and settings.command.startswith("sdattn generate "):
        return f"{settings.command} --candidates 4 --out best-of-4"
    options = {"seed": settings.seed, **(settings.options or {}), "candidates": 4}
    told = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"sdattn.generate(pipe, {settings.prompt!r}, {told})"


def _text(name: str, maps: Sequence[Heatmap]) -> dict[str, object]:
    """Return a further text for the page's script. In maps of changes every word counts as a
    content word: removing "of" may change as much as removing "cat"."""
    is_change = name in FURTHER and FURTHER[name].changes
    content = [is_change or is_content_word(heatmap.label) for heatmap in maps]
    return {"name": name, "words": [heatmap.label for heatmap in maps], "content": content}


def _first_pins(heatmaps: Heatmaps, strange: Collection[str]) -> list[int]:
    """Return the words that the page opens with: the strongest that name a thing, see
    :func:`name_things`, at least a third as strong as the first, each in another place than those
    before it: their maps correlate by less than 0.5. If all of these are much weaker than another
    content word, their maps are noise: return the strongest content word alone. ``strange`` words
    mean nothing."""
    maps = heatmaps.occurrences()
    labels = [heatmap.label for heatmap in maps]
    peaks = [-1.0 if heatmap.label in strange else heatmap.range[1] for heatmap in maps]
    things = [i for i in name_things(labels) if peaks[i] >= 0]
    content = [i for i, label in enumerate(labels) if is_content_word(label) and peaks[i] >= 0]
    if content and max((peaks[i] for i in things), default=0) < _NOISE * heatmaps.top:
        return [max(content, key=lambda i: peaks[i])]
    pins: list[int] = []
    for i in sorted(things, key=lambda i: -peaks[i]):
        alike = (correlation(maps[i].values, maps[pin].values) or 0.0 for pin in pins)
        apart = all(similarity < _SAME_PLACE for similarity in alike)
        strong = not pins or peaks[i] >= _NOISE * peaks[pins[0]]
        if apart and strong and len(pins) < MOST_PINS:
            pins.append(i)
    return pins


def _reads(run: ImageRun) -> str:
    """Describe the preset and the layers it reads: ``default: up 16x16, up 32x32``."""
    preset = run.heatmaps.preset
    layers = read_by(run.layers, preset).values()
    groups = []
    for layer in layers:
        grid = grid_text(layer.grid).replace("x", _TIMES)
        groups.append(f"{layer.place} {grid}")
    return f"preset {preset.title}: {', '.join(dict.fromkeys(groups))}"


def _units(preset: Preset) -> dict[str, str]:
    """Return the unit of heatmaps, of one step, of a group of layers and of a knockout."""
    return {
        "heatmap": preset.unit,
        "step": replace(preset, steps="mean").unit,
        "group": plain(preset).unit,
        "causal": "mean change of colour",
    }


def _texts(run: ImageRun, phrases: Sequence[Heatmap]) -> list[tuple[str, str, list[Heatmap]]]:
    """Return name, text and maps of each text next to the prompt."""
    heatmaps = run.heatmaps
    names = dict.fromkeys(token.special for token in heatmaps.prompt.tokens if token.special)
    columns_held = set(heatmaps.columns)
    special = []
    for name in list(names)[:_MOST_SPECIAL]:
        columns = heatmaps.prompt.find(name)[0]
        if columns_held.issuperset(columns):
            special.append(heatmaps[name])
    more = [(name, text, list(maps)) for name, (text, maps) in run.more.items()]
    apart = [(f"Through {n}", "", hm.occurrences()) for n, hm in heatmaps.encoders.items()]
    groups = [("phrases", "", list(phrases)), *apart, *more, ("special", "", special)]
    return [group for group in groups if group[2]]


def _token_rows(prompt: Prompt, captured_columns: Sequence[int]) -> list[dict[str, object]]:
    """Return a row for each token column; runs of padding share one."""
    rows: list[dict[str, object]] = []
    words = dict[int, str]()
    for word in prompt.words:
        words |= dict.fromkeys(word.columns, word.text)
    encoders = list[str]()
    for name, number in prompt.encoders:
        encoders += [name] * number
    captured = set(captured_columns)
    for column, token in enumerate(prompt.tokens):
        last = rows[-1] if rows else None
        encoder = encoders[column] if encoders else ""
        alike = token.special, token.id, encoder
        if last and token.special and alike == (last["special"], last["id"], last["encoder"]):
            last["last"] = column
            continue
        rows.append(
            {
                "first": column,
                "last": column,
                "text": token.text,
                "id": token.id,
                "special": token.special,
                "word": words.get(column, ""),
                "encoder": encoder,
                "captured": column in captured,
            }
        )
    return rows


def _settings(run: ImageRun) -> dict[str, str]:
    """Return how the run was made, name to text."""
    settings = run.settings
    preset = run.heatmaps.preset
    told = {
        "seed": settings.seed,
        "model": settings.model,
        "pipeline": settings.pipeline,
        "scheduler": settings.scheduler,
        "loaded with": settings.loading,
        "size": f"{run.image.width}x{run.image.height} pixels",
        "video": f"{len(run.video)} frames, {run.video.rate:g} a second" if run.video else None,
        **(settings.options or {}),
        "preset": preset.title,
        "maps": f"{_means(run)['heatmap']}, {len(run.layers.layers)} layers",
        "stopped": settings.stopped,
        "device": ", ".join(filter(None, (settings.device, settings.dtype))) or None,
        "item": settings.id,
    }
    return {name: str(value) for name, value in told.items() if value is not None}


def _means(run: ImageRun) -> dict[str, str]:
    """Describe what heatmaps and groups of layers average over when no step is chosen."""
    passes = run.layers.passes
    steps = run.heatmaps.preset.steps
    if passes == 1:
        return dict.fromkeys(("heatmap", "group"), "last step" if steps == "last" else "one step")
    mean = f"mean of {passes} steps"
    return {"heatmap": mean.replace("mean", "sum") if steps == "sum" else mean, "group": mean}


def _sums_to_one(run: ImageRun) -> bool:
    """Check whether the attention that the words leave goes to the other tokens."""
    heatmaps = run.heatmaps
    if len(heatmaps.columns) < len(heatmaps.prompt.tokens):
        return False
    return bool(((heatmaps.maps.sum(-1) - 1).abs() < 0.02).all())
