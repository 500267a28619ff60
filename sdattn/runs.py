"""`generate()`: run a pipeline with capture; `Run`: what came out, ready to be saved."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import __version__
from .asking import encode_text
from .capture import capture
from .causes import knockouts, prepare
from .files import check_target, save_run
from .heatmap import Heatmap
from .heatmaps import Heatmaps, heatmaps_of
from .layermaps import LayerMaps, layer_maps
from .maps import MapStore
from .pipelines import is_demo
from .presets import PRESETS, Preset, preset_of
from .prompts import read_prompts
from .running import call_pipeline, checked_options, one_each, pictures_of
from .tokens import Prompt
from .watching import capture_settings, checked_capture, columns_around

if TYPE_CHECKING:
    from PIL import Image

CAUSAL_STEPS = (0.5, 1.0)  # the layout stays, so what changes is what the word does in its place


@dataclass
class Run:
    """What :func:`generate` made.

    Attributes:
        images: PIL, one or more a prompt.
        heatmaps: those of each image.
        store: the captured maps.
        layers: the maps of the layers that see the text, as the preset reads them.
        info: the settings of each image's run, as ``run.json`` holds them.
        negative_heatmaps: those of each image's negative prompt, where both branches were asked
            for; else empty.
        asked_heatmaps: those of the other text that was asked about; else empty.
        causal_heatmaps: for each image where it changes without each of the prompt's words, see
            :func:`sdattn.knockout`, where that was asked for; else empty.
    """

    images: list[Image.Image]
    heatmaps: list[Heatmaps]
    store: MapStore
    layers: LayerMaps
    info: list[dict[str, Any]]
    negative_heatmaps: list[Heatmaps] = field(default_factory=list, kw_only=True)
    asked_heatmaps: list[Heatmaps] = field(default_factory=list, kw_only=True)
    causal_heatmaps: list[list[Heatmap]] = field(default_factory=list, kw_only=True)

    def save(self, folder: str | Path, *, force: bool = False) -> list[Path]:
        """Write a run's folder, see :func:`sdattn.files.save_run`; with several images one each,
        ``folder-0``, ``folder-1`` and so on. Returns the folders."""
        folders = run_folders(folder, len(self.images))
        for path in folders:  # before any is written
            check_target(path, force=force)
        for i, path in enumerate(folders):
            self.save_image(i, path, force=force)
        return folders

    def save_image(self, number: int, folder: Path, *, force: bool = False) -> None:
        """Write the folder of one of the images."""
        heatmaps, layers = self.heatmaps[number], self.layers.image(number)
        more: dict[str, tuple[str, Sequence[Heatmap]]] = {}
        for name, maps in (("negative", self.negative_heatmaps), ("asked", self.asked_heatmaps)):
            if maps:
                more[name] = maps[number].prompt.text, maps[number].occurrences()
        if self.causal_heatmaps:
            more["causal"] = heatmaps.prompt.text, self.causal_heatmaps[number]
        image, info = self.images[number], self.info[number]
        save_run(folder, image, heatmaps, layers, info, more=more, force=force)


def run_folders(folder: str | Path, number: int) -> list[Path]:
    """The folders of a run's images: ``folder``, or ``folder-0``, ``folder-1`` and so on."""
    return [Path(folder)] if number == 1 else [Path(f"{folder}-{i}") for i in range(number)]


