"""What would make a GPU wait, counted on the CPU: operations whose result the host has to know."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.item,
    aten.masked_select,
    aten.nonzero,
    aten.nonzero_numpy,
    aten.unique_consecutive,
    aten.unique_dim,
    aten._unique,
    aten._unique2,
}
BY_INDEX = {aten.index, aten.index_put, aten.index_put_}  # a mask among the indices is counted out


class Reads(TorchDispatchMode):
    """How often a value is read back from a tensor, while it is ``counting``."""

    def __init__(self, counting=True):
        super().__init__()
        self.number, self.counting = 0, counting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        masks = [one for one in args[1] if one is not None] if packet in BY_INDEX else []
        if self.counting and (packet in READS or any(one.dtype == torch.bool for one in masks)):
            self.number += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def reads_by_call(model):
    """A list that takes the number of reads inside each call of a model, with what is hooked on it
    before: ``model`` may be entered before or after others put hooks on it."""
    found = []

    def before(*_):
        reads.number, reads.counting = 0, True

    def after(*_):
        reads.counting = False
        found.append(reads.number)

    hooks = (
        model.register_forward_pre_hook(before, prepend=True),
        model.register_forward_hook(after),
    )
    try:
        with Reads(counting=False) as reads:
            yield found
    finally:
        for hook in hooks:
            hook.remove()
