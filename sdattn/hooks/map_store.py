"""`MapStore`, which `capture()` fills: one running mean a layer, or every head and step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from ..attention import query_grid
from ..models.guidance import Branch
from ..models.layers import AttentionLayer
from .attended import Attended
from .keep import Keep
from .steps import Selection


class CaptureError(RuntimeError):
    """Capture could not see what it was asked to see."""


class CaptureWarning(UserWarning):
    """Capture saw less than it was asked to see, or something changed under it."""


@dataclass
class Pass:
    """One call of the denoiser.

    Attributes:
        timestep: the timestep the model was called with (its first, if rows differ).
        latent_size: (rows, cols) of the latent; None where queries are a mere sequence.
        batch: rows in the batch.
        layout: the chunks that guidance makes of the batch, in order.
        rows: the rows that are kept, one an image.
        branches: the guidance branch of each of them.
        n_text: token columns of the text; 0 where only the layers will say.
        position: where in the run it is, in [0, 1]: the middle of its part of the schedule; None
            where no schedule is known.
    """

    timestep: float
    latent_size: tuple[int, int] | None
    batch: int
    layout: tuple[Branch | None, ...]
    rows: Tensor
    branches: tuple[Branch, ...]
    n_text: int
    position: float | None = None


@dataclass
class _Slot:
    """What is held of one layer: a running sum over calls (the last alone, where no more is asked
    for) and over as many heads as are averaged, or a list with one entry a step."""

    grid: tuple[int, int]
    heads: int
    calls: int = 0
    total: Tensor | None = None
    steps: list[Tensor] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        return self.steps if self.total is None else [self.total]


class MapStore:
    """The maps that :func:`sdattn.capture` collects.

    Attributes:
        layers: the attention layers that are watched.
        passes: one :class:`Pass` for each call of the model for these images, in order, whether its
            maps are kept or not.
        keep: what is kept of steps, heads and columns.
        steps, heads: the same of these two, as they were asked for.
        skipped: calls of the model that are not: those of the other branch, where a pipeline runs
            the two in turn, and those of skip-layer guidance.
        tokens: the key columns that are kept, or None for all.
        n_keys: token columns of the layers that see the text, kept or not, those of image prompts
            (IP-Adapter) behind those of the text; None before they ran.
        expected_nbytes: bytes that will be held at the end of the run, at most; None before it. Of
            a model without its pipeline, whose number of calls is not known, after one call.
        maps: a mapping, layer name to ``[images, (steps,) (heads,) rows, cols, tokens]``. The
            steps axis is there with ``steps="all"`` or a list, the heads axis likewise.
            Values are probabilities in [0, 1]; in the default dtype float32 and with all tokens
            kept those of cross- and self-attention sum to 1 over the last axis (text columns and
            those of each image prompt by themselves), those of joint attention to less: the rest
            goes to the picture. A layer that has not run yet is not in it.
    """

    def __init__(self, layers: Sequence[AttentionLayer], keep: Keep, levels: int = 4):
        self.layers = list(layers)
        self.keep, self.levels = keep, levels
        self.passes: list[Pass] = []
        self.skipped = 0
        self.n_keys: int | None = None
        self.expected_nbytes: int | None = None
        self._slots: dict[str, _Slot] = {}

    @property
    def maps(self) -> Mapping[str, Tensor]:
        return _Maps(self)

    @property
    def steps(self) -> Selection:
        return self.keep.steps.given

    @property
    def heads(self) -> Selection:
        return self.keep.heads.given

    @property
    def tokens(self) -> tuple[int, ...] | None:
        return self.keep.tokens

    @property
    def timesteps(self) -> list[float]:
        """The timestep of each pass, in the order they ran."""
        return [one.timestep for one in self.passes]

    @property
    def images(self) -> int:
        """Number of images (rows kept of the batch)."""
        return len(self.passes[0].branches) if self.passes else 0

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The guidance branch of each image; empty before the model ran."""
        return self.passes[0].branches if self.passes else ()

    @property
    def latent_size(self) -> tuple[int, int] | None:
        """(rows, cols) of the latent; None where queries are a mere sequence, one row each.

        Raises:
            CaptureError: the model has not run.
        """
        if not self.passes:
            raise CaptureError("The store is empty: the model has not run inside capture().")
        return self.passes[0].latent_size

    @property
    def n_text(self) -> int | None:
        """Token columns of the text, without those of image prompts; None before the model ran."""
        return (self.passes[0].n_text or self.n_keys) if self.passes else None

    @property
    def kept_passes(self) -> int:
        """How many passes the layers have handed in; with ``"last"`` each in place of the other."""
        return sum(map(self.keeps, range(len(self.passes))))

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        held = (t for slot in self._slots.values() for t in slot.tensors())
        return sum(t.numel() * t.element_size() for t in held)

    def begin_pass(self, one: Pass) -> None:
        """Note that the model was called.

        Raises:
            CaptureError: another number of images, or another latent size, than before.
        """
        first = self.passes[0] if self.passes else one
        found = len(one.branches), one.latent_size
        if found != (len(first.branches), first.latent_size):
            raise CaptureError(
                f"This capture holds {len(first.branches)} image(s) with a latent of "
                f"{first.latent_size}; the model was now called for {found[0]} image(s) with "
                f"{found[1]}. Enter capture() once for each run."
            )
        self.passes.append(one)

    def takes(self, layer: AttentionLayer) -> bool:
        """Whether the pass that is running is kept of this layer."""
        return bool(self.passes) and layer in self.layers and self.keeps(len(self.passes) - 1)

    def keeps(self, number: int) -> bool:
        """Whether the maps of a pass, counted from 0, are kept."""
        return self.keep.steps.keeps(number, self.passes[number].position)

    def add(self, layer: AttentionLayer, attended: Attended, rows: Tensor) -> None:
        """Take in what the kept rows of one layer's call attended to."""
        pieces = self._pieces(layer, attended, rows)
        slot = self._slots.get(layer.name)
        if slot is None:
            size, cells = self.latent_size, attended.cells
            grid = (1, cells) if size is None else query_grid(cells, size, self.levels)
            heads = 1 if self.keep.heads.each else attended.heads
            slot = self._slots[layer.name] = _Slot(grid, heads)
        slot.calls += 1
        device, dtype = self.keep.device, self.keep.held_dtype
        if self.keep.steps.each:
            one = reduce(self._sum, pieces)
            one = one / slot.heads if slot.heads > 1 else one
            slot.steps.append(one.to(device=device, dtype=dtype))
            return
        if self.keep.steps.last:
            slot.total = None
        for piece in pieces:
            piece = piece.to(device=device, dtype=dtype)
            slot.total = piece if slot.total is None else self._sum(slot.total, piece)

    def _sum(self, total: Tensor, piece: Tensor) -> Tensor:
        return total + piece if self.keep.grad else total.add_(piece)

    def _pieces(self, layer: AttentionLayer, attended: Attended, rows: Tensor) -> Iterator[Tensor]:
        """What is to be summed of one call: ``[images, N, tokens]``, each of some heads, or all of
        it at once, ``[images, heads, N, tokens]``."""
        columns = self._columns(layer, attended)
        if self.keep.among is None or layer.kind == "self":
            parts = attended.parts(rows, columns)
        else:
            some = slice(None) if columns is None else list(columns)
            parts = (self._among(layer, one)[..., some] for one in attended.parts(rows, None))
        if not self.keep.heads.each:
            yield from (part.sum(1) for part in parts)
            return
        first, *more = parts
        probs = torch.cat([first, *more], dim=1) if more else first
        heads = self.keep.heads.numbers
        if heads is None:
            yield probs
            return
        if max(heads) >= attended.heads:
            raise CaptureError(
                f"Asked for head {max(heads)} of {layer.name}, which has {attended.heads} "
                f"(0 to {attended.heads - 1})."
            )
        yield probs[:, list(heads)]

    def _among(self, layer: AttentionLayer, probs: Tensor) -> Tensor:
        """The softmax over some of its keys: the probabilities of the others taken away and what
        is left divided by its sum."""
        among = self.keep.among or ()
        images, n_keys = len(probs), probs.shape[-1]
        lists = list(among) * (images if len(among) == 1 else 1)
        if len(lists) != images or max(map(max, lists)) >= (self.n_text or n_keys):
            raise CaptureError(
                f"among has {len(among)} list(s) of columns up to {max(map(max, lists))}; "
                f"{layer.name} has {images} image(s) and {self.n_text or n_keys} columns of text. "
                "Pass one list, or one for each image."
            )
        n_text = self.n_text or n_keys  # those of image prompts have a softmax of their own
        keep = torch.zeros(images, 1, 1, n_text, dtype=torch.bool)
        for one, columns in zip(keep, lists, strict=True):
            one[..., list(columns)] = True
        text = probs[..., :n_text] * keep.to(probs.device)
        text = text / text.sum(-1, keepdim=True).clamp(min=torch.finfo(text.dtype).tiny)
        return torch.cat([text, probs[..., n_text:]], dim=-1)

    def _columns(self, layer: AttentionLayer, attended: Attended) -> Sequence[int] | None:
        """The key columns that are kept of a layer, None for all."""
        if layer.kind == "self":
            return None
        self.n_keys = attended.keys
        if self.tokens is not None and max(self.tokens) >= self.n_keys:
            raise CaptureError(
                f"Asked for token column {max(self.tokens)} of {layer.name}, which has "
                f"{self.n_keys} (0 to {self.n_keys - 1})."
            )
        return self.tokens

    def map(self, name: str) -> Tensor:
        """``maps[name]``: ``[images, (steps,) (heads,) rows, cols, tokens]``."""
        slot = self._slots[name]
        if slot.total is None:
            held = torch.stack(slot.steps, dim=1)
        else:
            held = slot.total / (slot.heads * (1 if self.keep.steps.last else slot.calls))
        return held.to(self.keep.dtype).unflatten(-2, slot.grid)

    def missing(self) -> list[str]:
        """Names of the watched layers that never ran."""
        return [layer.name for layer in self.layers if layer.name not in self._slots]

    def check(self) -> None:
        """Raise if nothing was captured, warn if some layers are missing.

        Raises:
            CaptureError: the model did not run, or none of the layers did.
        """
        missing, steps = self.missing(), self.keep.steps
        if not self.passes and self.skipped:
            raise CaptureError(
                f"The model was called {self.skipped} time(s), but never for the unconditional "
                "branch: this run has no negative prompt or no guidance. Pass both."
            )
        if not self.passes:
            raise CaptureError(
                f"{len(self.layers)} layers were watched, but the model was never called inside "
                "capture(). Call the pipeline inside the with block, in the same thread."
            )
        if len(missing) == len(self.layers):
            asked = f" in steps {self.steps}" if steps.numbers or steps.part else ""
            raise CaptureError(
                f"The model ran {len(self.passes)} time(s), but none of the {len(missing)} "
                f"watched layers ran{asked}: {', '.join(missing[:3])}…"
            )
        if missing:
            warnings.warn(
                f"{len(missing)} of {len(self.layers)} watched layers never ran and have no map: "
                + ", ".join(missing),
                CaptureWarning,
                stacklevel=4,
            )
        wanted = self.kept_passes
        uneven = [f"{name} in {s.calls}" for name, s in self._slots.items() if s.calls != wanted]
        if uneven:
            warnings.warn(
                f"The model ran {wanted} times, but {len(uneven)} watched layers ran in other "
                "numbers of them (is a cache enabled?), so the steps of the layers are not the "
                f"same ones: {', '.join(uneven[:3])}.",
                CaptureWarning,
                stacklevel=4,
            )
        chosen = steps.numbers or ()
        if skipped := [step for step in chosen if step >= len(self.passes)]:
            warnings.warn(
                f"Asked for steps {list(chosen)}, but the model ran {len(self.passes)} times "
                f"(0 to {len(self.passes) - 1}): nothing is held of {skipped}.",
                CaptureWarning,
                stacklevel=4,
            )

    def report(self) -> str:
        """What was asked for and what was seen, as a text of a few lines."""
        if not self.passes:
            return f"layers     {len(self.layers)} watched\npasses     none yet"
        first, missing = self.passes[0], self.missing()
        grids = sorted({slot.grid for slot in self._slots.values()}, reverse=True)
        layout = " | ".join(chunk or "neither" for chunk in first.layout)
        times = [f"{t:g}" for t in self.timesteps]
        if len(times) > 6:
            times = [*times[:3], "…", *times[-2:]]
        kept = "all" if self.tokens is None else f"columns {list(self.tokens)}"
        lines = {
            "layers": f"{len(self.layers) - len(missing)} of {len(self.layers)} seen",
            "missing": ", ".join(missing) or "none",
            "grids": ", ".join(f"{rows}x{cols}" for rows, cols in grids),
            "passes": f"{len(self.passes)}, timesteps {', '.join(times)}",
            "skipped": f"{self.skipped} passes that are not the branch's",
            "guidance": f"{layout} in a batch of {first.batch}",
            "images": f"{self.images}, {' and '.join(dict.fromkeys(first.branches))}",
            "kept": f"steps {self.steps}, heads {self.heads}, tokens {kept}",
            "held": f"{self.nbytes / 1e6:.2f} MB",
        }
        return "\n".join(f"{name:10} {text}" for name, text in lines.items())


class _Maps(Mapping[str, Tensor]):
    """The store's maps, made when they are asked for."""

    def __init__(self, store: MapStore):
        self._store = store

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._store._slots:
            raise KeyError(
                f"No map of a layer {name!r}. The store has: {', '.join(self) or 'none yet'}."
            )
        return self._store.map(name)

    def __contains__(self, name: object) -> bool:
        return name in self._store._slots  # without making the map

    def __iter__(self) -> Iterator[str]:
        return (la.name for la in self._store.layers if la.name in self._store._slots)

    def __len__(self) -> int:
        return len(self._store._slots)
