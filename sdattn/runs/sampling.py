"""One run of a pipeline under its captures: `sample()`, which `generate()`, `explain()`, `edit()`
and batches call."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..errors import CaptureError, SdattnWarning, warn
from ..files.version import versions
from ..files.videos import Video
from ..follow.passes import CaptureWarning
from ..keep.keep import Keep, Steps
from ..loading.options import options_of
from ..maps.capture import MapStore, capture_kept
from ..maps.captured import spot_maps
from ..maps.details import details_of
from ..maps.from_stores import check_texts, heatmaps_of
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps
from ..maps.presets import Preset
from ..maps.requirements import kept_columns
from ..models.caches import is_cached
from ..models.demos import model_name
from ..models.facts import frame_rate
from ..models.finite import check_maps
from ..models.pipeline_call import call_pipeline, images_in_errors, images_of, one_each, turn
from ..models.threads import few_threads
from ..prompts.tokens import Prompt
from .imagerun import Further, ImageRun
from .info import Captured, RunSettings
from .preparing import Order, spots_grid, watch
from .run import Run

if TYPE_CHECKING:
    from PIL import Image


def sample(order: Order) -> Run:
    """Make a run that :func:`.preparing.prepare` checked.

    Raises:
        OptionError: the maps would take more than ``order.keep.max_bytes``; before the first step.
        NotFiniteError: an image or a map holds NaN or infinity; the message says what to try.

    Errors after the last step have the images, see
    :func:`sdattn.models.pipeline_call.images_in_errors`.
    """
    pipe = order.facts.pipe
    with turn(pipe), few_threads(pipe), images_in_errors():
        watched = watch(order)
        drawn = draw(order, watched, early_steps(order, watched))
        maps = make_maps(order, drawn.stores)
        return Run(_image_runs(order, drawn, maps), drawn.stores["prompt"], maps.layers)


class Drawn(NamedTuple):
    """The result of the pipeline under its captures."""

    stores: Mapping[str, MapStore]  # by text, checked
    images: Sequence[Image.Image]  # the middle frames of videos
    videos: Sequence[Video]  # empty for images
    blanked: Sequence[int]  # the images that the safety checker blanked


class Maps(NamedTuple):
    """The maps of a run: the prompt's, heatmaps of ``"negative"`` and ``"asked"`` texts, and where
    spots looked, ``[images, spot rows, spot cols, rows, cols]``."""

    layers: LayerMaps
    heatmaps: list[Heatmaps]
    texts: dict[str, list[Heatmaps]]
    spots: Tensor | None


def draw(
    order: Order,
    watched: Mapping[str, Keep],
    early: Mapping[str, Keep],
) -> Drawn:
    """Run the pipeline once, under all captures."""
    facts = order.facts
    with ExitStack() as captures:

        def begun(watched: Mapping[str, Keep]) -> dict[str, MapStore]:
            stores = {}
            for name, keep in watched.items():
                watching = capture_kept(facts.denoiser, keep)
                stores[name] = captures.enter_context(watching)
                stores[name].checks_itself = False
            return stores

        stores = begun(watched)
        early_stores = begun(early)
        texts = [prompt.text for prompt in order.prompts]
        result = call_pipeline(facts, texts, order.seeds, order.options)
    made = images_of(result)
    checked = settled(stores, early_stores)
    videos = []
    if checked["prompt"].is_video:
        videos = [Video(frames, frame_rate(facts, order.options)) for frames in made]
    images = [video[video.middle] for video in videos] or made
    return Drawn(checked, images, videos, _blanked(result))


def _blanked(result: object) -> list[int]:
    """Return the images that the pipeline's safety checker blanked, and warn."""
    flags = getattr(result, "nsfw_content_detected", None) or []
    blanked = [i for i, flag in enumerate(flags) if flag]
    if blanked:
        warn(
            f"The pipeline's safety checker blanked image(s) {blanked}; their heatmaps are of what "
            "was generated before that.",
            SdattnWarning,
        )
    return blanked


