"""Copies between the host and a device that nobody waits for.

A list or CPU tensor that indexes a GPU tensor is copied to the GPU at every use.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def chosen(tensor: Tensor, dim: int, numbers: tuple[int, ...]) -> Tensor:
    """Return the entries of an axis at these indices, in that order."""
    return tensor.index_select(dim, index_on(tensor.device, numbers))


@lru_cache(maxsize=256)
def index_on(
    device: torch.device, numbers: tuple[int, ...], dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return numbers on a device, ``[len(numbers)]``; do not write to them."""
    with torch.inference_mode(False):  # an inference tensor could not serve a gradient later
        return torch.tensor(numbers, dtype=dtype, device=device)


class DeviceCopies:
    """A tensor and its copies on other devices or in other dtypes, each made once per version."""

    def __init__(self, own: Tensor):
        self.own = own
        self._held: dict[tuple[torch.device, torch.dtype], tuple[int, Tensor]] = {}

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        own = self.own
        dtype = dtype or self.own.dtype
        if own.requires_grad or (own.device, own.dtype) == (device, dtype):
            return own.to(device, dtype)
        version = 0 if own.is_inference() else own._version
        held = self._held.get((device, dtype))
        if held is None or held[0] != version:
            with torch.inference_mode(False):
                held = self._held[device, dtype] = version, own.to(device, dtype)
        return held[1]


def is_gpu_to_cpu(tensor: Tensor, device: torch.device | str | None) -> bool:
    return tensor.is_cuda and device is not None and torch.device(device).type == "cpu"


class HostCopy:
    """One tensor at a time, copied to pinned memory on a stream of its own.

    ``send(tensor)`` returns at once; ``take()`` waits and returns it on the host (None if nothing
    was sent). Do something else between the two. A tensor that is on no GPU is handed on as it is.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._done: Any = None  # an event of that stream
        self._sent: Tensor | None = None  # the buffer in pinned memory, if it came from a GPU

    @property
    def is_sent(self) -> bool:
        """True if something was sent and not taken yet."""
        return self._sent is not None

    def drop(self) -> bool:
        """Forget what was sent, without waiting for it; return False if nothing was."""
        was_sent = self.is_sent
        self._sent = None
        return was_sent

    def __getstate__(self) -> dict[str, Any]:
        return vars(HostCopy())  # a stream belongs to its process

    def send(self, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            self._sent = tensor
            return
        if self._stream is None or self._stream.device != tensor.device:
            self._stream = torch.cuda.Stream(tensor.device)
            self._done = torch.cuda.Event()
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)  # its memory is not reused before that
            self._done.record(self._stream)
        self._sent = buffer

    def take(self) -> Tensor | None:
        """Wait for the last copy, in a pinned buffer that is reused once nobody holds it."""
        sent = self._sent
        self._sent = None
        if sent is not None and self._done is not None:
            self._done.synchronize()
        return sent
