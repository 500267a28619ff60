"""One run of a pipeline under its captures: `sample()`, on which `generate()`, `explain()`,
`edit()` and the batches stand."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import SdattnWarning, warn
from ..files.version import __version__
from ..files.videos import Video
from ..hooks.other_text import encode_text
from ..loading.devices import device_of
from ..loading.options import options_of
from ..maps.aggregation import refining
from ..maps.capture import MapStore, capture
from ..maps.details import details_of
from ..maps.from_stores import check_texts, heatmaps_of
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps
from ..maps.presets import PRESETS, Preset
from ..maps.requirements import capture_settings, columns_among, kept_columns
from ..models.call_facts import images_a_prompt
from ..models.demos import model_name
from ..models.finite import check_maps
from ..models.layers import find_denoiser
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import call_pipeline, images_of, one_each, turn
from ..models.reading import read_prompts
from ..models.videos import frame_rate
from ..prompts.tokens import Prompt
from .imagerun import Further, ImageRun
from .run import Run
from .settings import Captured, RunSettings
from .stops import settled, stop_of, with_early

if TYPE_CHECKING:
    from PIL import Image


def sample(
    pipe: Pipeline,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    options: Options,
    capture_options: Options | None = None,
    *,
    preset: Preset = PRESETS["default"],
    ask: str | None = None,
    early: bool = False,
) -> Run:
    """:func:`generate` for prompts that have been read and options that have been checked.

    ``seeds`` has one for each image, in the order of the pipeline; ``capture_options`` are those of
    :func:`capture_settings` where they are left out. With ``early`` the steps before those that
    the preset reads are kept as well, for a run that may be stopped.

    Raises:
        NotFiniteError: an image or a map holds NaN or infinity; the message says what to try.
    """
    settings = capture_options or capture_settings(pipe, preset, prompts, options)
    asked = None if ask is None else _Asked(pipe, ask, preset, options)
    order = _Order(pipe, prompts, seeds, options, preset, asked)
    watched = _watch(order, settings)
    drawn = _draw(order, with_early(watched) if early else watched)
    return _describe(order, drawn, _make_maps(order, drawn))


@dataclass(frozen=True)
class _Order:
    """A run that is wanted; see :func:`sample`."""

    pipe: Pipeline
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    options: Options
    preset: Preset
    asked: _Asked | None


@dataclass(frozen=True)
class _Drawn:
    """What the pipeline made under its captures.

    Attributes:
        stores: what each capture holds, by the text that it is of, each checked.
        images: one an image of the run; the middle frames of videos.
        videos: the videos; None where they are images.
        result: what the pipeline returned.
    """

    stores: Mapping[str, MapStore]
    images: Sequence[Image.Image]
    videos: Sequence[Video] | None
    result: Any


class _Maps(NamedTuple):
    """The maps of a run: of the prompt, and heatmaps of ``"negative"`` and ``"asked"`` texts."""

    layers: LayerMaps
    heatmaps: list[Heatmaps]
    texts: dict[str, list[Heatmaps]]


def _watch(order: _Order, settings: Options) -> dict[str, dict[str, Any]]:
    """Return what is captured, each in a store of its own: the options of each capture.

    ``"prompt"``, and where asked for ``"self"``, the self-attention that refines, ``"negative"``
    and ``"asked"``. All are known before anything runs.
    """
    settings, preset = dict(settings), order.preset
    both = settings.pop("branch", "conditional") == "both"
    found = {"prompt": settings}
    # The columns of self-attention are the image's own cells: those of words do not apply.
    if preset.refine and "refine" not in settings:
        kept = ("steps", "dtype", "device")
        alike = {name: settings[name] for name in kept if name in settings}
        found["self"] = {**alike, "kinds": ("self",), "layers": refining(order.pipe)}
    if both:  # a capture of its own, since some pipelines run the two in turn
        own: dict[str, object] = {"branch": "unconditional", "tokens": None, "among": None}
        if preset.among_words or preset.compares_words:
            read = read_negative(order.pipe, order.options, len(order.prompts))
            images = images_a_prompt(order.pipe, order.options)
            own["among"] = [columns_among(preset, one) for one in read for _ in range(images)]
        found["negative"] = {**settings, **own}
    if order.asked is not None:
        found["asked"] = {**settings, **order.asked.settings}
    return found


def _draw(order: _Order, watched: Mapping[str, Options]) -> _Drawn:
    """Run the pipeline once, under all captures."""
    pipe, options = order.pipe, order.options
    with turn(pipe), ExitStack() as captures:
        stores = {of: captures.enter_context(capture(pipe, **kept)) for of, kept in watched.items()}
        for store in stores.values():
            store.checks_itself = False
        texts = [prompt.text for prompt in order.prompts]
        result = call_pipeline(pipe, texts, order.seeds, options)
    made = images_of(result)
    stores = settled(stores, made)
    if not stores["prompt"].is_video:
        return _Drawn(stores, made, None, result)
    videos = [Video(frames, frame_rate(pipe, options)) for frames in made]
    return _Drawn(stores, [video[video.middle] for video in videos], videos, result)


def _make_maps(order: _Order, drawn: _Drawn) -> _Maps:
    """Make the heatmaps of the prompt and of the texts beside it.

    NaN is refused here, where it can still be said what made it.
    """
    pipe, options, preset, stores = order.pipe, order.options, order.preset, drawn.stores
    for of in {"prompt", "negative"} & set(stores):
        check_texts(stores[of], preset)
    layers = stores["prompt"].layer_maps(preset, stores.get("self"))
    named = {name: layer.maps for name, layer in layers.layers.items()}
    own = {} if layers.affinity is None else {"self-attention": layers.affinity}
    check_maps(named | own, pipe, options)
    texts: dict[str, list[Heatmaps]] = {}
    if "negative" in stores:
        read = read_negative(pipe, options, len(order.prompts), stores["negative"].n_text)
        texts["negative"] = _beside(stores["negative"], layers, preset, read)
    if order.asked is not None:
        texts["asked"] = _beside(stores["asked"], layers, preset, [order.asked.prompt])
    for name, what in (("negative", "negative prompt"), ("asked", "ask")):
        for heatmaps in texts.get(name, ()):
            check_maps({what: heatmaps.maps}, pipe, options)
    return _Maps(layers, heatmaps_of(stores["prompt"], layers, preset, order.prompts), texts)


def _describe(order: _Order, drawn: _Drawn, maps: _Maps) -> Run:
    """Say what ``run.json`` will say, and give each image a run of its own, of views of what the
    whole batch holds."""
    store, preset, videos = drawn.stores["prompt"], order.preset, drawn.videos
    blanked, stopped = _blanked(drawn.result), stop_of(store, preset)
    if stopped is not None:
        stopped.tell()
    asked = None if order.asked is None else order.asked.prompt.text
    common = replace(_described(order.pipe, store, order.options), asked=asked, stopped=stopped)
    columns = kept_columns(preset, order.prompts, store.keep.refine)
    has_no_padding = columns and store.tokens == tuple(columns)
    image_runs = []
    for i, settings in enumerate(_each_own(common, order, drawn)):
        heatmaps, video = maps.heatmaps[i], None if videos is None else videos[i]
        own = {name: found[i] for name, found in maps.texts.items()}
        more = {name: Further(one.prompt.text, one.occurrences()) for name, one in own.items()}
        how, layers = replace(settings, blanked=i in blanked or None), maps.layers.image(i)
        details = details_of(store, i, heatmaps)
        one = ImageRun(drawn.images[i], heatmaps, layers, how, details, more, own, video)
        if has_no_padding:  # its own columns, whatever is drawn with it
            one = one.keep(kept_columns(preset, [heatmaps.prompt], store.keep.refine) or ())
        image_runs.append(one)
    return Run(image_runs, store, maps.layers)


def _each_own(common: RunSettings, order: _Order, drawn: _Drawn) -> list[RunSettings]:
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


class _Asked:
    """A text that is asked about: as the model reads it, and how its maps are captured."""

    def __init__(self, pipe: Pipeline, text: str, preset: Preset, options: Options):
        text = " ".join(text.replace(",", " ").split())  # a comma would take part in the softmax
        [self.prompt] = read_prompts(pipe, text, **options)
        columns = columns_among(preset, self.prompt)
        self.settings: dict[str, object] = {
            "text_states": encode_text(pipe, text, options),
            "tokens": None if preset.needs_all_columns else columns,
        }
        # in joint attention the image's own columns compete with the words already
        is_joint = any(layer.kind == "joint" for layer in find_denoiser(pipe).layers)
        if preset.compares_words or not is_joint:
            self.settings["among"] = [columns]


def _beside(
    store: MapStore, layers: LayerMaps, preset: Preset, prompts: Sequence[Prompt]
) -> list[Heatmaps]:
    """The heatmaps of another text, refined, where that is asked, along the same images."""
    own = store.layer_maps(replace(preset, refine=None, among_words=False))
    # Every text is smoothed along the image's self-attention, which was captured once.
    own = replace(own, affinity=layers.affinity, affinity_grid=layers.affinity_grid)
    return heatmaps_of(store, own, preset, prompts)


def read_negative(
    pipe: Pipeline, options: Options, prompts: int, columns: int | None = None
) -> list[Prompt]:
    """The negative prompts of a run, one a prompt, as the model reads them."""
    texts = one_each(options["negative_prompt"], prompts)
    return read_prompts(pipe, texts, columns, negative=True, **options)


def _blanked(result: object) -> list[int]:
    """The images that the pipeline's safety checker blanked, with a warning."""
    flags = getattr(result, "nsfw_content_detected", None) or []
    blanked = [i for i, flag in enumerate(flags) if flag]
    if blanked:
        warn(
            f"The pipeline's safety checker blanked image(s) {blanked}; their heatmaps are of what "
            "was generated before that.",
            SdattnWarning,
        )
    return blanked


def _described(pipe: Pipeline, store: MapStore, options: Options) -> RunSettings:
    """What all images of a call have in common."""
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
            key
            for key, value in options.items()
            if not isinstance(value, plain) and key != "negative_prompt"  # which each image has
        ),
        device=device_of(pipe).type,
        dtype=str(pipe.dtype).removeprefix("torch."),
        timesteps=store.timesteps,
        captured=Captured(steps=store.steps, heads=store.heads),
        crop=store.crop,
        versions={
            "python": platform.python_version(),
            "sdattn": __version__,
            **{name: version(name) for name in ("torch", "diffusers", "transformers")},
        },
    )
