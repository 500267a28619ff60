"""Gaussian smoothing, written out."""

import math

import numpy as np


def mirrored(place, n_cells):
    """The cell that a place beyond the border shows; walks there one step at a time."""
    cell, heading = 0, 1 if place > 0 else -1
    for _ in range(abs(place)):
        if n_cells == 1:
            return 0
        if not 0 <= cell + heading < n_cells:
            heading = -heading
        cell += heading
    return cell


def smooth_in_loops(values, sigma, radius):
    """A Gaussian over mirrored maps, float64 ``[rows, cols, ...]``."""
    rows, cols = values.shape[:2]
    window = range(-radius, radius + 1)
    bell = {(i, j): math.exp(-(i * i + j * j) / (2 * sigma**2)) for i in window for j in window}
    total = sum(bell.values())
    out = np.zeros(values.shape)
    for r in range(rows):
        for c in range(cols):
            for (i, j), weight in bell.items():
                out[r, c] += weight / total * values[mirrored(r + i, rows), mirrored(c + j, cols)]
    return out
