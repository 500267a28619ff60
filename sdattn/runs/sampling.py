"""One run of a pipeline under its captures: `sample()`, on which `generate()`, `explain()`,
`edit()` and the batches stand."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import SdattnWarning, warn
from ..files.films import Film
from ..files.version import __version__
from ..hooks.other_text import encode_text
from ..loading.devices import device_of
from ..loading.options import options_of
from ..maps.aggregation import refining
from ..maps.capture import MapStore, capture
from ..maps.details import details_of
from ..maps.from_stores import heatmaps_of
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps, layer_maps
from ..maps.presets import PRESETS, Preset
from ..maps.requirements import capture_settings, columns_among, kept_columns
from ..models.call_facts import images_a_prompt
from ..models.demos import model_name
from ..models.films import frame_rate
from ..models.finite import check_maps
from ..models.layers import find_denoiser
from ..models.pipeline_call import call_pipeline, one_each, pictures_of, turn
from ..models.reading import read_prompts
from ..prompts.tokens import Prompt
from .imagerun import Further, ImageRun
from .run import Run
from .settings import Captured, RunSettings
from .stops import settled, stop_of, with_early

if TYPE_CHECKING:
    from PIL import Image


def sample(
    pipe: Any,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    capture_options: Mapping[str, Any] | None = None,
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
        NotFiniteError: a picture or a map holds NaN or infinity; the message says what to try.
    """
    settings = capture_options or capture_settings(pipe, preset, prompts, options)
    # What to capture: the prompt, and beside it self-attention, the negative prompt, another text,
    # each in a store of its own. All are known before anything runs.
    asked = None if ask is None else _Asked(pipe, ask, preset, options)
    watched = _watched(pipe, prompts, preset, options, settings, asked)
    watched = with_early(watched) if early else watched
    # One run of the pipeline under all of these captures.
    with turn(pipe), ExitStack() as captures:
        stores = {of: captures.enter_context(capture(pipe, **kept)) for of, kept in watched.items()}
        for store in stores.values():
            store.checks_itself = False
        result = call_pipeline(pipe, [prompt.text for prompt in prompts], seeds, options)
    made = pictures_of(result)
    stores = settled(stores, made)
    # The prompt's maps. NaN is refused here, where it can still be said what made it.
    store = stores["prompt"]
    films = [Film(frames, frame_rate(pipe, options)) for frames in made] if store.is_film else None
    images = made if films is None else [film[film.middle] for film in films]
    layers = layer_maps(store, preset, stores.get("self"))
    check_maps(_named(layers), pipe, options)
    # What stands beside them: the heatmaps of other texts over the same pictures.
    blanked = _blanked(result)
    texts: dict[str, list[Heatmaps]] = {}
    if "negative" in stores:
        read = read_negative(pipe, options, len(prompts), stores["negative"].n_text)
        texts["negative"] = _beside(stores["negative"], layers, preset, read)
    if asked is not None:
        texts["asked"] = _beside(stores["asked"], layers, preset, [asked.prompt])
    for name, what in (("negative", "negative prompt"), ("asked", "ask")):
        for heatmaps in texts.get(name, ()):
            check_maps({what: heatmaps.maps}, pipe, options)
    # What run.json will say: what all images share, then each image's own.
    asked_text = None if asked is None else asked.prompt.text
    stopped = stop_of(store, preset)
    if stopped is not None:
        stopped.tell()
    common = replace(_described(pipe, store, options), asked=asked_text, stopped=stopped)
    settings_of_images = _each_own(common, images, films, prompts, seeds, options)
    # A run for each image, of views of what the whole batch holds.
    image_runs = []
    for i, heatmaps in enumerate(heatmaps_of(store, layers, preset, prompts)):
        own = {name: found[i] for name, found in texts.items()}
        how = replace(settings_of_images[i], blanked=i in blanked or None)
        more = {name: Further(maps.prompt.text, maps.occurrences()) for name, maps in own.items()}
        details = details_of(store, i, heatmaps)
        film = None if films is None else films[i]
        one = ImageRun(images[i], heatmaps, layers.image(i), how, details, more, own, film)
        own_columns = kept_columns(preset, prompts, store.keep.refine)
        if own_columns and store.tokens == tuple(own_columns):  # padding was left out
            # its own, whatever is drawn with it
            one = one.keep(kept_columns(preset, [heatmaps.prompt], store.keep.refine) or ())
        image_runs.append(one)
    return Run(image_runs, store, layers)