def make_maps(order: Order, stores: Mapping[str, MapStore]) -> Maps:
    """Make the heatmaps of the prompt and of further texts, and the maps of spots.

    NaN is refused here, where its origin is still known.
    """
    preset = order.preset

    def check(name: str, values: Tensor) -> None:
        check_maps({name: values}, order.facts.pipe, order.options)

    for name in {"prompt", "negative"} & set(stores):
        check_texts(stores[name], preset)
    layers = stores["prompt"].layer_maps(preset, stores.get("self"))
    for name, layer in layers.layers.items():
        check(name, layer.maps)
    if layers.affinity is not None:
        check("self-attention", layers.affinity)
    texts: dict[str, list[Heatmaps]] = {}
    if "negative" in stores:
        store = stores["negative"]
        read = order.negative(store.n_text)
        texts["negative"] = _further_heatmaps(store, layers, preset, read)
    if order.asked is not None:
        texts["asked"] = _further_heatmaps(stores["asked"], layers, preset, [order.asked])
    for text, each_image in texts.items():
        for heatmaps in each_image:
            check({"negative": "negative prompt", "asked": "ask"}[text], heatmaps.maps)
    spots = None
    if "spots" in stores:
        looked = spot_maps(stores["spots"])
        check("spots", looked)
        spots = looked.unflatten(1, spots_grid(order))
    return Maps(layers, heatmaps_of(stores["prompt"], layers, preset, order.prompts), texts, spots)


def _further_heatmaps(
    store: MapStore, layers: LayerMaps, preset: Preset, prompts: Sequence[Prompt]
) -> list[Heatmaps]:
    """Return the heatmaps of a further text, refined if asked along the same images."""
    maps = store.layer_maps(replace(preset, refine=None, among_words=False))
    # Every text is smoothed along the image's self-attention, which was captured once.
    maps = replace(maps, affinity=layers.affinity, affinity_grid=layers.affinity_grid)
    return heatmaps_of(store, maps, preset, prompts)


def _image_runs(order: Order, drawn: Drawn, maps: Maps) -> list[ImageRun]:
    """Collect what ``run.json`` says, and give each image a run of its own, with views into the
    tensors of the whole batch."""
    store = drawn.stores["prompt"]
    columns = kept_columns(order.preset, order.prompts, store.is_refined)
    has_no_padding = columns and store.tokens == tuple(columns)
    image_runs = []
    for i, settings in enumerate(_settings_of_each(order, drawn)):
        heatmaps = maps.heatmaps[i]
        texts = {name: of_images[i] for name, of_images in maps.texts.items()}
        image_run = ImageRun(
            image=drawn.images[i],
            heatmaps=heatmaps,
            layers=maps.layers.image(i),
            settings=settings,
            details=replace(
                details_of(store, i, heatmaps), spots=None if maps.spots is None else maps.spots[i]
            ),
            more={name: Further(t.prompt.text, t.occurrences()) for name, t in texts.items()},
            texts=texts,
            video=drawn.videos[i] if drawn.videos else None,
        )
        if has_no_padding:  # its own columns, whatever is drawn with it
            own_columns = kept_columns(order.preset, [heatmaps.prompt], store.is_refined)
            image_run = image_run.keep(own_columns or ())
        image_runs.append(image_run)
    return image_runs


