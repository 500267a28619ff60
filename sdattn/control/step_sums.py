"""`StepSums`: the maps of finished steps, their sums and means."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidValueError, RunError
from ..hooks.keep import MUCH
from ..hooks.run_part import RunPart
from ..maps.folded import Maps, StepChoice, aggregated
from ..maps.from_stores import heatmaps
from ..maps.heatmaps import Heatmaps
from ..models.layers import PLACES
from ..models.pipeline_call import whole

logger = logging.getLogger(__name__)

HOW = (
    "Call store.attach(pipe), once, and "
    "pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store)), in either order; for a "
    "transformer pipe.transformer.set_attn_processor(sdattn.TorchJointProcessor(store))."
)


class StepSums:
    """Finished steps of a run, as :class:`sdattn.AttentionStore` documents them.

    Args:
        keep_steps, save_global_store: as for that class.
    """

    latent_size: tuple[int, int] | None
    images: int | None

    def __init__(self, keep_steps: bool, save_global_store: bool | None):
        self.keep_steps, self.save_global_store = keep_steps, save_global_store
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.cur_step = 0
        self._problem = ""  # why the maps are not whole
        self._last_step: Maps = {}
        self._steps: list[Maps] = []
        self.attention_store: Maps = {}
        self.full_attention_store: Maps = {}
        self.global_store: Maps = {}

    def note(self, problem: str) -> None:
        """Remember why the maps are not whole; the first reason is the one that is told."""
        self._problem = self._problem or problem

    def add(self, step: Maps, full: Maps, passes: int) -> None:
        """Add a finished step.

        Args:
            step: the maps that editing code sees.
            full: cross-attention of any size.
            passes: number of steps in the run.
        """
        self._last_step = full
        if self.keep_steps:
            self._steps.append(_detached(full))
            expected = passes * sum(m.nbytes for maps in full.values() for m in maps)
            if len(self._steps) == 1 and expected > MUCH:
                text = "keep_steps=True will hold %.1f GB by the end of this run of %d steps."
                logger.warning(text, expected / 1e9, passes)
        if self.save_global_store:
            self.global_store = self._sum(self.global_store, _detached(step))
        if self.save_global_store is not None:  # Attend-and-Excite: the last step, with its graph
            self.attention_store, self.full_attention_store = step, full
        else:
            self.attention_store = self._sum(self.attention_store, step)
            self.full_attention_store = self._sum(self.full_attention_store, full)

    def _sum(self, sums: Maps, step: Maps) -> Maps:
        found = _added(sums, step)
        if found is None:
            self.note("its steps have maps of different shapes. Call store.reset() between runs")
        return step if found is None else found

    @property
    def last_step(self) -> Maps:
        """Cross-attention maps of the last finished step."""
        self.check_whole()
        return self._last_step

    @property
    def steps(self) -> list[Maps]:
        """Cross-attention maps of each finished step, if ``keep_steps`` is set."""
        self.check_whole()
        return self._steps

    def heatmaps(self, tokenizer: Any = None, prompt: Any = None, **options: Any) -> list[Heatmaps]:
        """Return the heatmaps of each image, see :func:`sdattn.heatmaps`."""
        return heatmaps(self, tokenizer, prompt, **options)  # type: ignore[arg-type]

    def get_average_attention(self) -> Maps:
        """Return the mean of each map over the finished steps; the last step alone if
        ``save_global_store`` is set.

        Raises:
            CaptureError: the run was not seen whole.
            RuntimeError: no step has finished.
        """
        return self._average(self.attention_store)

    def get_average_full_attention(self) -> Maps:
        """Return the same for ``full_attention_store``."""
        return self._average(self.full_attention_store)

    def get_average_global_attention(self) -> Maps:
        """Return the mean of ``global_store`` over the finished steps.

        Raises:
            RuntimeError: no step has finished, or ``save_global_store`` is not True.
        """
        self.check_finished()
        if not self.save_global_store:
            raise RunError(
                "There is no global store. Make the store with save_global_store=True, or ask for "
                "get_average_attention()."
            )
        return _averaged(self.global_store, self.cur_step)

    def aggregate_attention(
        self,
        from_where: Sequence[str] = PLACES,
        res: int | tuple[int, int] | None = None,
        is_cross: bool = True,
        select: int = 0,
        prompts: int | str | Sequence[str] | None = None,
    ) -> Tensor:
        """Return :func:`sdattn.aggregate_attention` on the maps' device, with their graph, as the
        method of diffusers' Attend-and-Excite does. By default ``res`` is a quarter of the latent's
        sides; with ``save_global_store`` set, as there, all rows are one image if not known."""
        rows, cols = self.latent_size or (64, 64)
        if prompts is None and self.images is None and self.save_global_store is not None:
            prompts = 1
        res = res or (-(-rows // 4), -(-cols // 4))
        return aggregated(self, res, from_where, is_cross, select, prompts)

    def step_maps(self, steps: StepChoice) -> tuple[Maps, int]:
        """Return the maps of some steps, and how many steps they are the mean of.

        Args:
            steps: ``"mean"``, ``"last"``, the number of a step, or a part of the run.
        """
        self.check_finished()
        if steps == "mean":
            selfs = self.get_average_attention().items()
            maps = {key: kept for key, kept in selfs if key.endswith("_self")}
            maps.update(self.get_average_full_attention())
            return maps, self.cur_step if self.save_global_store is None else 1
        return (self.last_step, 1) if steps == "last" else _chosen(self.steps, steps)

    def check_whole(self) -> None:
        """Raise CaptureError if the run was not seen whole."""
        raise NotImplementedError

    def check_finished(self) -> None:
        """Raise RuntimeError if no step has finished, CaptureError as :meth:`check_whole`."""
        self.check_whole()
        if not self.cur_step:
            raise RunError(f"No step has finished in this {type(self).__name__}. {HOW}")

    def _average(self, sums: Maps) -> Maps:
        self.check_finished()
        return _averaged(sums, self.cur_step) if self.save_global_store is None else sums


def _chosen(kept: Sequence[Maps], steps: StepChoice) -> tuple[Maps, int]:
    """Return the mean of some of the steps that were kept one by one, and their number.

    Raises:
        ValueError: ``steps`` is neither the number of one nor a part of the run.
    """
    numbers: list[int] = []
    if (step := whole(steps)) is not None:
        numbers = [step] if -len(kept) <= step < len(kept) else []
    elif part := RunPart.read(steps):
        numbers = part.passes(len(kept))
    if not numbers:
        there = f", 0 to {len(kept) - 1}." if kept else "; make it with keep_steps=True."
        raise InvalidValueError(
            f"steps={steps!r}: pass 'mean', 'last', a step's number or a part of the run such as "
            f"(0.5, 1.0). This store keeps {len(kept)} steps one by one{there}"
        )
    chosen = [kept[i] for i in numbers]
    return {key: _mean([step[key] for step in chosen]) for key in chosen[0]}, len(chosen)


def _added(sums: Maps, step: Maps) -> Maps | None:
    """Return the sums with a step added; None if its maps have other shapes."""
    if not sums:
        return step
    if _shapes(sums) != _shapes(step):
        return None
    return {
        key: [a + b for a, b in zip(maps, step[key], strict=True)] for key, maps in sums.items()
    }


def _shapes(maps: Maps) -> dict[str, list[torch.Size]]:
    return {key: [one.shape for one in kept] for key, kept in maps.items() if kept}


def _detached(step: Maps) -> Maps:
    """Return copies of a step's maps; a view would keep the rows that were left out alive."""
    return {key: [one.detach().clone() for one in kept] for key, kept in step.items()}


@torch.no_grad()
def _averaged(sums: Maps, steps: int) -> Maps:
    """Return sums over so many steps, divided by their number."""
    return {key: [total / steps for total in kept] for key, kept in sums.items()}


@torch.no_grad()
def _mean(steps: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of lists of maps, one for each step, the list of their means."""
    return [torch.stack(list(maps)).mean(0) for maps in zip(*steps, strict=True)]
