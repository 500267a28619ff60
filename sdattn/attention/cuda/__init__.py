"""Triton's kernels behind :mod:`sdattn.attention.recording`, and torch's own operations where they
do not agree.

`dispatch` chooses case by case, and `choice` remembers; `launching` hands tensors to `kernels`.
Neither of these two is loaded where there is no CUDA.
"""

from .dispatch import kernels_in_use as kernels_in_use
