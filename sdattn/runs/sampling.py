"""One run of a pipeline under its captures: `sample()`, which `generate()`, `explain()`, `edit()`
and batches call."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..errors import SdattnWarning, warn
from ..files.version import versions
from ..files.videos import Video
from ..keep.budget import Budget
from ..loading.devices import device_of
from ..loading.options import options_of
from ..maps.capture import MapStore, capture
from ..maps.details import details_of
from ..maps.from_stores import check_texts, heatmaps_of
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps, spot_maps
from ..maps.presets import PRESETS, Preset
from ..maps.requirements import capture_settings, kept_columns
from ..models.demos import model_name
from ..models.facts import PipelineFacts, frame_rate
from ..models.finite import check_maps
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import call_pipeline, images_of, one_at_a_time, one_each
from ..prompts.tokens import Prompt
from .imagerun import Further, ImageRun
from .run import Run
from .settings import Captured, RunSettings
from .watched import Asked, Order, read_negative, settled, spots_grid, stop_of, watch, with_early

if TYPE_CHECKING:
    from PIL import Image


@one_at_a_time
def sample(
    pipe: Pipeline | PipelineFacts,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    options: Options,
    capture_options: Options | None = None,
    *,
    preset: Preset = PRESETS["default"],
    ask: str | None = None,
    early: bool = False,
    budget: Budget | None = None,
    spots: bool = False,
    python: Sequence[str] = (),
) -> Run:
    """Run :func:`generate` for prompts that were read and options that were checked.

    ``seeds`` has one for each image, in the pipeline's order; ``capture_options`` default to
    :func:`capture_settings`. With ``early`` the steps before those that the preset reads are kept
    as well, for a run that may be stopped. The maps of all texts, and of ``spots``, share the
    ``budget``. ``python`` names options that only Python has, for the run's record.

    Raises:
        OptionError: the maps would take more than the budget; before the first step.
        NotFiniteError: an image or a map holds NaN or infinity; the message says what to try.
    """
    facts = PipelineFacts.of(pipe)
    settings = capture_options or capture_settings(facts, preset, prompts, options)
    asked = None if ask is None else Asked(facts, ask, preset, options)
    order = Order(facts, prompts, seeds, options, preset, asked, spots, python)
    watched = watch(order, settings)
    drawn = _draw(order, with_early(watched) if early else watched, budget)
    return _describe(order, drawn, _make_maps(order, drawn.stores))


class _Drawn(NamedTuple):
    """The result of the pipeline under its captures, with an image for each video."""

    stores: Mapping[str, MapStore]  # by text, checked
    images: Sequence[Image.Image]
    videos: Sequence[Video] | None
    result: Any  # of the pipeline's call


class _Maps(NamedTuple):
    """The maps of a run: the prompt's, heatmaps of ``"negative"`` and ``"asked"`` texts, and where
    spots looked, ``[images, spot rows, spot cols, rows, cols]``."""

    layers: LayerMaps
    heatmaps: list[Heatmaps]
    texts: dict[str, list[Heatmaps]]
    spots: Tensor | None = None


def _draw(order: Order, watched: Mapping[str, Options], budget: Budget | None) -> _Drawn:
    """Run the pipeline once, under all captures."""
    facts, options = order.facts, order.options
    with ExitStack() as captures:
        stores = {}
        for of, kept in watched.items():
            stores[of] = captures.enter_context(capture(facts.denoiser, max_bytes=budget, **kept))
            stores[of].checks_itself = False
        texts = [prompt.text for prompt in order.prompts]
        result = call_pipeline(facts, texts, order.seeds, options)
    made = images_of(result)
    stores = settled(stores, made)
    if not stores["prompt"].is_video:
        return _Drawn(stores, made, None, result)
    videos = [Video(frames, frame_rate(facts, options)) for frames in made]
    return _Drawn(stores, [video[video.middle] for video in videos], videos, result)


def _make_maps(order: Order, stores: Mapping[str, MapStore]) -> _Maps:
    """Make the heatmaps of the prompt and of further texts.

    NaN is refused here, where its origin is still known.
    """
    pipe = order.facts.pipe
    options = order.options
    preset = order.preset
    for of in {"prompt", "negative"} & set(stores):
        check_texts(stores[of], preset)
    layers = stores["prompt"].layer_maps(preset, stores.get("self"))
    named = {name: layer.maps for name, layer in layers.layers.items()}
    own = {} if layers.affinity is None else {"self-attention": layers.affinity}
    check_maps(named | own, pipe, options)
    texts: dict[str, list[Heatmaps]] = {}
    if "negative" in stores:
        read = read_negative(order.facts, options, len(order.prompts), stores["negative"].n_text)
        texts["negative"] = _beside(stores["negative"], layers, preset, read)
    if order.asked is not None:
        texts["asked"] = _beside(stores["asked"], layers, preset, [order.asked.prompt])
    for name, what in (("negative", "negative prompt"), ("asked", "ask")):
        for heatmaps in texts.get(name, ()):
            check_maps({what: heatmaps.maps}, pipe, options)
    spots = _spots_of(order, stores["spots"]) if "spots" in stores else None
    return _Maps(layers, heatmaps_of(stores["prompt"], layers, preset, order.prompts), texts, spots)


def _spots_of(order: Order, store: MapStore) -> Tensor:
    """Return where the spots of each image looked, checked."""
    found = spot_maps(store)
    check_maps({"spots": found}, order.facts.pipe, order.options)
    return found.unflatten(1, spots_grid(order))


def _describe(order: Order, drawn: _Drawn, maps: _Maps) -> Run:
    """Collect what ``run.json`` says, and give each image a run of its own, with views into the
    tensors of the whole batch."""
    store = drawn.stores["prompt"]
    preset = order.preset
    videos = drawn.videos
    blanked = _blanked(drawn.result)
    stopped = stop_of(store, preset)
    if stopped is not None:
        stopped.tell()
    asked = None if order.asked is None else order.asked.prompt.text
    common = replace(_described(order, store), asked=asked, stopped=stopped)
    columns = kept_columns(preset, order.prompts, store.keep.refine)
    has_no_padding = columns and store.tokens == tuple(columns)
    image_runs = []
    for i, settings in enumerate(_each_own(common, order, drawn)):
        heatmaps = maps.heatmaps[i]
        video = None if videos is None else videos[i]
        own = {name: found[i] for name, found in maps.texts.items()}
        more = {name: Further(one.prompt.text, one.occurrences()) for name, one in own.items()}
        how = replace(settings, blanked=i in blanked or None)
        layers = maps.layers.image(i)
        details = details_of(store, i, heatmaps)
        details = details if maps.spots is None else replace(details, spots=maps.spots[i])
        one = ImageRun(drawn.images[i], heatmaps, layers, how, details, more, own, video)
        if has_no_padding:  # its own columns, whatever is drawn with it
            one = one.keep(kept_columns(preset, [heatmaps.prompt], store.keep.refine) or ())
        image_runs.append(one)
    return Run(image_runs, store, maps.layers)


def _each_own(common: RunSettings, order: Order, drawn: _Drawn) -> list[RunSettings]:
    """Return the settings of each image's run."""
    images, videos, prompts = drawn.images, drawn.videos, order.prompts
    a_prompt, a_seed = len(images) // len(prompts), len(images) // len(order.seeds)
    negatives = order.options.get("negative_prompt")
    texts = None if negatives is None else one_each(negatives, len(prompts))
    own = []
    for i, image in enumerate(images):
        negative = {} if texts is None else {"negative_prompt": texts[i // a_prompt]}
        settings = replace(
            common,
            prompt=prompts[i // a_prompt].text,
            seed=order.seeds[i // a_seed],
            size=image.size,
            frames=None if videos is None else len(videos[i]),
            frame_rate=None if videos is None else videos[i].rate,
            options={**(common.options or {}), **negative},
        )
        own.append(settings)
    return own


def _beside(
    store: MapStore, layers: LayerMaps, preset: Preset, prompts: Sequence[Prompt]
) -> list[Heatmaps]:
    """Return the heatmaps of a further text, refined if asked along the same images."""
    own = store.layer_maps(replace(preset, refine=None, among_words=False))
    # Every text is smoothed along the image's self-attention, which was captured once.
    own = replace(own, affinity=layers.affinity, affinity_grid=layers.affinity_grid)
    return heatmaps_of(store, own, preset, prompts)


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


def _described(order: Order, store: MapStore) -> RunSettings:
    """Return the settings that all images of a call share."""
    pipe = order.facts.pipe
    options = order.options
    plain = (str, int, float, bool, type(None))
    return RunSettings(
        prompt="",
        seed=None,
        model=model_name(pipe),
        pipeline=type(pipe).__name__,
        scheduler=type(pipe.scheduler).__name__,
        loading=options_of(pipe),
        options={key: value for key, value in options.items() if isinstance(value, plain)},
        options_left_out=sorted(
            name
            for name in {*options, *order.python} - {"negative_prompt"}  # which each image has
            if not isinstance(options.get(name, order), plain)
        ),
        device=device_of(pipe).type,
        dtype=str(pipe.dtype).removeprefix("torch."),
        timesteps=store.timesteps,
        captured=Captured(steps=store.steps, heads=store.heads, spots=order.spots or None),
        versions={"python": platform.python_version(), **versions()},
    )