def _settings_of_each(order: Order, drawn: Drawn) -> list[RunSettings]:
    """Return the settings of each image's run."""
    common = _common_settings(order, drawn.stores["prompt"])
    number = len(drawn.images)
    a_prompt = number // len(order.prompts)
    a_seed = number // len(order.seeds)
    negatives = order.options.get("negative_prompt")
    if negatives is not None:
        negatives = one_each(negatives, len(order.prompts))
    each = []
    for i, image in enumerate(drawn.images):
        settings = replace(
            common,
            prompt=order.prompts[i // a_prompt].text,
            seed=order.seeds[i // a_seed],
            size=image.size,
            blanked=i in drawn.blanked or None,
        )
        if drawn.videos:
            video = drawn.videos[i]
            settings = replace(settings, frames=len(video), frame_rate=video.rate)
        if negatives is not None:
            options = {**(common.options or {}), "negative_prompt": negatives[i // a_prompt]}
            settings = replace(settings, options=options)
        each.append(settings)
    return each


def _common_settings(order: Order, store: MapStore) -> RunSettings:
    """Return the settings that all images of a call share; warn if the run was stopped."""
    pipe = order.facts.pipe
    stopped = store.stopped
    if stopped is not None:
        stopped = replace(stopped, kept=tuple(store.read_passes(order.preset)))
        stopped.tell()
    plain = (str, int, float, bool, type(None))
    in_json = {name: value for name, value in order.options.items() if isinstance(value, plain)}
    each_has = {"negative_prompt"}
    return RunSettings(
        prompt="",
        seed=None,
        model=model_name(pipe),
        pipeline=type(pipe).__name__,
        scheduler=type(pipe.scheduler).__name__,
        loading=options_of(pipe),
        options=in_json,
        options_left_out=sorted({*order.options, *order.python} - in_json.keys() - each_has),
        device=order.facts.device.type,
        dtype=str(pipe.dtype).removeprefix("torch."),
        timesteps=store.timesteps,
        captured=Captured(steps=store.steps, heads=store.heads, spots=order.spots or None),
        stopped=stopped,
        versions={"python": platform.python_version(), **versions()},
        asked=None if order.asked is None else order.asked.text,
    )


# A run that is stopped


class StoppedError(CaptureError):
    """A run was stopped before the steps that its preset reads, so it has no maps; what was drawn
    is in ``images``."""


def early_steps(order: Order, watched: Mapping[str, Keep]) -> dict[str, Keep]:
    """Return what to capture of the steps before those to keep: their mean in a run that may be
    stopped; of each layer the last in which it ran, if a cache may leave out the later ones."""
    early: dict[str, Keep] = {}
    if not (order.may_stop or is_cached(order.facts.denoiser)):
        return early
    for name, keep in watched.items():
        part = keep.steps.part
        if part is not None and part.first > 0:
            steps = Steps.of((0.0, part.first))
            early[name] = replace(keep, steps=replace(steps, last=not order.may_stop))
    return early


def settled(
    stores: Mapping[str, MapStore], early: Mapping[str, MapStore]
) -> Mapping[str, MapStore]:
    """Return the stores to read after a run, checked: the ``early`` ones, by the same names, if it
    was stopped before the others' steps, or a cache left layers out in all of them. Raise
    StoppedError for a stopped run if these are empty too."""
    asked = stores["prompt"]
    stopped = asked.stopped
    if stopped is not None and not asked.maps:
        stores = {**stores, **early}
        if not stores["prompt"].maps:
            text = (
                f"The run was stopped after {stopped.after} of {stopped.steps} steps, before those "
                "that its preset reads, so there are no maps. What was drawn is in `images` of "
                "this error. To have maps of a run that may be stopped, keep each step: "
                "`capture_options={'steps': 'all'}`."
            )
            raise StoppedError(text)
    elif stopped is None and asked.missing() and early and early["prompt"].maps:
        _tell_of_cache(asked, early["prompt"])
        return {**stores, **early}
    for store in stores.values():
        store.check()
    return stores


def _tell_of_cache(asked: MapStore, early: MapStore) -> None:
    """Warn that the maps are of earlier steps than ``asked``."""
    numbers = set[int]()
    for calls in early.seen.values():
        numbers.update(calls)
    steps = " and ".join(str(number + 1) for number in sorted(numbers))
    text = (
        f"A cache left out {len(asked.missing())} of {len(asked.layers)} watched layers in all of "
        f"the steps that the preset reads, {asked.steps}. The maps are of earlier steps in which "
        f"the layers ran: {steps} of {len(asked.passes)}. Draw more steps, or turn the cache off."
    )
    if missing := early.missing():
        text += f" {len(missing)} layers ran in none of them and have no map: {', '.join(missing)}."
    warn(text, CaptureWarning)
