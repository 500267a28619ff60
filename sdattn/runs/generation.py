"""`generate()`: run a pipeline and see where each word of the prompt went."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..control import knockout_plan, knockouts
from ..control.knockout_plan import KnockoutPlan
from ..errors import InvalidValueError, OptionError, SdattnWarning, warn
from ..loading.options import lora_names, options_of
from ..maps.presets import Preset, preset_for
from ..maps.requirements import capture_settings, checked_capture
from ..models.call_facts import images_a_prompt
from ..models.demos import demo_of
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import (
    checked_options,
    checked_seeds,
    one_at_a_time,
    options_of_image,
)
from ..models.reading import read_prompts
from ..prompts.tokens import Prompt
from .folder import check_target
from .imagerun import Further, ImageRun
from .run import Run, run_folders
from .sampling import read_negative, sample
from .stops import has_callback

CAUSAL_STEPS = (0.5, 1.0)  # the layout stays, so what changes is what the word does in its place


@one_at_a_time
def generate(
    pipe: Pipeline,
    prompt: str | Sequence[str],
    *,
    seed: int = 0,
    words: Sequence[str] | None = None,
    preset: str | Preset = "default",
    refine: Literal["self"] | None = None,
    ask: str | None = None,
    causal: bool = False,
    capture_options: Options | None = None,
    **options: Any,
) -> Run:
    """Run a pipeline and see where each word of the prompt went.

    Args:
        pipe: a pipeline that :func:`sdattn.capture` and :func:`sdattn.read_prompts` know. The
            frames of a video are images.
        prompt: one prompt or several.
        seed: of the first image, from 0 to 2**63 - 1; the next image has the next seed. Noise is
            drawn on the CPU, so that it does not depend on the device.
        words: keep the maps of these words and phrases only.
        preset: of :data:`sdattn.maps.presets.PRESETS`, or one of your own. What it reads is
            captured: by default the mean over the second half of the steps.
        refine: ``"self"``: sharper maps, see :mod:`sdattn.maps.aggregation`; 12.6 MB more an image
            for SD 1.x at 512x512, nothing more for joint attention.
        ask: another text, ``"wheel, hat"``: where the image would attend to its words, against
            each other and ``<sos>`` and ``<eos>``; commas are left out. In the default preset it
            holds as much as the maps of so many columns: 4 for these, 0.4 MB an image for SD 1.x at
            512x512, however many steps. In joint attention (SD3, FLUX) what it would pay to them as
            to a prompt, for about twice the time, see :mod:`sdattn.hooks.other_text`.
        causal: draw the image again without each of the words, in the second half of the steps,
            and see where it changes, see :func:`sdattn.knockout`; an image more for each word.
        capture_options: handed to :func:`sdattn.capture`, ``{"layers": ("mid", "up")}`` say. With
            ``{"branch": "both"}`` the negative prompt gets heatmaps too.
        options: handed to the pipeline: ``num_inference_steps``, ``guidance_scale``,
            ``negative_prompt``, ``height``, ``width``, ``num_images_per_prompt`` and so on.

    Returns:
        Run: images and heatmaps, ``num_images_per_prompt`` for each prompt, in order.

    Raises:
        ValueError: no prompt, one that is empty or too long, a seed, a size or a number of steps or
            images that cannot be, more images than memory holds, capture options that the preset
            cannot do with. A :class:`sdattn.NotFiniteError`, which is one too, where
            an image or a map came out as NaN or infinity.
        KeyError: a word that is in none of the prompts.
        TypeError: a model that cannot be refined, asked, or have words knocked out.

    A run that is stopped (``pipe._interrupt = True``) keeps its images and the maps that there
    are: a :class:`sdattn.CaptureWarning` and ``run.json`` say of which steps. Where a callback may
    stop it (``callback_on_step_end``), the steps before those that the preset reads are kept for
    that case, in as much memory again; else a CaptureError with the images in its ``images`` says
    that there are no maps of a run that ended before them.

    With a demo model a ``UserWarning`` names the words of the prompt that it never learnt.
    """
    plan = prepare(
        pipe,
        prompt,
        seed=seed,
        words=words,
        preset=preset,
        refine=refine,
        ask=ask,
        causal=causal,
        capture_options=capture_options,
        **options,
    )
    return plan.draw()


@dataclass(frozen=True)
class GenerationPlan:
    """A run that has been checked and not begun: what :func:`prepare` makes.

    Attributes:
        prompts: as the model reads them.
        seeds: one an image.
        options: of the pipeline's call.
        settings: of the capture.
        preset, ask, words: as of :func:`generate`.
        knockouts: one an image, where causal maps were asked for.
    """

    pipe: Pipeline
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    options: Options
    settings: Options
    preset: Preset
    ask: str | None
    words: Sequence[str] | None
    knockouts: Sequence[KnockoutPlan]

    def draw(self) -> Run:
        """Run the pipeline, and again without each word where causal maps were asked for."""
        given = self.seeds, self.options, self.settings
        early = has_callback(self.options)
        run = sample(self.pipe, self.prompts, *given, preset=self.preset, ask=self.ask, early=early)
        if self.knockouts and run[0].settings.stopped:
            text = "There are no causal maps, which are further images: the run was stopped."
            warn(text, SdattnWarning)
        elif self.knockouts:
            pairs = zip(run, self.knockouts, strict=True)
            try:
                run.image_runs = [_with_causes(*pair, self.words) for pair in pairs]
            except Exception as error:  # the images and their maps are there
                warn(f"There are no causal maps: {error}", SdattnWarning)
        return run


def prepare(
    pipe: Pipeline,
    prompt: str | Sequence[str],
    *,
    seed: int = 0,
    words: Sequence[str] | None = None,
    preset: str | Preset = "default",
    refine: Literal["self"] | None = None,
    ask: str | None = None,
    causal: bool = False,
    capture_options: Options | None = None,
    out: Path | None = None,
    force: bool = False,
    **options: Any,
) -> GenerationPlan:
    """All that :func:`generate` refuses, refused before anything runs; see there.

    Args:
        out, force: of :meth:`sdattn.Run.save`; folders that could not be written are refused too.
    """
    number = 1 if isinstance(prompt, str) else len(prompt)
    options = checked_options(pipe, options, prompts=number, videos=not causal)
    read = read_prompts(pipe, prompt, **options)
    if not read:
        raise OptionError("prompt", prompt, "there is none. Pass a text, or a list of some.")
    number = len(read) * images_a_prompt(pipe, options)
    seeds = checked_seeds(seed, number)
    for folder in run_folders(out, number) if out else ():
        check_target(folder, force=force)
    chosen = preset_for(pipe, preset, refine)
    watch = checked_capture(capture_options or {}, words, read)
    if watch.get("frames") is not None:
        text = "A run keeps all frames of a video. Choose `frames` with `capture()`."
        raise InvalidValueError(text)
    if watch.get("branch") == "both":
        if not options.get("negative_prompt"):
            text = "`branch='both'` shows the words of a negative prompt. Pass one."
            raise InvalidValueError(text)
        read_negative(pipe, options, len(read))
    settings = capture_settings(pipe, chosen, read, options, watch)
    texts = (word.text for prompt in read for word in prompt.words)
    demo = demo_of(pipe)
    if demo and (warning := demo.unlearnt(texts, lora_names(options_of(pipe)))):
        warn(warning, SdattnWarning)
    plans = _causal_plans(pipe, read, seeds, options) if causal else []
    return GenerationPlan(pipe, read, seeds, options, settings, chosen, ask, words, plans)


def _causal_plans(
    pipe: Pipeline, prompts: Sequence[Prompt], seeds: Sequence[int], options: Options
) -> list[KnockoutPlan]:
    """The knockouts of each image, checked before any image is drawn."""
    images, plans = len(seeds), []
    for i, seed in enumerate(seeds):
        own = options_of_image(options, i, images=images, prompts=len(prompts))
        text = prompts[i // (images // len(prompts))].text
        plans.append(knockout_plan.prepare(pipe, text, seed, None, CAUSAL_STEPS, own))
    return plans


def _with_causes(image_run: ImageRun, plan: KnockoutPlan, words: Sequence[str] | None) -> ImageRun:
    """With the maps of :func:`sdattn.control.knockouts.knockouts` of the image's words."""
    heatmaps = image_run.heatmaps
    asked = [word for word in words or heatmaps if word in heatmaps]
    if not asked:
        return image_run
    maps = [knockout.heatmap for knockout in knockouts.draw_without(plan, asked)]
    more = {**image_run.more, "causal": Further(heatmaps.prompt.text, maps)}
    return replace(image_run, more=more)