def generate(
    pipe: Any,
    prompt: str | Sequence[str],
    *,
    seed: int = 0,
    words: Sequence[str] | None = None,
    preset: str | Preset = "default",
    refine: Literal["self"] | None = None,
    ask: str | None = None,
    causal: bool = False,
    capture_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Run a pipeline and see where each word of the prompt went.

    Args:
        pipe: a pipeline that :func:`sdattn.capture` and :func:`sdattn.read_prompts` know. The
            frames of a video are images.
        prompt: one prompt or several.
        seed: of the first image; the next image has the next seed. Noise is drawn on the CPU, so
            that it does not depend on the device.
        words: keep the maps of these words and phrases only.
        preset: of :data:`sdattn.presets.PRESETS`, or one of your own. What it reads is captured:
            by default the mean over the second half of the steps.
        refine: ``"self"``: sharper maps, see :mod:`sdattn.refinement`; 12.6 MB more an image for
            SD 1.x at 512x512.
        ask: another text, ``"wheel hat"``: where the picture would attend to its words, against
            each other and ``<sos>`` and ``<eos>``. UNets only. It holds as much as the maps of so
            many columns: 4 for these, 0.4 MB an image for SD 1.x at 512x512, however many steps.
        causal: draw the picture again without each of the words, in the second half of the steps,
            and see where it changes, see :func:`sdattn.knockout`; a picture more for each word.
        capture_options: handed to :func:`sdattn.capture`, ``{"layers": ("mid", "up")}`` say. With
            ``{"branch": "both"}`` the negative prompt gets heatmaps too.
        options: handed to the pipeline: ``num_inference_steps``, ``guidance_scale``,
            ``negative_prompt``, ``height``, ``width``, ``num_images_per_prompt`` and so on.

    Returns:
        Run: images and heatmaps, ``num_images_per_prompt`` for each prompt, in order.

    Raises:
        ValueError: an empty prompt, a size or a number of steps that cannot be, capture options
            that the preset cannot do with.
        KeyError: a word that is in none of the prompts.
        TypeError: a model that cannot be refined, asked, or have words knocked out.
    """
    options = checked_options(pipe, options)
    read = read_prompts(pipe, prompt, **options)
    chosen = preset_of(preset, refine)
    watch = checked_capture(capture_options or {}, words, read)
    if watch.get("branch") == "both" and not options.get("negative_prompt"):
        raise ValueError("branch='both' shows the words of a negative prompt. Pass one.")
    settings = capture_settings(pipe, chosen, read, options, watch)
    if causal:  # refuse now what would be refused after the picture
        prepare(pipe, read[0].text, seed, None, CAUSAL_STEPS, _of_one_image(options))
    seeds = [seed + i for i in range(len(read) * options.get("num_images_per_prompt", 1))]
    run = sample(pipe, read, seeds, options, settings, preset=chosen, ask=ask)
    if causal:
        try:
            run.causal_heatmaps = _causes(pipe, run, seeds, words, options)
        except RuntimeError as error:  # the picture and its maps are there
            warnings.warn(f"There are no causal maps: {error}", stacklevel=2)
    return run


def sample(
    pipe: Any,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    capture_options: Mapping[str, Any] | None = None,
    *,
    preset: Preset = PRESETS["default"],
    ask: str | None = None,
) -> Run:
    """:func:`generate` for prompts that have been read and options that have been checked.

    ``seeds`` has one for each image, in the order of the pipeline; ``capture_options`` are those of
    :func:`capture_settings` where they are left out.
    """
    settings = dict(capture_options or capture_settings(pipe, preset, prompts, options))
    asked = None if ask is None else _Asked(pipe, ask, preset, options)
    both = settings.pop("branch", "conditional") == "both"
    with ExitStack() as captures:
        store = captures.enter_context(capture(pipe, **settings))
        if both:  # a capture of its own, since some pipelines run the two in turn
            others = {**settings, "branch": "unconditional", "tokens": None, "among": None}
            of_negative = captures.enter_context(capture(pipe, **others))
        if asked is not None:
            of_asked = captures.enter_context(capture(pipe, **settings | asked.settings))
        result = call_pipeline(pipe, [one.text for one in prompts], seeds, options)
    blanked = _blanked(result)
    layers = layer_maps(store, preset)
    maps = heatmaps_of(store, layers, preset, prompts)
    negative: list[Heatmaps] = []
    if both:
        texts = one_each(options["negative_prompt"], len(prompts))
        read = read_prompts(pipe, texts, of_negative.n_text, negative=True, **options)
        negative = _beside(of_negative, layers, preset, read)
    images = pictures_of(result)
    info = _infos(pipe, store, images, prompts, seeds, options)
    for i in blanked:
        info[i]["blanked"] = True
    run = Run(images, maps, store, layers, info, negative_heatmaps=negative)
    if asked is not None:
        run.asked_heatmaps = _beside(of_asked, layers, preset, [asked.prompt])
        for one in info:
            one["asked"] = asked.prompt.text
    return run


def _infos(
    pipe: Any,
    store: MapStore,
    images: Sequence[Image.Image],
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The settings of each image's run."""
    common = _describe(pipe, store, options)
    a_prompt, a_seed = len(images) // len(prompts), len(images) // len(seeds)
    info = [
        {
            "prompt": prompts[i // a_prompt].text,
            "seed": seeds[i // a_seed],  # the frames of a video share theirs
            **common,
            "size": [*image.size],
        }
        for i, image in enumerate(images)
    ]
    negatives = options.get("negative_prompt")
    if negatives is not None:
        texts = one_each(negatives, len(prompts))
        for i, one in enumerate(info):
            one["options"] = {**one["options"], "negative_prompt": texts[i // a_prompt]}
    return info


class _Asked:
    """A text that is asked about: as the model reads it, and how its maps are captured."""

    def __init__(self, pipe: Any, text: str, preset: Preset, options: Mapping[str, Any]):
        [self.prompt] = read_prompts(pipe, text, **options)
        columns = columns_around(self.prompt)
        self.settings = {
            "text_states": encode_text(pipe, text, options),
            "among": [columns],
            "tokens": None if preset.contrast else columns,
            "kinds": ("cross",),
        }


def _beside(
    store: MapStore, layers: LayerMaps, preset: Preset, prompts: Sequence[Prompt]
) -> list[Heatmaps]:
    """The heatmaps of another text, refined, where that is asked, along the same pictures."""
    own = layer_maps(store, replace(preset, refine=None, among_words=False))
    own = replace(own, affinity=layers.affinity, affinity_grid=layers.affinity_grid)
    return heatmaps_of(store, own, preset, prompts)


def _of_one_image(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in options.items() if name != "num_images_per_prompt"}


def _causes(
    pipe: Any,
    run: Run,
    seeds: Sequence[int],
    words: Sequence[str] | None,
    options: Mapping[str, Any],
) -> list[list[Heatmap]]:
    """For each image the maps of :func:`sdattn.causes.knockouts` of its words."""
    found = []
    for heatmaps, seed in zip(run.heatmaps, seeds, strict=True):
        chosen = [w for w in words or heatmaps.words if words is None or w in heatmaps]
        asked = list(dict.fromkeys(chosen))
        done = knockouts(
            pipe, heatmaps.prompt.text, asked, seed, steps=CAUSAL_STEPS, **_of_one_image(options)
        )
        found.append([one.heatmap for one in done])
    return found


def _blanked(result: Any) -> list[int]:
    """The images that the pipeline's safety checker blanked, with a warning."""
    flags = getattr(result, "nsfw_content_detected", None) or []
    blanked = [i for i, flag in enumerate(flags) if flag]
    if blanked:
        warnings.warn(
            f"The pipeline's safety checker blanked image(s) {blanked}; their heatmaps are of what "
            "was generated before that.",
            stacklevel=4,
        )
    return blanked


def _describe(pipe: Any, store: MapStore, options: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None))
    return {
        "model": "demo" if is_demo(pipe) else str(getattr(pipe, "name_or_path", "")),
        "pipeline": type(pipe).__name__,
        "scheduler": type(pipe.scheduler).__name__,
        "options": {key: value for key, value in options.items() if isinstance(value, plain)},
        "device": pipe.device.type,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "timesteps": store.timesteps,
        "versions": {
            "python": platform.python_version(),
            "sdattn": __version__,
            **{name: version(name) for name in ("torch", "diffusers", "transformers")},
        },
    }
