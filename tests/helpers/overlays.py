"""Heat over a grey image, written out: the higher a value, the more opaque its colour."""

import matplotlib
import numpy as np

OPACITY = 0.85  # of the highest value


def overlaid(image, places, opacity=OPACITY):
    """RGB of 0 to 255, ``[..., 3]``, of an image's RGB and the places of values from 0 to 1."""
    places = np.clip(np.asarray(places, dtype=float), 0, 1)
    grey = np.asarray(image, dtype=float) @ np.array([0.299, 0.587, 0.114])
    colours = np.array(matplotlib.colormaps["inferno"](places))[..., :3] * 255
    opaque = opacity * places[..., None]
    return (1 - opaque) * grey[..., None] + opaque * colours
