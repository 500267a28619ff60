"""How far two answers to one question may lie apart by rounding alone.

In which order a library adds the products of a matrix product follows from the shapes, the row of
the batch, the number of threads and the processor. So bits are promised for the same row of the
same call on the same shapes with as many threads, and for nothing else.

    torch.testing.assert_close(found, expected, rtol=rounding(16 + 77), atol=0)
    assert_same_image(found, expected, terms_of(pipe.unet, pipe.unet, pipe.vae))
"""

import math

import numpy as np
import torch


def rounding(terms, dtype=torch.float32):
    """Four deviations of a sum of so many terms, each rounded; relative to what is added, of which
    much may cancel out."""
    return 4 * math.sqrt(terms) * torch.finfo(dtype).eps


def terms_of(*models):
    """The products that are added for a number of the output, layer behind layer, model behind
    model; a model that is called twice counts twice."""
    weights = (one for model in models for one in model.parameters() if one.ndim > 1)
    return sum(weight[0].numel() for weight in weights)


def levels_apart(found, expected):
    """By how many of 256 levels two images differ, each colour of each pixel."""
    return abs(np.asarray(found, dtype=int) - np.asarray(expected, dtype=int))


def assert_same_image(found, expected, terms, dtype=torch.float32):
    """What lies on the edge of two levels falls to either. A number from 0 to 1 that is off by e
    does so with a chance of 255 e, so that the mean is the deviation of the numbers.

    bfloat16, whose steps are no finer than the levels, may be off by some of its own.
    """
    apart, eps = levels_apart(found, expected), torch.finfo(dtype).eps
    most, mean = 1.0, 255 * math.sqrt(terms) * eps
    if dtype.itemsize == 2:
        step = 255 * eps / 2  # from a half to 1
        most, mean = 1 + 4 * step, step / 2
    assert apart.max() <= most
    assert apart.mean() <= mean
