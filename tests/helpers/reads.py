"""What would make a GPU wait, counted without one: operations whose result the host has to know,
and what the host knows copied to the device."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

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


class Copies(TorchDispatchMode):
    """How often something is copied from the host to torch's meta device, which stands for a GPU.

    A copy is an operation that has a tensor of the CPU, not a mere number, and gives one of the
    device. A list that indexes a tensor is copied by none: an operation is then handed a tensor of
    the device that no operation gave, and that was not there before.
    """

    def __init__(self):
        super().__init__()
        self.number, self._known = 0, WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        there = [one for one in given if one.is_meta]
        self.number += sum(one not in self._known for one in there)
        if any(one.is_meta for one in made):
            to_copy = func.overloadpacket in (aten._to_copy, aten.copy_)
            self.number += sum(not one.is_meta and (one.ndim > 0 or to_copy) for one in given)
        for one in (*there, *made):
            self._known[one] = True
        return result


def copies_after_the_first(call):
    """How often something is copied in the second call of a function; the first sees what is
    there."""
    with Copies() as copies:
        call()
        copies.number = 0
        call()
    return copies.number
