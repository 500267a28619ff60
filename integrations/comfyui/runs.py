"""What a recorder holds: a run, its texts, and the sums of their attention."""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from .layouts import TextFacts

Key = tuple[str, tuple[int, int]]  # place, grid


@dataclass(frozen=True)
class Settings:
    """What a recorder keeps.

    Attributes:
        second_half: leave out the first half of the steps, in which the image forms.
        every_step: keep the maps of each step too.
        every_head: keep the maps of each head too.
        spread: keep the image's self-attention on small grids, along which maps can be spread.
        max_bytes: upper limit for what ``every_step``, ``every_head`` and ``spread`` keep.
    """

    second_half: bool = True
    every_step: bool = False
    every_head: bool = False
    spread: bool = False
    max_bytes: int = 1 << 30


class Sums:
    """Attention summed over the layers of one place and grid, and over their calls; over their
    heads too, or head by head."""

    def __init__(self) -> None:
        self.totals: dict[Key, Tensor] = {}  # float32 [images, heads or 1, cells, keys]
        self.heads: Counter[Key] = Counter()  # that were added
        self.calls: Counter[Key] = Counter()

    @property
    def nbytes(self) -> int:
        return sum(total.nbytes for total in self.totals.values())

    @property
    def nbytes_by_head(self) -> int:
        return sum(total.nbytes for total in self.totals.values() if total.shape[1] > 1)

    def __add__(self, other: "Sums") -> "Sums":
        both = Sums()
        both.heads = self.heads + other.heads
        both.calls = self.calls + other.calls
        both.totals = dict(self.totals)
        for key, total in other.totals.items():
            before = both.totals.get(key)
            both.totals[key] = total if before is None else _added(before, total.to(before.device))
        return both

    def over_heads(self) -> "Sums":
        """Return the same, summed over heads."""
        summed = Sums()
        summed.heads = self.heads
        summed.calls = self.calls
        summed.totals = {key: total.sum(1, keepdim=True) for key, total in self.totals.items()}
        return summed

    def leave_device(self) -> None:
        self.totals = {key: total.cpu() for key, total in self.totals.items()}

    def means(self) -> dict[Key, Tensor]:
        """Return the means over heads, layers and calls, float32 ``[images, cells, keys]`` on the
        CPU."""
        return {key: total.cpu().sum(1) / self.heads[key] for key, total in self.totals.items()}

    def by_head(self) -> dict[Key, Tensor]:
        """Return the means over layers and calls of those whose heads were kept, float32 ``[images,
        heads, cells, keys]`` on the CPU."""
        return {
            key: total.cpu() / self.calls[key]
            for key, total in self.totals.items()
            if total.shape[1] * self.calls[key] == self.heads[key]
        }


def _added(first: Tensor, second: Tensor) -> Tensor:
    if first.shape[1] != second.shape[1]:
        first = first.sum(1, keepdim=True)
        second = second.sum(1, keepdim=True)
    return first + second


@dataclass(eq=False)
class Conditioning:
    """One text of a run and its maps.

    Attributes:
        name: the sampler's input: ``"positive"``, ``"negative"``.
        text: text states, as the text encoder made them, ``[1 or images, T, width]``.
        area: part of the latent that is drawn from it, (rows, cols, top, left); None for all.
        latent: (rows, cols) of the whole latent.
        facts: of its columns; None if it was drawn in no step that is kept.
        steps: steps in which it was drawn, counted from 0.
        sums: the sums over all kept steps, but for those in ``by_step``.
        by_step: the sums of each step, if they are kept.
        affinity: the sums of the image's self-attention, if it is kept.
    """

    name: str
    text: Tensor
    area: tuple[int, ...] | None
    latent: tuple[int, int]
    facts: TextFacts | None = None
    images: int = 0
    steps: set[int] = field(default_factory=set)
    sums: Sums = field(default_factory=Sums)
    by_step: dict[int, Sums] = field(default_factory=dict)
    affinity: Sums = field(default_factory=Sums)

    def leave_device(self) -> None:
        """Move what is held off the model's device, at the end of a run."""
        self.text = self.text.cpu()
        for sums in (self.sums, self.affinity, *self.by_step.values()):
            sums.leave_device()

    @property
    def kept_apart(self) -> int:
        """Bytes of what is kept besides the means."""
        of_steps = sum(sums.nbytes for sums in self.by_step.values())
        return self.sums.nbytes_by_head + of_steps + self.affinity.nbytes


@dataclass(eq=False)
class Run:
    """One run of a sampler.

    Attributes:
        node: number of the sampler's node, or None outside ComfyUI's executor.
        n_steps: steps of its schedule.
        conditionings: by the sampler's input and the number that ComfyUI gave the text.
        step: steps that are done.
        calls, attended, shown: calls of the model, of its attention functions, and of those to the
            text.
        layers, most: layers that attend to the text, and the most that showed it in a call.
        over_budget: steps that were not kept apart, for lack of bytes.
        is_whole: the run came to its end.
        problem: the first thing that could not be followed.
        notes: what else should be known when maps are read.
    """

    node: str | None
    n_steps: int
    conditionings: dict[tuple[str, object], Conditioning] = field(default_factory=dict)
    step: int = 0
    calls: int = 0
    attended: int = 0
    shown: int = 0
    layers: int = 0
    most: int = 0
    over_budget: set[int] = field(default_factory=set)
    is_whole: bool = False
    problem: str = ""
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def kept_apart(self) -> int:
        return sum(text.kept_apart for text in self.conditionings.values())


def executing_node() -> str | None:
    """Return the number of the node that ComfyUI runs now, or None."""
    try:
        from comfy_execution.utils import get_executing_context
    except ImportError:
        return None
    context = get_executing_context()
    return None if context is None else context.node_id
