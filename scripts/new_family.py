"""Draft the record that a model of no known family needs, as a module to go on from.

    python -m scripts.new_family owner/name      a hub id, or the folder of a diffusers pipeline
    python -m scripts.new_family FOLDER > draft.py

A small model of the same class is built and called once, see :mod:`scripts.trial_call`. Everything
that no call shows is listed in the draft, a line each: ``# not known: timestep_unit: ...``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import diffusers

from scripts.trial_call import COLS, FRAMES, IMAGES, ROWS, SeenAttention, Trial, trial_call
from sdattn.files.terminal import shorter
from sdattn.loading.index import read_index, without_weights
from sdattn.loading.locating import download, find_model
from sdattn.models.attention_layer import Kind, Place
from sdattn.models.denoiser_call import holds_processor, unwrapped
from sdattn.models.families import PAGE, claimed, closest
from sdattn.models.family import Joined

_READ = ("encoder_hidden_states", "hidden_states", "timestep")  # by default, see Family.names
_WORDS = {"t": "text", "p": "image", "b": "both at once", "-": "neither", "?": "of a single row"}
_OPEN = (  # fields that no call of the model shows, and where they are to be read
    ("timestep_unit", "what the pipeline's __call__ divides the timestep by: 1.0 or 1000.0"),
    ("readers", "how the pipeline's encode_prompt makes columns of words"),
    ("guidance", "how the pipeline's __call__ runs guidance: NEGATIVE_FIRST or IN_TURN"),
)


@dataclass(frozen=True)
class DraftLayers:
    """The attention layers of one pattern.

    Attributes:
        pattern: of their paths, with ``*`` for numbers.
        count: how many the whole model has.
        place, kind: None where that is not known.
        said: what was seen of them, or why nothing was.
        joined: of joint attention, the order; None where it is not known.
        cells: queries of the image.
    """

    pattern: str
    count: int
    place: Place
    kind: Kind | None
    said: str
    joined: Joined | None = None
    cells: int = 0


@dataclass(frozen=True)
class FamilyDraft:
    """What could be found out of a model.

    Attributes:
        denoiser: the name of its class.
        layers: its attention, a pattern each.
        joined, grid, patch: fields of its :class:`Family`, the grid as source code; None where they
            are not known.
        closest: the name of the family with a denoiser of a similar name; None if there is none.
        not_known: what is open, a line each.
        text: the module.
    """

    denoiser: str
    layers: tuple[DraftLayers, ...]
    joined: Joined | None
    grid: str | None
    grid_argument: str | None
    patch: int | None
    closest: str | None
    not_known: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(_lines(self)) + "\n"


def draft_family(model: Any) -> FamilyDraft:
    """Draft a record from a model's modules, the arguments of its ``forward`` and one small call.

    Args:
        model: a denoiser of diffusers; it may be on the meta device. A small one of its class is
            built and called in its place.
    """
    model = unwrapped(model)
    trial = trial_call(model)
    layers = tuple(_layers(model, trial))
    alike = closest(type(model))
    orders = {one.joined for one in layers if one.kind == "joint"}
    joined = orders.pop() if len(orders) == 1 else None
    cells = {one.cells for one in layers if one.kind in ("cross", "joint")}
    grid, argument, patch = _grid(trial, cells or {one.cells for one in layers if one.cells})
    return FamilyDraft(
        denoiser=type(model).__name__,
        layers=layers,
        joined=joined,
        grid=grid,
        grid_argument=argument,
        patch=patch,
        closest=alike.name if alike else None,
        not_known=tuple(_not_known(model, trial, layers, joined, grid)),
    )


def folded(name: str) -> str:
    """Return the path of a module as a pattern of :attr:`Family.layers`.

    >>> folded("transformer_blocks.12.attn1")
    'transformer_blocks.*.attn1'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def _layers(model: Any, trial: Trial) -> Iterator[DraftLayers]:
    """The layers of the whole model, with what the small one's call showed of them."""
    held = [name for name, module in model.named_modules() if holds_processor(module)]
    counts = Counter(map(folded, held))
    seen: dict[str, list[SeenAttention]] = {}
    for one in trial.seen:
        seen.setdefault(folded(one.layer), []).append(one)
    for pattern, count in counts.items():
        yield _described(pattern, count, seen.get(pattern, []))
    for pattern in seen.keys() - counts.keys():  # a kernel's call in a module of another build
        said = f"{_said(seen[pattern][0])}; it holds no processor, so sdattn cannot watch it"
        yield DraftLayers(pattern, 0, "block", None, said)


def _described(pattern: str, count: int, seen: list[SeenAttention]) -> DraftLayers:
    place: Place = "single" if "single" in pattern else "block"
    if not seen:
        said = "no call of scaled_dot_product_attention was seen in it; linear attention has none"
        return DraftLayers(pattern, count, place, None, said)
    kinds = {_kind(one) for one in seen}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind == "joint" and place != "single":
        place = "double" if all(one.gets_text for one in seen) else "single"
    said = "; ".join(dict.fromkeys(map(_said, seen)))
    orders = {_order(one) for one in seen}
    joined = orders.pop() if kind == "joint" and len(orders) == 1 else None
    return DraftLayers(pattern, count, place, kind, said, joined, seen[0].queries.count("p"))


def _kind(seen: SeenAttention) -> Kind | None:
    """What kind of attention a call was; None for that of the text alone, or of what is neither."""
    queries, keys = set(seen.queries) - {"-"}, set(seen.keys) - {"-"}
    if queries == {"p"} and keys == {"t"}:
        return "cross"
    if queries == keys == {"t", "p"}:
        return "joint"
    if queries == keys == {"p"}:
        return "temporal" if len(seen.keys) == FRAMES and seen.rows > FRAMES else "self"
    return None


