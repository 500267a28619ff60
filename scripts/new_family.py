"""Draft the record that a model of no known family needs, as a module to go on from.

    python -m scripts.new_family owner/name      a hub id, or the folder of a diffusers pipeline
    python -m scripts.new_family FOLDER > draft.py

A small model of the same class is built, see :mod:`scripts.trial_call`, and inspected by
:func:`sdattn.inspect_attention`. Everything that no call shows is listed in the draft, a line each:
``# not known: timestep_unit: ...``.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers

from scripts.trial_call import COLS, FRAMES, IMAGES, ROWS, TEXT, small_model, trial_calls
from sdattn import inspect_attention
from sdattn.errors import SdattnError
from sdattn.files.terminal import shorter
from sdattn.loading.hub import settings_in
from sdattn.loading.index import files_in, read_index, without_weights
from sdattn.loading.locating import find_model
from sdattn.loading.options import LoadingOptions
from sdattn.loading.repository import HubName, Repository
from sdattn.models.denoiser_call import unwrapped
from sdattn.models.families import PAGE, claimed, closest
from sdattn.models.family import Joined
from sdattn.models.layers import Kind, Place
from sdattn.unknown.inspection import AttentionTable
from sdattn.unknown.proposal import InspectedCall, Proposal, folded

_READ = (TEXT, "hidden_states", "timestep")  # by default, see Family.names
_OPEN = (  # fields that no call of the model shows, and where they are to be read
    ("timestep_unit", "what the pipeline's __call__ divides the timestep by: 1.0 or 1000.0"),
    ("readers", "how the pipeline's encode_prompt makes columns of words"),
    ("guidance", "how the pipeline's __call__ runs guidance: NEGATIVE_FIRST or IN_TURN"),
)
_UNLISTED = "it holds no processor, so no record can list it"


@dataclass(frozen=True)
class DraftLayers:
    """The attention layers of one pattern.

    Attributes:
        pattern: of their paths, with ``*`` for numbers.
        count: how many of the whole model hold a processor.
        place: in a block, of one stream or two.
        kind: None where that is not known.
        said: what was seen of them, or why nothing was.
        joined: of joint attention, the order; None where it is not known.
    """

    pattern: str
    count: int
    place: Place
    kind: Kind | None
    said: str
    joined: Joined | None = None


@dataclass(frozen=True)
class FamilyDraft:
    """What could be found out of a model.

    Attributes:
        denoiser: the name of its class.
        layers: its attention, a pattern each.
        joined: field of its :class:`Family`; None where it is not known.
        fields: further fields of it, as source code.
        closest: the name of the family with a denoiser of a similar name; None if none is similar.
        not_known: what is open, a line each.
    """

    denoiser: str
    layers: tuple[DraftLayers, ...]
    joined: Joined | None
    fields: Mapping[str, str]
    closest: str | None
    not_known: tuple[str, ...]

    @property
    def text(self) -> str:
        """The module."""
        return "\n".join(_lines(self)) + "\n"


def draft_family(model: Any) -> FamilyDraft:
    """Draft a record from a model's modules, the arguments of its ``forward`` and a dry run.

    Args:
        model: a denoiser of diffusers; it may be on the meta device. A small one of its class is
            built and called in its place.
    """
    model = unwrapped(model)
    given, table = _dry_run(model)
    layers = tuple(_layers(model, table))
    orders = {one.joined for one in layers if one.kind == "joint"}
    joined = orders.pop() if len(orders) == 1 else None
    fields = _grid_fields(given, table.proposal.grid)
    alike = closest(type(model))
    return FamilyDraft(
        denoiser=type(model).__name__,
        layers=layers,
        joined=joined,
        fields=fields,
        closest=alike.name if alike else None,
        not_known=tuple(_not_known(given, table, layers, fields)),
    )


def _dry_run(model: Any) -> tuple[dict[str, Any], AttentionTable]:
    """Return the arguments and the attention of the first trial call that works; if none does, an
    empty table that says why."""
    errors = []
    try:
        small = small_model(model)
        for given in trial_calls(small):
            text = TEXT if TEXT in given else None
            try:
                return given, inspect_attention(small, text=text, **given)
            except Exception as error:  # of any kind: it is the model's own code
                shape = next(list(given[name].shape) for name in IMAGES if name in given)
                said = f"{type(error).__name__}: {shorter(str(error), 100)}"
                errors.append(f"a trial call of a small model with latents {shape} ended: {said}")
    except ValueError as error:
        errors.append(f"what a call shows: {shorter(str(error), 200)}")
    return {}, AttentionTable((), Proposal(None, None, None, tuple(errors)))


def _layers(model: Any, table: AttentionTable) -> Iterator[DraftLayers]:
    """Yield the layers of the whole model, with what the small one's calls showed of them."""
    paths: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if hasattr(module, "processor"):
            paths.setdefault(folded(path), []).append(path)
    seen: dict[str, list[InspectedCall]] = {pattern: [] for pattern in paths}
    for call in table:
        seen.setdefault(folded(call.name.partition(":")[0]), []).append(call)
    for pattern, calls in seen.items():
        held = paths.get(pattern, [])
        kinds = {call.kind for call in calls}
        kind = kinds.pop() if len(kinds) == 1 and held else None
        orders = {_order(call) for call in calls}
        yield DraftLayers(
            pattern=pattern,
            count=len(held),
            place=_place(model, held[0]) if kind == "joint" else "block",
            kind=kind,
            said=_said(calls) if held else f"{_said(calls)}; {_UNLISTED}",
            joined=orders.pop() if kind == "joint" and len(orders) == 1 else None,
        )


