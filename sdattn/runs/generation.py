"""`generate()`: run a pipeline and see where each word of the prompt went."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..control import knockouts
from ..control.knockouts import KnockoutPlan
from ..errors import SdattnWarning, warn
from ..maps.presets import Preset
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import one_at_a_time, options_of_image
from ..models.values import checked_part, checked_whole, seeds_of
from .candidates import best_of, checked_choice
from .imagerun import Further, ImageRun
from .preparing import Order, keep_small_steps, prepare
from .run import Run
from .sampling import sample

CAUSAL_STEPS = (0.5, 1.0)  # the layout stays, so what changes is what the word does in its place


@one_at_a_time
def generate(
    pipe: Pipeline | str | Path,
    prompt: str | Sequence[str],
    *,
    seed: int | Sequence[int] | None = 0,
    words: Sequence[str] | None = None,
    preset: str | Preset = "default",
    refine: Literal["self"] | None = None,
    ask: str | None = None,
    causal: bool = False,
    spots: bool = False,
    candidates: int = 1,
    decide_at: float | None = None,
    at_once: bool = False,
    capture_options: Options | None = None,
    max_bytes: int | None = None,
    **options: Any,
) -> Run:
    """Run a pipeline and show where each word of the prompt went.

    Args:
        pipe: a pipeline for images or videos that :func:`sdattn.capture` and
            :func:`sdattn.read_prompts` know; or a model to load for this call alone, ``"demo"``,
            see :func:`sdattn.load_pipeline`.
        prompt: one prompt or several.
        seed: seed of the first image, from 0 to 2**63 - 1; each later image adds 1. A list has each
            image's own; None draws one at random, which ``run.seeds`` and ``run.json`` record. The
            noise is drawn on the CPU, so it does not depend on the device.
        words: keep the maps of these words and phrases only.
        preset: a name in :data:`sdattn.maps.presets.PRESETS`, or a preset of your own. It decides
            what is captured: by default the mean over the second half of the steps, for joint
            attention over the last quarter.
        refine: ``"self"``: sharper maps, see :mod:`sdattn.maps.aggregation`. Takes 12.6 MB more per
            image for SD 1.x at 512x512, nothing more for joint attention.
        ask: another text, e.g. ``"wheel, hat"``: where the image would attend to its words,
            measured against each other, ``<sos>`` and ``<eos>``; commas are left out. In the
            default preset it holds as much as that many columns: 4 for this text, 0.4 MB per image
            for SD 1.x at 512x512, for any number of steps. In joint attention (SD3, FLUX) it
            measures the attention that the text would get as a prompt, in about twice the time, see
            :mod:`sdattn.look.other_text`.
        causal: draw the image again without each word, in the second half of the steps, and show
            where it changes, see :func:`sdattn.knockout`; one more image per word.
        spots: keep where an even grid of spots of the image looked, at most 16 along its longer
            side, in ``run[0].details.spots``; the page shows it at a click. Not for videos.
        candidates: number of seeds, from ``seed`` on or all in its list. The one that is drawn has
            the highest :meth:`sdattn.Heatmaps.score` (of ``words``, if given). The image is
            bit for bit the one of this seed alone. ``run.candidates`` has all scores. For one image
            of one prompt.
        decide_at: share of the steps by which candidates are judged, one after another; then they
            are stopped and the best goes on, for ``candidates * decide_at + 1 - decide_at`` times
            the steps of one image. The model runs for its first steps again, ``candidates *
            decide_at + 1`` times in all, if one of them is kept, a callback may stop the run, or
            foreign hooks or processors are in the model. With 1.0 all are drawn whole, once. By
            default 0.4; 1.0 for a run of one step, or of a pipeline that cannot be stopped.
        at_once: draw the candidates up to ``decide_at`` in one batch, in as much more memory; the
            best is drawn again from its first step.
        capture_options: options for :func:`sdattn.capture`, e.g. ``{"layers": ("mid", "up")}``.
            With ``{"branch": "both"}`` the negative prompt gets heatmaps too. A run of images whose
            maps of each step take at most 16 MB keeps each step, unless ``steps`` or the seed is
            chosen.
        max_bytes: bytes that the maps of each text, and of ``spots``, may take while the pipeline
            runs. A run whose maps would take more is refused before its first step. Default: no
            limit.
        options: options for the pipeline: ``num_inference_steps``, ``guidance_scale``,
            ``negative_prompt``, ``height``, ``width``, ``num_images_per_prompt`` and so on.

    Returns:
        Run: images and heatmaps, ``num_images_per_prompt`` for each prompt, in order.

    Raises:
        ValueError: no prompt, an empty or too long one, an impossible seed, size or number of steps
            or images, candidates for several images, more images than memory holds, maps beyond
            ``max_bytes``, or capture options that the preset cannot use.
            :class:`sdattn.NotFiniteError`, a subclass, if an image or map came out as NaN or
            infinity.
        KeyError: a word is in none of the prompts.
        TypeError: no pipeline, or no text; the model cannot be refined, asked, or have words
            knocked out.

    A run that is stopped (``pipe._interrupt = True``) keeps its images and the maps so far; a
    :class:`sdattn.CaptureWarning` and ``run.json`` say from which steps. If a callback may stop the
    run (``callback_on_step_end``), the steps before those that the preset reads are kept as well,
    in as much memory again; otherwise a run that ends before them raises a CaptureError.

    Every error after the last step, of any kind, has the finished images in its ``images``.

    A ``UserWarning`` names the model's own size if a side that was asked for is over twice or under
    half of its own, and with a demo model the words of the prompt that it never learnt.
    """
    count = checked_whole("candidates", candidates)
    if decide_at is not None:
        decide_at = checked_part("decide_at", decide_at)
    seeds = seeds_of(seed, count) if count > 1 else []
    order = prepare(
        pipe,
        prompt,
        options,
        seed=seeds[0] if seeds else seed,
        words=words,
        preset=preset,
        refine=refine,
        ask=ask,
        spots=spots,
        capture_options=capture_options,
        max_bytes=max_bytes,
        videos=not causal,
    )
    share = checked_choice(order, decide_at, at_once) if seeds else 1.0
    if "steps" not in (capture_options or {}) and share == 1:
        order = keep_small_steps(order)
    plans = _causal_plans(order) if causal else []
    if seeds:
        run = best_of(order, seeds, share, at_once, words)
        plans = [replace(plan, seed=run.candidates[0].seed) for plan in plans]
    else:
        run = sample(order)
    return _with_all_causes(run, plans, words)


def _with_all_causes(run: Run, plans: Sequence[KnockoutPlan], words: Sequence[str] | None) -> Run:
    """Draw each image again without each word, if causal maps were asked for."""
    if plans and run[0].settings.stopped:
        text = "There are no causal maps, which are further images: the run was stopped."
        warn(text, SdattnWarning)
    elif plans:
        with_causes = []
        try:
            for image_run, plan in zip(run, plans, strict=True):
                with_causes.append(_with_causes(image_run, plan, words))
            run.image_runs = with_causes
        except Exception as error:  # the images and their maps are there
            warn(f"There are no causal maps: {error}", SdattnWarning)
    return run


def _causal_plans(order: Order) -> list[KnockoutPlan]:
    """Return the knockouts of each image, checked before any image is drawn."""
    pipe, images, prompts = order.facts.pipe, len(order.seeds), len(order.prompts)
    plans = []
    for i, seed in enumerate(order.seeds):
        of_image = options_of_image(order.options, i, images=images, prompts=prompts)
        text = order.prompts[i // (images // prompts)].text
        plans.append(knockouts.prepare(pipe, text, seed, steps=CAUSAL_STEPS, options=of_image))
    return plans


def _with_causes(image_run: ImageRun, plan: KnockoutPlan, words: Sequence[str] | None) -> ImageRun:
    """Return the run with a map for each word, see :func:`sdattn.knockout`."""
    heatmaps = image_run.heatmaps
    asked = [word for word in words or heatmaps if word in heatmaps]
    if not asked:
        return image_run
    maps = [knockout.heatmap for knockout in knockouts.draw_without(plan, asked)]
    more = {**image_run.more, "causal": Further(heatmaps.prompt.text, maps)}
    return replace(image_run, more=more)
