"""`guide_missing()`: draw again what did not arrive, by Attend-and-Excite on those words alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidTypeError
from ..follow.run_part import Span
from ..models.pipeline import Pipeline
from ..models.pipeline_call import one_at_a_time
from ..runs.generation import generate
from ..runs.preparing import loaded_facts
from ..runs.run import Run
from .guiding import guide
from .losses import excite


@one_at_a_time
def guide_missing(
    pipe: Pipeline | str | Path,
    prompt: str,
    words: Sequence[str] | None = None,
    *,
    seed: int | None = 0,
    steps: Span = (0.3, 0.7),
    guiding: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Draw an image; if words are missing from it, draw it again under :func:`excite` for just
    these, and return the run with the higher :meth:`sdattn.Heatmaps.score`.

        run = sdattn.edit.guide_missing(pipe, "a cat, a dog and a car", seed=3)

    Args:
        pipe, prompt: as for :func:`guide`.
        words: words that should arrive (default: as for :meth:`sdattn.Heatmaps.score`).
        seed: as for :func:`sdattn.generate`; both images have it.
        steps: part of the run before whose steps the latents are moved. Up to there both images are
            the same, and earlier maps do not tell well what will be missing.
        guiding: ``scale``, ``iterations``, ``enough`` and ``maps`` of :func:`guide`.
        options: as for :func:`sdattn.generate`.

    Returns:
        Run: the unguided image if :meth:`sdattn.ImageRun.missing` names none of its words, or if
        the guided one's score is not higher. ``settings.options_left_out`` of a guided run has
        ``"losses"``.

    Raises:
        ValueError, KeyError: as :func:`sdattn.generate`, :meth:`sdattn.Heatmaps.score` and
            :func:`guide` do.
        TypeError: several prompts, or a list.
    """
    if not isinstance(prompt, str):
        raise InvalidTypeError(
            f"`guide_missing()` draws one image of one text, and was given a "
            f"{type(prompt).__name__}. Call it once for each prompt."
        )
    facts = loaded_facts(pipe, prompt, options, seed=seed)
    plain = generate(facts.pipe, prompt, seed=seed, **options)
    missing = dict.fromkeys(one.word for one in plain[0].missing(words))
    if not missing:
        return plain
    guided = guide(
        facts.pipe,
        prompt,
        [excite(*missing)],
        seed=plain.seeds[0],
        steps=steps,
        **{**options, **(guiding or {})},
    )
    is_better = guided[0].heatmaps.score(words) > plain[0].heatmaps.score(words)
    return guided if is_better else plain