def _place(model: Any, path: str) -> Place:
    """Return the place of joint attention: blocks of two streams take the text next to the
    image."""
    block = model.get_submodule(path.rpartition(".")[0])
    has_two = TEXT in inspect.signature(block.forward).parameters
    return "double" if has_two and "single" not in path else "single"


def _order(call: InspectedCall) -> Joined | None:
    """Return the order of joint attention; None if something stands on both sides of the text."""
    if call.text is None or (call.text.start > 0 and call.text.stop < call.keys):
        return None
    return "text first" if call.text.start == 0 else "image first"


def _said(calls: list[InspectedCall]) -> str:
    """Say what was seen of the layers of one pattern."""
    if not calls:
        return "no attention call was seen in it; linear attention makes none"
    lines = []
    for call in calls:
        text = "" if call.text is None else f", text {call.text.start}:{call.text.stop}"
        rows = f", in {call.rows} rows for one of the model's" if call.rows > 1 else ""
        lines.append(f"queries {call.queries}, keys {call.keys}{text}{rows}")
    return "; ".join(dict.fromkeys(lines))


def _grid_fields(given: Mapping[str, Any], grid: tuple[int, ...] | None) -> dict[str, str]:
    """Return the fields of a record that tell a grid, as source code; none where the sides of the
    latents do not make it."""
    if grid is None:
        return {}
    video = {"video": "True"} if len(grid) == 3 else {}
    if "img_ids" in given:
        return {**video, "grid": "grid_of_ids", "grid_argument": '"img_ids"'}
    name = next(name for name in IMAGES if name in given)
    shape = given[name].shape
    axes = [axis for axis, side in enumerate(shape) if side in (FRAMES, ROWS, COLS)][-len(grid) :]
    if [shape[axis] for axis in axes] != [FRAMES, ROWS, COLS][-len(grid) :]:
        return {}
    lines = ["lambda model, given: ("]
    for axis, side in zip(axes, grid, strict=True):
        patch, rest = divmod(shape[axis], side)
        if rest:
            return {}
        divided = f" // {patch}" if patch > 1 else ""
        lines.append(f'    given["{name}"].shape[{axis}]{divided},')
    return {**video, "grid": "\n    ".join([*lines, ")"]), "patch": str(patch)}


def _not_known(
    given: Mapping[str, Any],
    table: AttentionTable,
    layers: tuple[DraftLayers, ...],
    fields: Mapping[str, str],
) -> Iterator[str]:
    yield from table.proposal.unsure
    for one in layers:
        if one.kind is None:
            yield f"the kind of {one.pattern}: {one.said}"
        elif one.kind == "joint" and one.joined is None:
            yield f"joined: the order in which {one.pattern} joins text and image"
    if "grid" not in fields:
        yield "grid: how forward makes the image's tokens of the latents"
    if any(call.rows > 1 for call in table if call.kind == "cross"):
        yield "frame_rows: frames are rows of the batch, so override it, as families/unet.py does"
    if absent := [name for name in _READ if given and name not in given]:
        yield f"names: forward has no {', '.join(absent)}; say which arguments stand for them"
    yield from (f"{name}: {where}" for name, where in _OPEN)


def _lines(draft: FamilyDraft) -> Iterator[str]:
    yield f"# A draft of the record for {draft.denoiser}; {PAGE} says how to go on."
    if draft.closest:
        yield f"# The family with the closest name is {draft.closest}."
    yield from (f"# not known: {line}" for line in draft.not_known)
    yield "from sdattn.models import Family"
    if draft.fields.get("grid") == "grid_of_ids":
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
    if draft.joined:
        yield f'    joined="{draft.joined}",'
    elif any(one.kind == "joint" for one in draft.layers):
        yield '    # not known: joined="text first" or the reverse'
    if "grid" not in draft.fields:
        yield "    grid=None,  # not known"
    yield from (f"    {name}={code}," for name, code in draft.fields.items())
    yield ")"


def unclaimed_denoiser(model: str) -> Any | None:
    """Return a pipeline's denoiser without its weights, if no family claims it."""
    path = find_model(model)
    if path is None:
        name = HubName.read(model)
        assert name is not None  # find_model() has read it
        path = settings_in(Repository.find(name), LoadingOptions()).path
    index = {} if path.is_file() else read_index(path, files_in(path))
    for name in ("unet", "transformer"):
        match index.get(name):
            case ["diffusers", str(kind)]:
                found = without_weights(getattr(diffusers, kind), path / name)
                return None if claimed(found) else found
    return None


def main() -> None:
    """Print the draft for a model, or say why there is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a diffusers pipeline, or hub id")
    model = parser.parse_args().model
    try:
        denoiser = unclaimed_denoiser(model)
    except SdattnError as error:
        sys.exit(str(error))
    if denoiser is None:
        sys.exit(f"{model} holds no denoiser that needs a record: run `sdattn info {model}`.")
    print(draft_family(denoiser).text, end="")


if __name__ == "__main__":
    main()