def _named(layers: LayerMaps) -> dict[str, Tensor]:
    maps = {name: layer.maps for name, layer in layers.layers.items()}
    return maps if layers.affinity is None else {**maps, "self-attention": layers.affinity}


def _watched(
    pipe: Any,
    prompts: Sequence[Prompt],
    preset: Preset,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    asked: _Asked | None,
) -> dict[str, dict[str, Any]]:
    """What is captured of one run, each in a store of its own: the options of each capture."""
    settings = dict(settings)
    both = settings.pop("branch", "conditional") == "both"
    found = {"prompt": settings}
    # The columns of self-attention are the picture's own cells: those of words do not apply.
    if preset.refine and "refine" not in settings:
        kept = ("steps", "dtype", "device")
        alike = {name: settings[name] for name in kept if name in settings}
        found["self"] = {**alike, "kinds": ("self",), "layers": refining(pipe)}
    if both:  # a capture of its own, since some pipelines run the two in turn
        own: dict[str, Any] = {"branch": "unconditional", "tokens": None, "among": None}
        if preset.among_words or preset.compares_words:
            read = read_negative(pipe, options, len(prompts))
            images = images_a_prompt(pipe, options)
            own["among"] = [columns_among(preset, one) for one in read for _ in range(images)]
        found["negative"] = {**settings, **own}
    if asked is not None:
        found["asked"] = {**settings, **asked.settings}
    return found


def _each_own(
    common: RunSettings,
    images: Sequence[Image.Image],
    films: Sequence[Film] | None,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    options: Mapping[str, Any],
) -> list[RunSettings]:
    """The settings of each image's run."""
    a_prompt, a_seed = len(images) // len(prompts), len(images) // len(seeds)
    negatives = options.get("negative_prompt")
    texts = None if negatives is None else one_each(negatives, len(prompts))
    own = []
    for i, image in enumerate(images):
        negative = {} if texts is None else {"negative_prompt": texts[i // a_prompt]}
        settings = replace(
            common,
            prompt=prompts[i // a_prompt].text,
            seed=seeds[i // a_seed],
            size=image.size,
            frames=None if films is None else len(films[i]),
            frame_rate=None if films is None else films[i].rate,
            options={**(common.options or {}), **negative},
        )
        own.append(settings)
    return own


class _Asked:
    """A text that is asked about: as the model reads it, and how its maps are captured."""

    def __init__(self, pipe: Any, text: str, preset: Preset, options: Mapping[str, Any]):
        text = " ".join(text.replace(",", " ").split())  # a comma would take part in the softmax
        [self.prompt] = read_prompts(pipe, text, **options)
        columns = columns_among(preset, self.prompt)
        self.settings: dict[str, Any] = {
            "text_states": encode_text(pipe, text, options),
            "tokens": None if preset.needs_all_columns else columns,
        }
        # in joint attention the picture's own columns compete with the words already
        is_joint = any(layer.kind == "joint" for layer in find_denoiser(pipe).layers)
        if preset.compares_words or not is_joint:
            self.settings["among"] = [columns]


def _beside(
    store: MapStore, layers: LayerMaps, preset: Preset, prompts: Sequence[Prompt]
) -> list[Heatmaps]:
    """The heatmaps of another text, refined, where that is asked, along the same pictures."""
    own = layer_maps(store, replace(preset, refine=None, among_words=False))
    # Every text is smoothed along the picture's self-attention, which was captured once.
    own = replace(own, affinity=layers.affinity, affinity_grid=layers.affinity_grid)
    return heatmaps_of(store, own, preset, prompts)


def read_negative(
    pipe: Any, options: Mapping[str, Any], prompts: int, columns: int | None = None
) -> list[Prompt]:
    """The negative prompts of a run, one a prompt, as the model reads them."""
    texts = one_each(options["negative_prompt"], prompts)
    return read_prompts(pipe, texts, columns, negative=True, **options)


def _blanked(result: Any) -> list[int]:
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


def _described(pipe: Any, store: MapStore, options: Mapping[str, Any]) -> RunSettings:
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
