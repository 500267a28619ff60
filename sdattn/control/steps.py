"""`Steps`: what a store keeps of the running step and of the finished ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain, product

import torch
from torch import Tensor

from ..errors import refuse
from ..follow.run_part import RunPart
from ..keep.keep import MUCH
from ..maps.folded import Maps, MeanMaps, StepChoice
from ..models.layers import PLACES, Place, checked_kinds
from ..models.values import checked_truth, checked_whole, whole

logger = logging.getLogger(__name__)

KINDS = ("cross", "self")


class Steps:
    """Maps of the running step, and of the finished ones: their sum, the last, and each.

    Names from prompt-to-prompt code and the options: see :class:`sdattn.AttentionStore`.

    Attributes:
        full_step: cross-attention maps of the running step, of any size.
        last: the same for the last finished step.
        each: the same for each finished step, copied, with ``keep_steps=True``.
        has_mixed_shapes: True once the shapes of a step's maps differed from those before.
    """

    def __init__(
        self,
        *,
        max_queries: int,
        kinds: Sequence[str] | None,
        keep_steps: bool,
        save_global_store: bool | None,
    ):
        self.kinds = () if kinds is None else checked_kinds(kinds, KINDS)
        self.max_queries = checked_whole("max_queries", max_queries, 0)
        self.keep_steps = checked_truth("keep_steps", keep_steps)
        if save_global_store is not None:
            checked_truth("save_global_store", save_global_store)
        self.save_global_store = save_global_store
        self.forget()

    def forget(self) -> None:
        """Forget all steps."""
        self.cur_step = 0
        self.step_store: Maps = {}
        self.full_step: Maps = {}
        self.last: Maps = {}
        self.each: list[Maps] = []
        self.attention_store: Maps = {}
        self.full_attention_store: Maps = {}
        self.global_store: Maps = {}
        self.has_mixed_shapes = False

    def begin(self, empty: Maps, places: Sequence[Place]) -> None:
        """Begin the lists of a step: ``empty`` for a UNet, others for a model of other places."""
        self.step_store = empty
        if tuple(places) != PLACES:
            self.step_store = {f"{place}_{kind}": [] for kind, place in product(KINDS, places)}
        self.full_step = {f"{place}_cross": [] for place in places}

    def append(
        self, attn: Tensor, is_cross: bool, place: str, *, of_any_size: bool, copies: bool
    ) -> None:
        """Append a layer's map to the running step, or a copy of it."""
        kind = "cross" if is_cross else "self"
        is_small = of_any_size or attn.shape[1] <= self.max_queries
        if kind not in self.kinds or not (is_small or is_cross):
            return
        kept = attn.contiguous() if copies else attn
        if is_small:
            self.step_store.setdefault(f"{place}_{kind}", []).append(kept)
        if is_cross:
            self.full_step.setdefault(f"{place}_{kind}", []).append(kept)

    def add(self, passes: int) -> None:
        """Add the running step to the finished ones, in a run of so many ``passes``."""
        step = self.step_store
        full = self.full_step
        self.last = full
        if self.keep_steps:
            self.each.append(detached(full))
            expected = passes * sum(one.nbytes for one in chain(*full.values()))
            if len(self.each) == 1 and expected > MUCH:
                text = "keep_steps=True will hold %.1f GB by the end of this run of %d steps."
                logger.warning(text, expected / 1e9, passes)
        if self.save_global_store:
            [self.global_store] = self._sums((self.global_store, detached(step)))
        if self.save_global_store is not None:  # Attend-and-Excite: the last step, with its graph
            self.attention_store = step
            self.full_attention_store = full
        else:
            self.attention_store, self.full_attention_store = self._sums(
                (self.attention_store, step), (self.full_attention_store, full)
            )

    def _sums(self, *stores: tuple[Maps, Maps]) -> list[Maps]:
        """Return sums with a step added to each: all maps in one operation, and once a map that is
        in several. The sums before are left as they are."""
        terms: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        fits = []
        for sums, step in stores:
            fits.append(bool(sums) and _shapes(sums) == _shapes(step))
            self.has_mixed_shapes |= bool(sums) and not fits[-1]
            for key, maps in sums.items() if fits[-1] else ():
                for pair in zip(maps, step[key], strict=True):
                    terms[id(pair[0]), id(pair[1])] = pair
        totals = {}
        if terms:
            before, new = zip(*terms.values(), strict=True)
            totals = dict(zip(terms, torch._foreach_add(before, new), strict=True))
        found = []
        for (sums, step), fit in zip(stores, fits, strict=True):
            added = {}
            for key, maps in sums.items() if fit else ():
                pairs = zip(maps, step[key], strict=True)
                added[key] = [totals[id(one), id(other)] for one, other in pairs]
            found.append(added if fit else step)
        return found

    def mean(self, sums: Maps) -> Maps:
        """Return a sum's mean over the steps; the last step itself with ``save_global_store``."""
        return averaged(sums, self.cur_step) if self.save_global_store is None else sums

    def chosen(self, steps: StepChoice) -> MeanMaps:
        """Return mean maps of ``"mean"``, ``"last"``, a step or a part of the run; raise ValueError
        for steps that are not kept one by one."""
        if steps == "mean":
            averages = self.mean(self.attention_store)
            maps = {key: means for key, means in averages.items() if key.endswith("_self")}
            maps.update(self.mean(self.full_attention_store))
            passes = self.cur_step if self.save_global_store is None else 1
            return MeanMaps(maps, range(self.cur_step), passes)
        if steps == "last":
            return MeanMaps(self.last, [self.cur_step - 1], passes=1)
        numbers = self._numbers(steps)
        maps = {}
        with torch.no_grad():
            for key in self.each[numbers[0]]:
                of_layers = zip(*[self.each[number][key] for number in numbers], strict=True)
                maps[key] = [torch.stack(of_steps).mean(0) for of_steps in of_layers]
        return MeanMaps(maps, numbers, passes=len(numbers))

    def _numbers(self, steps: StepChoice) -> list[int]:
        n_steps = len(self.each)
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
        stores = [self.step_store, self.full_step, self.last, *self.each]
        stores += [self.attention_store, self.full_attention_store, self.global_store]
        nbytes = {}
        for store in stores:
            for maps in store.values():
                nbytes.update({id(m): m.nbytes for m in maps})
        return sum(nbytes.values())


def _shapes(maps: Maps) -> dict[str, list[torch.Size]]:
    return {key: [one.shape for one in kept] for key, kept in maps.items() if kept}


def detached(step: Maps) -> Maps:
    """Return copies of a step's maps; a view would keep the rows that were left out alive."""
    return {key: [one.detach().clone() for one in kept] for key, kept in step.items()}


@torch.no_grad()
def averaged(sums: Maps, steps: int) -> Maps:
    return {key: [total / steps for total in kept] for key, kept in sums.items()}
