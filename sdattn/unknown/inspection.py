"""`inspect_attention()`: the attention calls of any model, and what to tell :func:`sdattn.capture`.

The model is called as it is, with another text (and another corner of the image, which tells the
order of its cells) and with another image. Every attention puts out the same numbers each time, so
no token learns of another. Then in any layer, however deep, a key that differs with another text is
one of the text, unless it differs with another image too (the text is averaged, and the mean added
to every token); and queries that differ with another image are the image's. The others are
registers, a time token, or learned queries that pool the text.

What is proposed was tried: :mod:`sdattn.unknown.trial`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.core import level_grids
from ..errors import CaptureError, InvalidTypeError, InvalidValueError, refuse
from ..follow.hooks import is_hooked
from ..models.denoiser_call import Size, unwrapped
from ..models.layers import Kind
from .arguments import arguments_by_name, batch_of, images_in, is_states
from .dry_run import (
    Tokens,
    another_corner,
    another_image,
    another_text,
    changed_tokens,
    tokens_seen,
    with_other,
)
from .proposal import InspectedCall, Proposal, propose
from .told import LEVELS
from .trial import rehearsed

# Arguments that hold a text's states or ids, by the names that models give them; the first counts
TEXT_NAMES = (
    "encoder_hidden_states",
    "context",
    "txt",
    "text",
    "text_states",
    "text_embeds",
    "prompt_embeds",
    "cap_feats",
    "caption",
    "memory",
    "cond",
    "y",
    "input_ids",
)
DIFFERENT = 1e-4  # of the largest value: far above what rounding makes of two equal tokens


@dataclass(frozen=True)
class AttentionTable(Sequence[InspectedCall]):
    """The attention calls of a model in order, and what they propose. It prints as a table.

    Attributes:
        calls: the attention calls.
        proposal: options of :func:`sdattn.capture`, and what is not sure of them.
    """

    calls: tuple[InspectedCall, ...]
    proposal: Proposal

    def __getitem__(self, index: Any) -> Any:
        return self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    def __str__(self) -> str:
        rows = [("layer", "made by", "heads", "queries", "keys", "mask", "kind", "text")]
        for call in self.calls:
            numbers = str(call.heads), str(call.queries), str(call.keys)
            mask = "yes" if call.has_mask else ""
            text = "" if call.text is None else f"{call.text.start}:{call.text.stop}"
            rows.append((call.name, call.made_by, *numbers, mask, call.kind or "not known", text))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", str(self.proposal)])

    __repr__ = __str__


def inspect_attention(
    model: Any, *args: Any, text: Tensor | str | None = None, **kwargs: Any
) -> AttentionTable:
    """Return a table of the attention calls of ``model(*args, **kwargs)``, and a proposal.

        >>> table = sdattn.inspect_attention(unet, latents, timestep, context)  # doctest: +SKIP
        >>> print(table)  # the calls, and the line to type               # doctest: +SKIP
        >>> with sdattn.capture(unet, **table.proposal.options) as store:  # doctest: +SKIP

    The model is called three times without gradient, see :mod:`sdattn.unknown.inspection`; its
    parameters and buffers, and the random numbers that follow, are as before.

    Args:
        model: any torch module.
        args, kwargs: a call of it, as your own code makes it. A text and an image of different
            sizes leave less in doubt.
        text: the tensor among them that holds the text, or the name of its argument. Default: the
            argument of a usual name (``encoder_hidden_states``, ``context``, ``txt`` …).

    Raises:
        TypeError: the model is no torch module.
        ValueError: the text is not among the arguments, or the model's tensors have no values
            (torch's meta device).
        CaptureError: the model is being watched.
    """
    inner = unwrapped(model)
    if not isinstance(inner, nn.Module):
        raise InvalidTypeError(
            f"Asked to inspect a {type(inner).__name__}. Pass the torch module that is called once "
            "a step (pipe.unet or pipe.transformer of a pipeline)."
        )
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise InvalidValueError(
            "The model is on torch's meta device, and which tokens are the text is told by values. "
            "Build a small one of its class, with values."
        )
    if is_hooked(inner):
        raise CaptureError(
            f"Asked to inspect a {type(inner).__name__} that is watched just now (by a capture, or "
            "by an attached store), which would count these calls, of which each attention puts "
            "out zeros, as steps. Inspect the model before."
        )
    arguments = arguments_by_name(inner, args, kwargs)
    name = _text_name(inner, arguments, text)
    value = arguments.get(name or "")
    images = images_in(arguments, value)
    others = [another_image(image) for image in images]
    first, unlike = tokens_seen(inner, args, kwargs)
    third: Sequence[Tokens] = ()
    if images:
        third, _ = tokens_seen(inner, *_with_images(args, kwargs, images, others))
    second: Sequence[Tokens] = ()
    changed = None
    has_corner = _leaves_some(first, third)
    if name is not None:
        other = another_text(value)
        changed = changed_tokens(value, other)
        call = with_other(args, kwargs, value, other)
        if has_corner:
            corners = list(map(another_corner, images, others))
            call = _with_images(call[0], call[1], images, corners)
        second, _ = tokens_seen(inner, *call)
    batch = batch_of(arguments, value)
    calls = tuple(_classified(first, second, third, batch, changed, has_corner))
    seen = [tokens.seen for tokens in first]
    rehearse = partial(rehearsed, inner, args, kwargs, seen, unlike)
    proposal = propose(calls, arguments, name, text is not None, rehearse)
    if proposal.grid is not None:
        calls = tuple(_temporal(call, proposal.grid) for call in calls)
    return AttentionTable(calls, proposal)


def _with_images(args: Any, kwargs: Any, images: list[Any], others: list[Any]) -> tuple[Any, Any]:
    """Return a call's arguments with other images."""
    for image, other in zip(images, others, strict=True):
        args, kwargs = with_other(args, kwargs, image, other)
    return args, kwargs


def _leaves_some(first: Sequence[Tokens], third: Sequence[Tokens]) -> bool:
    """Check whether another image leaves some keys as they are: it does not move the text, so that
    image and text can change in one run."""
    keys = (_differing(one, other)[1] for one, other in zip(first, third, strict=False))
    return any(moved is not None and not all(moved) for moved in keys)


def _text_name(
    model: nn.Module, arguments: Mapping[str, Any], text: Tensor | str | None
) -> str | None:
    """Return the name of the argument with the text; None if none has a usual name."""
    if text is None:
        alike = []
        for name, value in arguments.items():
            if re.search("text|txt|prompt|caption", name) and is_states(value):
                alike.append(name)
        longest = max(alike, key=lambda name: int(arguments[name].shape[-2]), default=None)
        usual = (name for name in TEXT_NAMES if _may_be_text(arguments.get(name)))
        return next(usual, longest)
    if not isinstance(text, (Tensor, str)):
        what = "the tensor that holds the text, or the name of its argument; its place is found"
        raise refuse("text", text, what)
    for name, value in arguments.items():
        if value is text or (name == text and _may_be_text(value)):
            return name
    what = repr(text) if isinstance(text, str) else f"a tensor {list(text.shape)}"
    raise InvalidValueError(
        f"text={what}: the call of the {type(model).__name__} has no such argument with a "
        f"tensor or a list of some. Its arguments: {', '.join(arguments)}."
    )


def _may_be_text(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(one, Tensor) for one in value)
    return isinstance(value, Tensor)


def _classified(
    first: Sequence[Tokens],
    second: Sequence[Tokens],
    third: Sequence[Tokens],
    batch: int,
    changed: list[bool] | None,
    has_corner: bool,
) -> Iterator[InspectedCall]:
    """Compare the calls of each run, in order: as it is, with another text, of which some ids
    ``changed``, and perhaps another corner of the image, with another image."""
    for tokens, of_text, of_image in zip_longest(first, second[: len(first)], third[: len(first)]):
        by_text = _differing(tokens, of_text)
        by_image = _differing(tokens, of_image)
        *leading, queries, keys = tokens.shape or (0, 0)
        text_queries, text_keys = map(partial(_of_text, changed, has_corner), by_text, by_image)
        if text_queries is None and text_keys is not None:
            text_queries = text_keys if queries == keys else [False] * queries
        image_queries = by_image[1] if by_image[0] is None and queries == keys else by_image[0]
        if image_queries is None:  # no other image was seen
            image_queries = [True] * queries
        image_queries = _without(image_queries, text_queries or [False] * queries)
        kind, text = _kind_of(text_queries, text_keys)
        if kind == "joint" and by_image[1] is not None and not any(by_image[1]):
            kind = "cross"  # and a null key
        if kind in ("cross", "joint") and not any(image_queries):
            kind = text = None  # queries that learn nothing of the image
        in_batch, heads = leading if len(leading) == 2 else (batch, math.prod(leading) // batch)
        rows = max(1, in_batch // batch)
        yield InspectedCall(
            name=tokens.seen.name(kind),
            made_by=tokens.seen.made_by,
            rows=rows,
            heads=heads,
            queries=queries,
            keys=keys,
            has_mask=tokens.has_mask,
            kind=kind,
            text=text,
            image=_piece(image_queries),
            cells=rows * sum(image_queries),
            corner=_corner(by_text[0], image_queries) if has_corner else (),
        )


def _corner(by_text: list[bool] | None, image: list[bool]) -> tuple[bool, ...]:
    """Return which of the image's queries differ with another corner of it."""
    if by_text is None:
        return ()
    return tuple(one for one, is_image in zip(by_text, image, strict=True) if is_image)


def _of_text(
    changed: list[bool] | None,
    has_corner: bool,
    by_text: list[bool] | None,
    by_image: list[bool] | None,
) -> list[bool] | None:
    """Return which tokens are the text's, of those that differ with another text, and with another
    image. If some ids of the text ``changed`` alone, the others stand around them."""
    if by_text is None or by_image is None:
        found = by_text
    else:
        found = _without(by_text, by_image)
        if not (any(found) or all(by_text) or has_corner):  # the image's run moved the text too
            found = by_text
    if found is None or changed is None or True not in found:
        return found
    start = found.index(True) - changed.index(True)
    stop = start + len(changed)
    if start < 0 or found[start:stop] != changed or any(found[stop:]):
        return found
    return [start <= place < stop for place in range(len(found))]


def _without(some: list[bool], others: list[bool]) -> list[bool]:
    return [one and not other for one, other in zip(some, others, strict=True)]


def _piece(tokens: list[bool]) -> slice | None:
    """Return where some tokens are, if they are one piece."""
    if not any(tokens):
        return None
    start = tokens.index(True)
    piece = slice(start, start + sum(tokens))
    return piece if all(tokens[piece]) else None


def _temporal(call: InspectedCall, grid: Size) -> InspectedCall:
    """Return a call as temporal attention if the frames are its tokens and a level's cells its
    rows."""
    is_of_frames = call.kind == "self" and len(grid) == 3 and call.queries == grid[0] != call.rows
    if is_of_frames and call.cells in map(math.prod, level_grids(grid, LEVELS)):
        return replace(call, kind="temporal")
    return call


_Differing = tuple[list[bool] | None, list[bool] | None]  # queries, and keys


def _differing(one: Tokens, other: Tokens | None) -> _Differing:
    """Return which queries and keys of a call differ in two runs; None where that is not known, in
    a run that did not make the call too."""
    if other is None:
        return None, None

    def differ(a: Tensor | None, b: Tensor | None) -> list[bool] | None:
        if a is None or b is None or a.shape != b.shape:
            return None
        far = DIFFERENT * max(float(a.abs().max()), torch.finfo(torch.float32).tiny)
        apart: list[bool] = ((a - b).abs() > far).any(1).tolist()
        return apart

    return differ(one.queries, other.queries), differ(one.keys, other.keys)


def _kind_of(
    of_queries: list[bool] | None, of_keys: list[bool] | None
) -> tuple[Kind | None, slice | None]:
    """Return the kind of a call, of whose queries and keys some are of the text, and where the text
    is among the keys."""
    if not of_queries or not of_keys:
        return None, None
    if not any(of_keys):
        is_self = len(of_queries) == len(of_keys) and not any(of_queries)
        return ("self" if is_self else None), None
    if all(of_keys):
        if any(of_queries):
            return ("text" if all(of_queries) else None), None
        return "cross", _piece(of_keys)
    return "joint", _piece(of_keys)
