"""Bilinear enlargement, written out."""

import numpy as np


def stretch(values, size):
    """Bilinear with aligned cell centres, written out: float64 ``[rows, cols]``."""
    out = np.zeros(size)
    for r in range(size[0]):
        for c in range(size[1]):
            y = (r + 0.5) * values.shape[0] / size[0] - 0.5
            x = (c + 0.5) * values.shape[1] / size[1] - 0.5
            y, x = np.clip(y, 0, values.shape[0] - 1), np.clip(x, 0, values.shape[1] - 1)
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, values.shape[0] - 1), min(x0 + 1, values.shape[1] - 1)
            fy, fx = y - y0, x - x0
            top = values[y0, x0] * (1 - fx) + values[y0, x1] * fx
            bottom = values[y1, x0] * (1 - fx) + values[y1, x1] * fx
            out[r, c] = top * (1 - fy) + bottom * fy
    return out
