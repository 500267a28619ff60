"""What is compared: the presets, refined ones, and all layers but for one thing chosen."""

from __future__ import annotations

from dataclasses import replace

from sdattn.maps.presets import PRESETS, UNET, Preset

DEFAULT = "default"


def _all_but(name: str, **chosen: object) -> Preset:
    """Every layer and every step, except for what is chosen."""
    return replace(Preset(name, UNET), **chosen)


_REFINED = [
    replace(PRESETS[name], name=f"{name}, refined", refine="self") for name in ("default", "daam")
]
_PLACES = [_all_but(f"{place} blocks", places=(place,)) for place in UNET]
_GRIDS = [_all_but(f"{cells}x{cells} cells", cells=cells) for cells in (16, 8, 4, 2)]
_PLACES += [
    _all_but("up blocks, 16x16 cells", places=("up",), cells=16),
    _all_but("up blocks, 8x8 cells", places=("up",), cells=8),
    _all_but("down blocks, 16x16 cells", places=("down",), cells=16),
]
_STEPS = [
    _all_but("first quarter of the steps", steps=(0.0, 0.25)),
    _all_but("second quarter", steps=(0.25, 0.5)),
    _all_but("third quarter", steps=(0.5, 0.75)),
    _all_but("last quarter", steps=(0.75, 1.0)),
    _all_but("last step", steps="last"),
]
EVERY = _all_but("all layers, all steps")

_OF_UNETS = [one for one in PRESETS.values() if one.places[0] != "double"]
PEERS = {one.name: one for one in (*_OF_UNETS, *_REFINED)}
PARTS = {one.name: one for one in (EVERY, *_PLACES, *_GRIDS, *_STEPS)}
VARIANTS = {**PEERS, **PARTS}
