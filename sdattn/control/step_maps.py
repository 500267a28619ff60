from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import RunError, refuse
from ..follow.run_part import RunPart
from ..keep.keep import MUCH
from ..maps.by_place import aggregated
from ..maps.folded import Maps, MeanMaps, StepChoice, StepStore, folded_maps
from ..maps.from_stores import heatmaps
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps
from ..maps.presets import Preset, preset_of
from ..models.layers import PLACES, Place, checked_kinds
from ..models.values import whole

logger = logging.getLogger(__name__)

HOW = (
    "Call store.attach(pipe), once, and "
    "pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store)), in either order; for a "
    "transformer pipe.transformer.set_attn_processor(sdattn.TorchJointProcessor(store))."
)
KINDS = ("cross", "self")


class StepMaps(StepStore):
    """Maps of the running step and of the finished ones, dictionaries of lists in call order.

    ============================ ==================== ==============================================
    ``step_store``               <= ``max_queries``   the running step; after a pass of an attached
                                                      model ``last_step``
    ``attention_store``          <= ``max_queries``   the sum over the finished steps
    ``full_attention_store``     cross, of any size   the same
    ``last_step``                cross, of any size   the last finished step
    ``steps``                    cross, of any size   each finished step, with ``keep_steps=True``
    ============================ ==================== ==============================================

    For SD 1.x at 512x512 and one image, the maps of any size are ``[8, n, 77]``, with n in
    ``down_cross`` 4096 x2, 1024 x2, 256 x2, in ``mid_cross`` 64, in ``up_cross`` 256 x3, 1024 x3,
    4096 x3: 66 MB in float32. The others leave out the 4096: editing code picks maps by position
    after that.

    Args:
        max_queries: limit of ``step_store`` and ``attention_store``; none while a store is alone.
        kinds: ``"cross"`` and/or ``"self"``; None for controllers that only edit.
        keep_steps: keep each step in ``steps``; a run that will hold more than 1 GB logs a warning.
        save_global_store: None sums over steps. True or False, as in Chefer et al. 2023,
            yuval-alaluf/Attend-and-Excite: ``attention_store`` is the last step alone, with its
            graph; with True ``global_store`` holds the detached sums.

    Attributes:
        cur_step: number of finished steps; one per pass of the model (one per two with
            ``guidance="passes"``), so a second-order scheduler has about two per timestep.
    """

    num_att_layers: int
    images: int | None
    passes = 1  # steps in the run, if known

    def __init__(
        self,
        *,
        max_queries: int,
        kinds: Sequence[str] | None,
        keep_steps: bool,
        save_global_store: bool | None,
    ):
        self.kinds = () if kinds is None else checked_kinds(kinds, KINDS)
        self.max_queries = max_queries
        self.keep_steps = keep_steps
        self.save_global_store = save_global_store
        self.reset()

    @staticmethod
    def get_empty_store() -> Maps:
        """Return an empty list for each ``{place}_{kind}`` of a UNet."""
        return {f"{place}_{kind}": [] for kind in KINDS for place in PLACES}

    def reset(self) -> None:
        """Forget all maps and steps."""
        self.cur_step = 0
        self.latent_size: tuple[int, int] | None = None
        self.places: tuple[Place, ...] = PLACES
        self._problem = ""  # why the maps are not whole
        self._last_step: Maps = {}
        self._steps: list[Maps] = []
        self.attention_store: Maps = {}
        self.full_attention_store: Maps = {}
        self.global_store: Maps = {}
        self.empty_step()

    def empty_step(self) -> None:
        """Begin the lists of a step, for the places of the model that runs."""
        self.step_store: Maps = self.get_empty_store()
        if self.places != PLACES:
            self.step_store = {f"{place}_{kind}": [] for kind in KINDS for place in self.places}
        self._full_step: Maps = {f"{place}_cross": [] for place in self.places}

    def forward(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Append ``attn``, the kept rows, to its list; an override may edit or replace it."""
        kind = "cross" if is_cross else "self"
        if kind in self.kinds:
            key = f"{place_in_unet}_{kind}"
            is_alone = self.num_att_layers < 1
            if is_alone or attn.shape[1] <= self.max_queries:
                self.step_store.setdefault(key, []).append(attn)
            if is_cross:
                self._full_step.setdefault(key, []).append(attn)
        return attn

    def between_steps(self) -> None:
        self.add(self.step_store, self._full_step)

    def note(self, problem: str) -> None:
        """Remember why maps are missing; the first reason is the one reported."""
        self._problem = self._problem or problem

    def add(self, step: Maps, full: Maps) -> None:
        """Add a finished step: the maps that editing code sees, and cross-attention of any size."""
        self._last_step = full
        if self.keep_steps:
            self._steps.append(detached(full))
            expected = self.passes * sum(m.nbytes for maps in full.values() for m in maps)
            if len(self._steps) == 1 and expected > MUCH:
                text = "keep_steps=True will hold %.1f GB by the end of this run of %d steps."
                logger.warning(text, expected / 1e9, self.passes)
        if self.save_global_store:
            self.global_store = self._sum(self.global_store, detached(step))
        if self.save_global_store is not None:  # Attend-and-Excite: the last step, with its graph
            self.attention_store = step
            self.full_attention_store = full
        else:
            self.attention_store = self._sum(self.attention_store, step)
            self.full_attention_store = self._sum(self.full_attention_store, full)

    def _sum(self, sums: Maps, step: Maps) -> Maps:
        if not sums:
            return step
        if _shapes(sums) != _shapes(step):
            self.note("its steps have maps of different shapes. Call store.reset() between runs.")
            return step
        return {
            key: [a + b for a, b in zip(maps, step[key], strict=True)] for key, maps in sums.items()
        }

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
        return heatmaps(self, tokenizer, prompt, **options)

    def layer_maps(
        self,
        preset: str | Preset = "default",
        *,
        steps: StepChoice | None = None,
        latent_size: tuple[int, int] | None = None,
        images: int | None = None,
    ) -> LayerMaps:
        """Return the map of each layer that sees the text; arguments and errors as for
        :func:`sdattn.heatmaps`."""
        preset = preset_of(preset)
        folded = folded_maps(self, preset, latent_size, steps)
        return folded.of_images(images).layer_maps(preset)

    def get_average_attention(self) -> Maps:
        """Return the mean of each map over the finished steps, or with ``save_global_store`` the
        last step.

        Raises:
            CaptureError: the store did not see the whole run.
            RuntimeError: no step has finished.
        """
        return self._average(self.attention_store)

    def get_average_full_attention(self) -> Maps:
        """Return the same for ``full_attention_store``."""
        return self._average(self.full_attention_store)

    def get_average_global_attention(self) -> Maps:
        """Return the mean of ``global_store``; raise RuntimeError if there is none."""
        self.check_finished()
        if not self.save_global_store:
            raise RunError(
                "There is no global store. Make the store with save_global_store=True, or ask for "
                "get_average_attention()."
            )
        return averaged(self.global_store, self.cur_step)

    def aggregate_attention(
        self,
        from_where: Sequence[str] = PLACES,
        res: int | tuple[int, int] | None = None,
        is_cross: bool = True,
        select: int = 0,
        prompts: int | str | Sequence[str] | None = None,
    ) -> Tensor:
        """Return :func:`sdattn.aggregate_attention` on the maps' device, with their graph; ``res``
        is a quarter of the latent's sides by default."""
        rows, cols = self.latent_size or (64, 64)
        if prompts is None and self.images is None and self.save_global_store is not None:
            prompts = 1
        res = res or (-(-rows // 4), -(-cols // 4))
        return aggregated(self, res, from_where, is_cross, select, prompts)

    def step_maps(self, steps: StepChoice) -> MeanMaps:
        """Return mean maps of ``"mean"``, ``"last"``, a step or a part of the run."""
        self.check_finished()
        if steps == "mean":
            averages = self.get_average_attention()
            maps = {key: means for key, means in averages.items() if key.endswith("_self")}
            maps.update(self.get_average_full_attention())
            passes = self.cur_step if self.save_global_store is None else 1
            return MeanMaps(maps, range(self.cur_step), passes)
        if steps == "last":
            return MeanMaps(self.last_step, [self.cur_step - 1], passes=1)
        numbers = self._numbers(steps)
        chosen = [self.steps[number] for number in numbers]
        maps = {key: _mean([step[key] for step in chosen]) for key in chosen[0]}
        return MeanMaps(maps, numbers, passes=len(numbers))

    def _numbers(self, steps: StepChoice) -> list[int]:
        """Return the numbers of chosen steps among those kept one by one; raise ValueError for
        neither a step's number nor a part of the run."""
        n_steps = len(self.steps)
        step = whole(steps)
        part = RunPart.read(steps)
        if step is not None and -n_steps <= step < n_steps:
            return [step % n_steps]
        if part is not None and (numbers := part.passes(n_steps)):
            return numbers
        there = f"0 to {n_steps - 1}" if n_steps else "here none; make it with keep_steps=True"
        known = f"'mean', 'last', a part of the run such as (0.5, 1.0) or a step's number, {there}"
        raise refuse("steps", steps, known)

    @property
    def nbytes(self) -> int:
        """Bytes of all maps held now, each tensor counted once."""
        stores = [self.step_store, self._full_step, self._last_step, *self._steps]
        stores += [self.attention_store, self.full_attention_store, self.global_store]
        nbytes = {id(m): m.nbytes for store in stores for maps in store.values() for m in maps}
        return sum(nbytes.values())

    def check_whole(self) -> None:
        """Raise CaptureError if the store did not see the whole run."""
        raise NotImplementedError

    def check_finished(self) -> None:
        """Raise RuntimeError if no step has finished, CaptureError as :meth:`check_whole`."""
        self.check_whole()
        if not self.cur_step:
            raise RunError(f"No step has finished in this {type(self).__name__}. {HOW}")

    def _average(self, sums: Maps) -> Maps:
        self.check_finished()
        return averaged(sums, self.cur_step) if self.save_global_store is None else sums


def _shapes(maps: Maps) -> dict[str, list[torch.Size]]:
    return {key: [one.shape for one in kept] for key, kept in maps.items() if kept}


def detached(step: Maps) -> Maps:
    """Return copies of a step's maps; a view would keep the rows that were left out alive."""
    return {key: [one.detach().clone() for one in kept] for key, kept in step.items()}


@torch.no_grad()
def averaged(sums: Maps, steps: int) -> Maps:
    return {key: [total / steps for total in kept] for key, kept in sums.items()}


@torch.no_grad()
def _mean(steps: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(list(maps)).mean(0) for maps in zip(*steps, strict=True)]
