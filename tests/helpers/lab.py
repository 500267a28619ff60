"""sRGB to CIELAB (IEC 61966-2-1, CIE 15, D65), and as colour-blind people see it."""

import numpy as np

_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                 [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color
# Vision Deficiency", severity 1, on linear RGB
SEEN_BY = {
    "everyone": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
}  # fmt: skip


def lab(rgb, seen_by="everyone"):
    """L*, a* and b*, ``[..., 3]``, of RGB of 0 to 255."""
    share = np.asarray(rgb, dtype=float) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    linear = (linear @ SEEN_BY[seen_by].T).clip(0, 1)
    xyz = linear @ _XYZ.T / (0.95047, 1.0, 1.08883)
    root = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    x, y, z = np.moveaxis(root, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def chroma(rgb):
    return np.hypot(*np.moveaxis(lab(rgb)[..., 1:], -1, 0))
