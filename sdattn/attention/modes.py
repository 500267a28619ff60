"""Modes of torch's that act on the model, and must not reach sdattn's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# A block in which autocast casts nothing, on any device. torch's public
# `autocast(device, enabled=False)` does the same for one device and takes as long as a small layer.
no_autocast: Any = torch._C._DisableAutocast


@contextmanager
def own_arithmetic(graph: bool = False) -> Iterator[None]:
    """Compute in the dtypes that are there, with a gradient only if ``graph``, and make tensors
    that later passes may add to, whatever mode the model runs in."""
    with no_autocast(), torch.inference_mode(False), torch.set_grad_enabled(graph):
        yield
