"""A :class:`sdattn.MapStore` as an array of xarray, and as a text; warnings of calls it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..attention.core import grid_text
from ..errors import warn
from ..files.tables import labelled
from ..follow.passes import CaptureWarning

if TYPE_CHECKING:
    import xarray as xr


def as_xarray(store: Any, layer: str) -> xr.DataArray:
    """See :meth:`sdattn.MapStore.to_xarray`."""
    maps = store.maps[layer].detach().float().cpu()
    [watched] = [la for la in store.layers if la.name == layer]
    calls = store.seen[layer]
    each = store.keep.steps.each
    axes: dict[str, Sequence[Any] | None] = {"image": range(len(maps))}
    if each:
        axes["step"] = calls
    if store.keep.heads.each:
        axes["head"] = store.keep.heads.numbers or range(watched.heads)
    columns = range(maps.shape[-1])
    looks = store.keep.queries
    tokens = store.tokens or columns
    if looks.in_text:
        axes |= {"query": range(maps.shape[-2]), "token": tokens}
    else:
        if maps.dim() - len(axes) == 4:
            axes["frame"] = store.keep.frames or range(maps.shape[len(axes)])
        axes |= {"row": None, "col": None}
        if looks.cells is not None:
            axes["query"] = columns
        elif watched.kind == "self":
            axes["key"] = columns
        else:
            axes["token"] = tokens
    found = labelled(maps.numpy(), axes, layer=layer, place=watched.place)
    times = [store.passes[call].timestep for call in calls]
    return found.assign_coords(timestep=("step", times)) if each else found


def as_text(store: Any) -> str:
    """See :meth:`sdattn.MapStore.report`."""
    if not store.passes:
        return f"layers     {len(store.layers)} watched\npasses     none yet"
    first = store.passes[0]
    missing = store.missing()
    grids = sorted({held.grid for held in store.sums.values() if held.grid}, reverse=True)
    layout = " | ".join(chunk or "neither" for chunk in first.order or ())
    times = [f"{t:g}" for t in store.timesteps]
    if len(times) > 6:
        times = [*times[:3], "…", *times[-2:]]
    kept = "all" if store.tokens is None else f"columns {list(store.tokens)}"
    lines = {
        "layers": f"{len(store.layers) - len(missing)} of {len(store.layers)} seen",
        "missing": ", ".join(missing) or "none",
        "grids": ", ".join(map(grid_text, grids)),
        "passes": f"{len(store.passes)}, timesteps {', '.join(times)}",
        "skipped": f"{store.skipped} passes that are not the branch's",
        "guidance": f"{layout} in a batch of {first.batch}",
        "images": f"{store.images}, {' and '.join(dict.fromkeys(first.branches))}",
        "kept": f"steps {store.steps}, heads {store.heads}, tokens {kept}",
        "held": f"{store.nbytes / 1e6:.2f} MB",
    }
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())


def warn_of_calls(store: Any) -> None:
    """Warn of layers that did not run once in each kept pass, and of chosen passes that never
    came."""
    # A cache (FirstBlockCache, DeepCache, FasterCache) skips layers in some steps.
    if uneven := store.uneven():
        some = [f"{name} in {', '.join(map(str, store.seen[name]))}" for name in uneven[:3]]
        often = any(store.sums[name].calls > store.kept_passes for name in uneven)
        why = "some were called several times in one" if often else "is a cache enabled?"
        warn(
            f"{len(uneven)} watched layers did not run once in each of {store.kept_passes} steps "
            f"({why}). Their maps are of these alone: {'; '.join(some)}.",
            CaptureWarning,
        )
    chosen = () if store.stopped else store.keep.steps.numbers or ()
    if skipped := [step for step in chosen if step >= len(store.passes)]:
        warn(
            f"Asked for steps {list(chosen)}, but the model ran {len(store.passes)} times (0 to "
            f"{len(store.passes) - 1}): nothing is held of {skipped}.",
            CaptureWarning,
        )
