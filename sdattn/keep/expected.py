"""`Expected`: what a store will hold at the end of a run, and the changes that hold less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..attention.core import grid_text
from ..models.denoiser_call import Size
from ..models.layers import AttentionLayer
from .keep import Heads, Keep, Steps


@dataclass(frozen=True)
class Expected:
    """The maps that a store will hold at the end of a run.

    Attributes:
        keep, layers: what is kept, and of which layers.
        latent_size: size of the latent, (frames, rows, cols) for a video.
        columns: token columns of the layers that see the text, kept or not.
        rows: kept rows of the batch, or videos.
        branches: rows of one image, one for each kept branch of the guidance.
        passes: calls of the model.
        frame_rows: frames of a video that each attend only to themselves; else 1.
        part: name of the capture, if its run has several.
    """

    keep: Keep
    layers: Sequence[AttentionLayer]
    latent_size: Size
    columns: int
    rows: int = 1
    branches: int = 1
    passes: int = 1
    frame_rows: int = 1
    part: str = "prompt"

    @property
    def nbytes(self) -> int:
        return self.keep.nbytes(
            self.layers,
            self.latent_size,
            len(self.tokens),
            images=self.rows,
            passes=self.passes,
            frame_rows=self.frame_rows,
        )

    @property
    def tokens(self) -> Sequence[int]:
        """Token columns that are kept."""
        return range(self.columns) if self.keep.tokens is None else self.keep.tokens

    def keeping(self, **options: Any) -> Expected:
        """Return the same with other options of :class:`Keep`."""
        return replace(self, keep=replace(self.keep, **options))


Stores = Sequence[Expected]  # of one run
Change = tuple[str, Stores]  # in words, and what is held with it


def total(stores: Stores) -> int:
    """Return the bytes that the stores of a run hold together."""
    return sum(store.nbytes for store in stores)


def change(name: str, stores: Stores, allowed: int) -> Change | None:
    """Return one of :data:`CHANGES`, the smallest that is enough or else the largest; None if it
    saves nothing."""
    found = CHANGES[name](stores, allowed)
    return found if found and total(found[1]) < total(stores) else None


def _every(text: str, changed: Callable[[Expected], Expected | None]) -> Callable[..., Change]:
    """Return a change of each store; None drops it."""

    def change(stores: Stores, allowed: int) -> Change:
        return text, [new for store in stores if (new := changed(store))]

    return change


def _without(part: str) -> Callable[[Expected], Expected | None]:
    return lambda store: None if store.part.endswith(part) else store


def _fewer(
    text: str, number: Callable[[Expected], int], some: Callable[[Expected, int], Expected]
) -> Callable[..., Change | None]:
    """Return a change that keeps as many of ``number(store)`` things as fit, at least one.

    Args:
        text: with ``{}`` for how many of them.
    """

    def change(stores: Stores, allowed: int) -> Change | None:
        most = max(map(number, stores))
        for kept in range(most - 1, 0, -1):
            found = [some(store, kept) for store in stores]
            if kept == 1 or total(found) <= allowed:
                return text.format(f"{kept} of the {most}"), found
        return None

    return change


def _some_steps(store: Expected, kept: int) -> Expected:
    steps = store.keep.steps
    numbers = (steps.numbers or range(store.passes))[:kept]
    return store.keeping(steps=Steps.of(list(numbers))) if steps.each else store


def _some_tokens(store: Expected, kept: int) -> Expected:
    return store.keeping(tokens=tuple(store.tokens[:kept])) if _of_prompt(store) else store


def _some_frames(store: Expected, kept: int) -> Expected:
    """Return the store of a shorter video."""
    size = kept, *store.latent_size[1:]
    return replace(store, latent_size=size, frame_rows=min(store.frame_rows, kept))


def _kept_frames(store: Expected) -> int:
    return (
        1 if len(store.latent_size) < 3 else len(store.keep.frames or range(store.latent_size[0]))
    )


def _of_prompt(store: Expected) -> bool:
    return store.part.endswith("prompt")


def _coarser(stores: Stores, allowed: int) -> Change | None:
    """Keep the layers below a resolution, or if all have the same a part of the layers."""
    [store] = stores
    sizes = {layer.grid(store.latent_size)[-2:] for layer in store.layers}
    for most in sorted(sizes, reverse=True)[1:]:
        found = [la for la in store.layers if la.grid(store.latent_size)[-2:] <= most]
        changed = replace(store, layers=found)
        if changed.nbytes <= allowed or most == min(sizes):
            return f"keep `layers` of {grid_text(most)} and less", [changed]
    some = _fewer(
        "keep {} `layers`", lambda s: len(s.layers), lambda s, n: replace(s, layers=s.layers[:n])
    )
    return some(stores, allowed)


def _smaller(stores: Stores, allowed: int) -> Change | None:
    for words, by in (("half", 2), ("a quarter of", 4)):
        sizes = [
            (*s.latent_size[:-2], *(side // by for side in s.latent_size[-2:])) for s in stores
        ]
        if any(side % by for store in stores for side in store.latent_size[-2:]):
            return None
        found = [replace(s, latent_size=size) for s, size in zip(stores, sizes, strict=True)]
        if by == 4 or total(found) <= allowed:
            return f"draw {words} the width and height", found
    return None


CHANGES: dict[str, Callable[[Stores, int], Change | None]] = {
    "steps": _every(
        "leave out `steps`", lambda s: s.keeping(steps=Steps.of("mean")) if s.keep.steps.each else s
    ),
    "fewer steps": _fewer(
        "keep {} `steps`",
        lambda s: s.keep.steps.held(s.passes) if s.keep.steps.each else 1,
        _some_steps,
    ),
    "heads": _every("leave out `heads`", lambda s: s.keeping(heads=Heads.of("mean"))),
    "dtype": _every("pass `dtype=torch.float16`", lambda s: s.keeping(dtype=torch.float16)),
    "branch": _every("leave out `branch`", _without("negative")),
    "ask": _every("leave out `ask`", _without("asked")),
    "refine": _every("leave out `refine`", _without("self")),
    "spots": _every("leave out `spots`", _without("spots")),
    "layers": _coarser,
    "tokens": _fewer("keep {} `tokens`", lambda s: len(s.tokens), _some_tokens),
    "words": _fewer(
        "choose `words` of {} tokens", lambda s: len(s.tokens) if _of_prompt(s) else 1, _some_tokens
    ),
    "frames": _fewer(
        "keep {} `frames`", _kept_frames, lambda s, n: s.keeping(frames=tuple(range(n)))
    ),
    "num_frames": _fewer("draw `num_frames` for {} latent frames", _kept_frames, _some_frames),
    "images": _fewer(
        "draw {} images at a time",
        lambda s: s.rows // s.branches,
        lambda s, n: replace(s, rows=n * s.branches),
    ),
    "size": _smaller,
}
