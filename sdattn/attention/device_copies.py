"""Host data that a device uses, copied there once: a GPU waits for every such copy.

    chosen(tensor, dim, numbers)    some places of an axis, by their numbers
    DeviceCopies(tensor).on(device) a tensor of the host on a device

A list, or a tensor of the CPU, that indexes a tensor on a GPU is copied there at every use.
"""

from functools import lru_cache

import torch
from torch import Tensor


def chosen(tensor: Tensor, dim: int, numbers: tuple[int, ...]) -> Tensor:
    """The entries of an axis at these indices, in that order, as a new tensor."""
    return tensor.index_select(dim, index_on(tensor.device, numbers))


@lru_cache(maxsize=256)
def index_on(
    device: torch.device, numbers: tuple[int, ...], dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers on a device, ``[len(numbers)]``; not to be written to."""
    with torch.inference_mode(False):  # what is made in it cannot be kept for a gradient later
        return torch.tensor(numbers, dtype=dtype, device=device)


class DeviceCopies:
    """A tensor, and its copies on other devices or in other dtypes, each made once.

    Attributes:
        own: the tensor; where it was written to, a copy is made anew.
    """

    def __init__(self, own: Tensor):
        self.own = own
        self._held: dict[tuple[torch.device, torch.dtype], tuple[int, Tensor]] = {}

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor on a device, by default in its own dtype."""
        own, dtype = self.own, dtype or self.own.dtype
        if own.requires_grad or (own.device, own.dtype) == (device, dtype):
            return own.to(device, dtype)
        version = 0 if own.is_inference() else own._version
        held = self._held.get((device, dtype))
        if held is None or held[0] != version:
            with torch.inference_mode(False):
                held = self._held[device, dtype] = version, own.to(device, dtype)
        return held[1]