def _order(seen: SeenAttention) -> Joined | None:
    order = [token for token, _ in groupby(seen.keys) if token != "-"]
    orders: dict[tuple[str, ...], Joined]
    orders = {("t", "p"): "text first", ("p", "t"): "image first"}
    return orders.get(tuple(order))


def _said(seen: SeenAttention) -> str:
    """The tokens of a call in words.

    >>> _said(SeenAttention("attn", True, True, "ttppp", "ttppp", 1))
    'queries: 2 text, 3 image; keys: 2 text, 3 image'
    """
    parts = []
    for name, tokens in (("queries", seen.queries), ("keys", seen.keys)):
        runs = [f"{len(list(run))} {_WORDS[token]}" for token, run in groupby(tokens)]
        parts.append(f"{name}: {', '.join(runs)}")
    rows = f"; {seen.rows} rows for one of the model's" if seen.rows > 1 else ""
    return "; ".join(parts) + rows


def _grid(trial: Trial, cells: set[int]) -> tuple[str | None, str | None, int | None]:
    """The field ``grid`` as source code, ``grid_argument`` and ``patch``, from the number of
    queries of the image."""
    known = [name for name in IMAGES if name in trial.given]
    if len(cells) != 1 or not known:
        return None, None, None
    [count], name = cells, known[0]
    shape = trial.given[name].shape
    if "img_ids" in trial.given and count == ROWS * COLS:
        return "grid_of_ids", "img_ids", None
    for patch, span in product((1, 2, 4), (1, 2)):
        sides = {-2: patch, -1: patch}
        if FRAMES in shape and count * span * patch**2 == FRAMES * ROWS * COLS:
            sides = {shape.index(FRAMES): span, **sides}
        elif count * patch**2 != ROWS * COLS:
            continue
        if shape[-2:] == (ROWS, COLS):
            parts = [
                f'given["{name}"].shape[{axis}]' + f" // {by}" * (by > 1)
                for axis, by in sides.items()
            ]
            between = ",\n        "
            return f"lambda model, given: ({between[1:]}{between.join(parts)},\n    )", None, patch
    return None, None, None


def _not_known(
    model: Any, trial: Trial, layers: tuple[DraftLayers, ...], joined: Any, grid: Any
) -> Iterator[str]:
    if trial.error:
        error = shorter(trial.error, 200)
        yield f"what comes later in a call: the trial call of a small model ended: {error}"
    for one in layers:
        if one.kind is None:
            yield f"the kind of {one.pattern}: {one.said}"
        elif one.kind == "joint" and "neither" in one.said:
            yield f"what the tokens of neither are in {one.pattern}: no field counts them"
    if joined is None and any(one.kind == "joint" for one in layers):
        yield "joined: the order in which the processor's torch.cat joins text and image"
    if grid is None:
        yield "grid: how forward makes the image's tokens of the latents"
    arguments = trial.given or {}
    if absent := [name for name in _READ if name not in arguments]:
        yield f"names: forward has no {', '.join(absent)}; say which arguments stand for them"
    yield from (f"{name}: {where}" for name, where in _OPEN)


def _lines(draft: FamilyDraft) -> Iterator[str]:
    yield f"# A draft of the record for {draft.denoiser}; {PAGE} says how to go on."
    if draft.closest:
        yield f"# The family with the closest name is {draft.closest}."
    yield from (f"# not known: {line}" for line in draft.not_known)
    yield "from sdattn.models import Family"
    if draft.grid == "grid_of_ids":
        yield "from sdattn.models.denoiser_call import grid_of_ids"
    yield from ("", "FAMILY = Family(")
    yield f'    name="{draft.denoiser.partition("Transformer")[0]}",'
    yield f'    denoisers=("{draft.denoiser}",),'
    yield "    layers={"
    for one in draft.layers:
        yield f"        # {one.count}; {one.said}"
        if one.kind is None:
            yield f'        # not known: "{one.pattern}": ("{one.place}", ...),'
        else:
            yield f'        "{one.pattern}": ("{one.place}", "{one.kind}"),'
    yield "    },"
    if any(one.kind == "joint" for one in draft.layers):
        known = f'joined="{draft.joined}",'
        yield (
            f"    {known}"
            if draft.joined
            else '    # not known: joined="text first" or the reverse'
        )
    yield f"    grid={draft.grid},{'' if draft.grid else '  # not known'}"
    if draft.grid_argument:
        yield f'    grid_argument="{draft.grid_argument}",'
    if draft.patch:
        yield f"    patch={draft.patch},"
    yield ")"


def unclaimed_denoiser(model: str) -> Any | None:
    """Return a pipeline's denoiser without its weights, if no family claims it."""
    path = find_model(model)
    folder = path or download(model)
    index = {} if folder.is_file() else read_index(folder)
    for name in ("unet", "transformer"):
        match index.get(name):
            case ["diffusers", str(kind)]:
                found = without_weights(getattr(diffusers, kind), folder / name)
                return None if claimed(found) else found
    return None


def main() -> None:
    """Print the draft for a model, or say why there is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a diffusers pipeline, or hub id")
    model = parser.parse_args().model
    denoiser = unclaimed_denoiser(model)
    if denoiser is None:
        sys.exit(f"{model} holds no denoiser that needs a record: run `sdattn info {model}`.")
    print(draft_family(denoiser).text, end="")


if __name__ == "__main__":
    main()
