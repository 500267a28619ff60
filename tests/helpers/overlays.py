"""Heat over an image, written out in float64: the darkened grey, and light where a word looked."""

import matplotlib
import numpy as np

OPACITY = 0.85  # of the highest value


def own_place(values, top, low=0.0):
    """Places of a word's values on its own scale: its peak has the root of its share of the top."""
    values = np.asarray(values, dtype=float)
    peak = values.max()
    return ((values - low) / (peak - low) * np.sqrt(min(1.0, peak / top))).clip(0, 1)


def overlaid(image, places, opacity=OPACITY, cmap="inferno"):
    """RGB of 0 to 255, ``[..., 3]``, of an image's RGB and the places of values from 0 to 1."""
    places = np.clip(np.asarray(places, dtype=float), 0, 1)
    return _lit(image, places, np.array(matplotlib.colormaps[cmap](places))[..., :3] * 255, opacity)


def tinted(image, places, tints, opacity=OPACITY):
    """RGB of several words: places ``[words, ...]``, colours ``[words, 3]``; without outlines."""
    places = np.clip(np.asarray(places, dtype=float), 0, 1)[..., None]
    shape = len(tints), *[1] * (places.ndim - 2), 3
    light = np.asarray(tints, dtype=float).reshape(shape) * np.sqrt(places)
    weights = places**2 / np.maximum((places**2).sum(0), 1e-12)
    return _lit(image, places.max(0)[..., 0], (weights * light).sum(0), opacity)


def spotlit(image, places, opacity=OPACITY):
    """RGB of an image that keeps its colours where the places are high."""
    places = np.clip(np.asarray(places, dtype=float), 0, 1)[..., None]
    image = np.asarray(image, dtype=float)
    return (1 - opacity * places) * _dark(image) + opacity * places * image


def _lit(image, places, colours, opacity):
    places = places[..., None]
    seen = opacity * np.minimum(1, 3 * places)
    return np.clip((1 - seen * places) * _dark(image) + seen * colours, 0, 255)


def _dark(image):
    return (np.asarray(image, dtype=float) @ np.array([0.2126, 0.7152, 0.0722]) / 3)[..., None]
