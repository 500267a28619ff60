"""What is compared: the presets, refined ones, what could become the default, and all layers but
for one thing chosen."""

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
]
EVERY = _all_but("all layers, all steps")

# Its 1.0.0 as it comes: the last step, the mean of a layer's heads, the mean of all layers in the
# size of the largest.
_LAST = _all_but("attention-map-diffusers", steps="last")

_OF_UNETS = [one for one in PRESETS.values() if one.places[0] != "double"]
PEERS = {one.name: one for one in (*_OF_UNETS, _LAST, *_REFINED)}
PARTS = {one.name: one for one in (EVERY, *_PLACES, *_GRIDS, *_STEPS)}


def _candidates() -> dict[str, Preset]:
    """Return the second half of the steps in several choices of layers, as it is, refined, and
    refined and sharpened."""
    half = (0.5, 1.0)
    layers = [
        PRESETS["default"],
        _all_but("up blocks, 8x8 cells and finer", places=("up",), least_cells=8, steps=half),
        _all_but("down and up, 16x16 cells", places=("down", "up"), cells=16, steps=half),
        _all_but("8x8 cells and finer", least_cells=8, steps=half),
    ]
    found = {one.name: one for one in layers}
    for one in layers:
        for power in (1.0, 2.0, 3.0, 5.0):
            ending = "" if power == 1 else f", to the power of {power:g}"
            name = f"{one.name}, refined{ending}"
            found[name] = replace(one, name=name, refine="self", sharpen=power)
    return found


CANDIDATES = _candidates()
VARIANTS = {**PEERS, **CANDIDATES, **PARTS}
