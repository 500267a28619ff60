from collections.abc import Collection, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from ..errors import InvalidTypeError, InvalidValueError, OptionError, did_you_mean, refuse
from ..models.layers import Place
from ..models.values import checked_truth, checked_whole, whole


def aggregate_attention(
    store: Any,
    res: int | tuple[int, int],
    from_where: Sequence[str],
    is_cross: bool,
    select: int,
    prompts: int | str | Sequence[str] | None = None,
) -> Tensor:
    """Return the mean map of the layers of one resolution, over their heads, as
    ``aggregate_attention`` in the notebooks of google/prompt-to-prompt does; raise ValueError if
    these places have none (``max_queries`` leaves out larger ones), or the images cannot be told
    apart.

    Args:
        store: after a run; its means over the steps are read. Any store with
            ``get_average_attention()`` will do.
        res: side of the grid, 16 for 16x16 cells, or (rows, cols).
        from_where: some of ``"down"``, ``"mid"`` and ``"up"``.
        is_cross: cross-attention, or self-attention.
        select: the image, counted from 0.
        prompts: the prompts of the images, or their number, if the store does not know it.

    Returns:
        float ``[rows, cols, T]`` on the CPU, probabilities.
    """
    return aggregated(store, res, from_where, is_cross, select, prompts).cpu()


def aggregated(
    store: Any,
    res: int | tuple[int, int],
    from_where: Sequence[str],
    is_cross: bool,
    select: int,
    prompts: int | str | Sequence[str] | None = None,
) -> Tensor:
    if not callable(getattr(store, "get_average_attention", None)):
        raise InvalidTypeError(f"A {type(store).__name__} is no store. Pass an AttentionStore.")
    rows, cols = _grid(res)
    kind = "cross" if checked_truth("is_cross", is_cross) else "self"
    average = store.get_average_attention()
    known = [key.removesuffix(f"_{kind}") for key in average if key.endswith(f"_{kind}")]
    _check_places(from_where, known)
    fitting = []
    for place in from_where:
        for maps in average.get(f"{place}_{kind}", ()):
            if maps.shape[1] == rows * cols:
                fitting.append(maps)
    if isinstance(prompts, Sequence):
        prompts = 1 if isinstance(prompts, str) else len(prompts)
    if prompts is not None:
        prompts = checked_whole("prompts", prompts)
    images = prompts or getattr(store, "images", None) or len(getattr(store, "prompts", ()))
    if not fitting or not images or any(len(maps) % images for maps in fitting):
        there = {key: sorted({m.shape[1] for m in maps}) for key, maps in average.items() if maps}
        raise InvalidValueError(
            f"Asked for {kind}-attention of {rows}x{cols}={rows * cols} queries from "
            f"{list(from_where)} for {images or 'an unknown number of'} image(s); found numbers of "
            f"queries {there}. Choose another res or place; pass prompts= if the number of images "
            "is not known; larger maps are kept with AttentionStore(max_queries=...)."
        )
    number = whole(select)
    if number is None or not -images <= number < images:
        raise refuse("select", select, f"0 to {images - 1}, since there are {images} image(s)")
    # One mean over all heads of all layers, so that a layer with more heads counts for more.
    by_image = [m.reshape(images, -1, rows, cols, m.shape[-1])[number] for m in fitting]
    every = torch.cat(by_image)  # [layers*heads, rows, cols, T]
    return every.sum(0) / len(every)


def _check_places(from_where: object, known: Sequence[str]) -> None:
    if not isinstance(from_where, Collection):
        raise refuse("from_where", from_where, "a list of places, such as ['up', 'down']")
    for place in from_where:
        if place not in (*get_args(Place), *known):
            near = did_you_mean(str(place).partition("_")[0], known)
            text = f"places are {', '.join(map(repr, known))}, without a kind.{near}"
            raise OptionError("from_where", [*from_where], text)


def _grid(res: object) -> tuple[int, int]:
    """Return (rows, cols) of a side or of both."""
    sides = [whole(side) for side in (res if isinstance(res, (tuple, list)) else (res, res))]
    match sides:
        case [int(rows), int(cols)] if rows > 0 and cols > 0:
            return rows, cols
    raise refuse("res", res, "the side of the grid in cells, such as 16, or (rows, cols)")
