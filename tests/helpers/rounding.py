"""How far two answers to one question may lie apart by rounding alone.

In which order a library adds the products of a matrix product follows from the shapes, the row of
the batch, the number of threads and the processor. So bits are promised for the same row of the
same call on the same shapes with as many threads, and for nothing else.

    torch.testing.assert_close(found, expected, rtol=rounding(16 + 77), atol=0)
"""

import math

import numpy as np
import torch


def rounding(terms, dtype=torch.float32):
    """Four deviations of a sum of so many terms, each rounded; relative to what is added, of which
    much may cancel out."""
    return 4 * math.sqrt(terms) * torch.finfo(dtype).eps


def levels_apart(found, expected):
    """By how many of 256 levels two images differ, each colour of each pixel."""
    return abs(np.asarray(found, dtype=int) - np.asarray(expected, dtype=int))
