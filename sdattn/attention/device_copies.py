"""Host data that a device uses, copied there once: a GPU waits for every such copy.

    chosen(tensor, dim, numbers)    entries of an axis, by index
    DeviceCopies(tensor).on(device) a host tensor on a device

A list or CPU tensor that indexes a GPU tensor is copied to the GPU at every use.
"""

from functools import lru_cache

import torch
from torch import Tensor


def chosen(tensor: Tensor, dim: int, numbers: tuple[int, ...]) -> Tensor:
    """Return the entries of an axis at these indices, in that order, as a new tensor."""
    return tensor.index_select(dim, index_on(tensor.device, numbers))


@lru_cache(maxsize=256)
def index_on(
    device: torch.device, numbers: tuple[int, ...], dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return numbers on a device, ``[len(numbers)]``; do not write to them."""
    with torch.inference_mode(False):  # an inference tensor could not serve a gradient later
        return torch.tensor(numbers, dtype=dtype, device=device)


class DeviceCopies:
    """A tensor and its copies on other devices or in other dtypes, each made once, and again after
    a write to the tensor."""

    def __init__(self, own: Tensor):
        self.own = own
        self._held: dict[tuple[torch.device, torch.dtype], tuple[int, Tensor]] = {}

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on a device, in its own dtype by default."""
        own, dtype = self.own, dtype or self.own.dtype
        if own.requires_grad or (own.device, own.dtype) == (device, dtype):
            return own.to(device, dtype)
        version = 0 if own.is_inference() else own._version
        held = self._held.get((device, dtype))
        if held is None or held[0] != version:
            with torch.inference_mode(False):
                held = self._held[device, dtype] = version, own.to(device, dtype)
        return held[1]
