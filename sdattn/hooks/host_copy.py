"""A layer's maps on their way from a GPU to the host, while the GPU goes on with its work."""

from typing import Any

import torch
from torch import Tensor


def travels(tensor: Tensor, device: torch.device | str | None) -> bool:
    """Whether a tensor that is to be held on ``device`` is copied there by :class:`HostCopy`."""
    return tensor.is_cuda and device is not None and torch.device(device).type == "cpu"


class HostCopy:
    """One tensor at a time, copied to pinned memory on a stream of its own.

    copy.send(tensor)      returns at once; the stream of the model goes on as well
    copy.take()            what was sent last, on the host; None where nothing was

    Between the two the host does something else, the rest of a pass say, so that ``take`` waits for
    what was done long ago. A tensor that is on no GPU is handed on as it is.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._done: Any = None  # an event of that stream
        self._sent: Tensor | None = None  # the buffer in pinned memory, where it came from a GPU

    def send(self, tensor: Tensor) -> None:
        """Begin to copy; what was sent before must have been taken."""
        if not tensor.is_cuda:
            self._sent = tensor
            return
        if self._stream is None or self._stream.device != tensor.device:
            self._stream, self._done = torch.cuda.Stream(tensor.device), torch.cuda.Event()
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)  # its memory is not given away before that
            self._done.record(self._stream)
        self._sent = buffer

    def take(self) -> Tensor | None:
        """Wait for the last copy and return it, or None. A copied tensor lies in a pinned buffer,
        which is reused for the next copies once nobody holds the tensor."""
        sent, self._sent = self._sent, None
        if sent is not None and self._done is not None:
            self._done.synchronize()
        return sent
