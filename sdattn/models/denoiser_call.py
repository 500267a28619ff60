"""A denoiser and its calls: what families share in reading them, and what may be wrapped around it.

Every model has arguments of its own for the timestep, the grid of its image and the text; its
:class:`sdattn.models.family.Family` reads them into a :class:`DenoiserCall`, once a call.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..attention.joint_processor import Spans
from ..errors import InvalidValueError
from .pipeline import Given, Model

# read once for each forward, not in each pass
_signatures: WeakKeyDictionary[Callable[..., object], inspect.Signature] = WeakKeyDictionary()

Size = tuple[int, ...]  # (rows, cols) of an image, (frames, rows, cols) of a video


class Timestep:
    """A timestep as a model got it: a number, or a tensor of which the batch's first counts; where
    each token has one of its own, that of the last: those of a given first frame have 0 (Wan 2.2).

    ``float(timestep)`` reads it, which waits for the device that a tensor is on. Until then a copy
    is kept, so that what the model got is known also of a tensor that is overwritten later.

    Args:
        given: the argument of the model, a tensor of any shape.
        unit: what it is multiplied by to be in the scheduler's unit.
        start: the scheduler's timestep where the model's is 0; not 0 of models that count up.
    """

    def __init__(self, given: object, unit: float = 1.0, start: float = 0.0):
        self._unit, self._start = unit, start
        self._first = given
        self._home: tuple[int, int] | None = None
        if isinstance(given, Tensor):
            self._home = given.untyped_storage().data_ptr(), int(given.storage_offset())
            first = given.detach() if given.ndim == 0 else given.detach()[0]
            self._first = first.flatten()[-1].clone()

    def __float__(self) -> float:
        return self._read

    @cached_property
    def _read(self) -> float:
        return self._start + self._unit * float(torch.as_tensor(self._first).flatten()[0])

    def index_in(self, schedule: object) -> int | None:
        """Which entry of a schedule the model got, where it was a view of that very tensor, as
        in pipelines that loop over ``scheduler.timesteps``: known by its place in memory,
        without a look at the value. None where it was not."""
        if self._home is None or not isinstance(schedule, Tensor) or schedule.ndim != 1:
            return None
        memory, offset = self._home
        if not memory or memory != schedule.untyped_storage().data_ptr() or not len(schedule):
            return None
        index, rest = divmod(offset - int(schedule.storage_offset()), int(schedule.stride(0)) or 1)
        return index if not rest and 0 <= index < len(schedule) else None


@dataclass(frozen=True)
class DenoiserCall:
    """One call of a denoiser.

    Whatever must be read back from the model's device, which makes the device finish its
    work first, is read when it is asked for.

    Attributes:
        timestep: in the scheduler's unit (the batch's first, if rows differ).
        size: :attr:`latent_size`, or what it follows from.
        batch: rows that the attention layers see.
        text: the text states, ``[B, T, width]``; None for a model of one's own, and where each row
            has states of its own.
        text_2: those of a second encoder, whose columns are behind them; None where there is none.
        frame_rows: of a video whose frames are rows of the batch one after the other, how many they
            are; 1 of an image, and of a video that is one sequence.
        sample: the latents as the model gets them; None for a model of one's own.
        n_image: columns of image prompts (IP-Adapter), which follow those of the text.
        skips_layers: whether this is a further pass, without some of the layers, of skip-layer
            guidance (SD 3.5) or the like (LTX-2), which is neither branch of the guidance.
        grid_ids: the tensor whose values give the size; None where shapes or numbers do.
        spans: of joint attention whose rows have texts of their own lengths, where image and text
            are in each, see :attr:`sdattn.models.Family.spans`; None elsewhere.
        spans_of: the tensors whose values give these; none where shapes do.
    """

    timestep: float | Timestep
    size: Size | Callable[[], Size] | None
    batch: int
    text: Tensor | None
    text_2: Tensor | None = None
    frame_rows: int = 1
    sample: Tensor | None = None
    n_image: int = 0
    skips_layers: bool = False
    grid_ids: Tensor | None = None
    spans: Callable[[int], Sequence[Spans]] | None = None
    spans_of: tuple[Tensor, ...] = ()

    @cached_property
    def latent_size(self) -> Size | None:
        """(rows, cols) of the finest queries, of a video (frames, rows, cols): the cells of a
        UNet's latent, the patches of a transformer's; None for a model of one's own, whose grid no
        argument names."""
        return self.size() if callable(self.size) else self.size

    @property
    def n_text(self) -> int:
        """Columns of the text; 0 while they are not known."""
        return sum(text.shape[1] for text in (self.text, self.text_2) if text is not None)


def arguments(model: Model, args: tuple[object, ...], kwargs: Given) -> dict[str, Any]:
    """Return the arguments of ``model(*args, **kwargs)`` by their names.

    They are named by the class of the model: the object itself, or a subclass, may have a forward
    of ``(*args, **kwargs)`` around it (DeepCache, a timer).
    """
    kinds = (kind for kind in type(unwrapped(model)).__mro__ if "forward" in vars(kind))
    forwards = [_signature(vars(kind)["forward"]) for kind in kinds]
    forward = next((one for one in forwards if _names_all(one)), forwards[0])
    kwargs = {name: value for name, value in kwargs.items() if name in forward.parameters}
    given = forward.bind_partial(model, *args, **kwargs).arguments
    return {name: given[name] for name in list(given)[1:]}  # without self


def _signature(forward: Callable[..., object]) -> inspect.Signature:
    if forward not in _signatures:
        _signatures[forward] = inspect.signature(forward)
    return _signatures[forward]


def _names_all(signature: inspect.Signature) -> bool:
    return all(one.kind is not one.VAR_POSITIONAL for one in signature.parameters.values())


def grid_of_patches(model: Model, given: Given) -> tuple[int, ...]:
    """The grid of a latent ``[B, C, rows, cols]`` that the model cuts into patches itself."""
    rows, cols = given["hidden_states"].shape[-2:]
    return rows // model.config.patch_size, cols // model.config.patch_size


def grid_of_video(model: Model, given: Given) -> tuple[int, ...]:
    """The grid of a latent ``[B, C, frames, rows, cols]`` that the model cuts into patches, of one
    frame where its configuration does not say of how many."""
    frames, rows, cols = given["hidden_states"].shape[-3:]
    config = model.config
    depth = getattr(config, "patch_size_t", 1)
    return frames // depth, rows // config.patch_size, cols // config.patch_size


def grid_of_ids(_model: Model, given: Given, made: int = 0) -> tuple[int, ...]:
    """The grid of packed patches ``[B, N, C]`` with ``img_ids`` ``[(B,) N, (image, row, col)]``.

    The image number ``made`` is made and comes first; reference images follow it. The values
    are read, so a family with this grid names ``img_ids`` as its ``grid_argument``.

    Raises:
        ValueError: its patches form no grid, or the ids have no values.
    """
    ids = given["img_ids"]
    if ids.is_meta:
        raise InvalidValueError(
            "The grid of the image is in the values of img_ids, which are on torch's meta device "
            "and have none. Pass `latent_size` to `capture()`, the (rows, cols) of "
            f"{ids.shape[-2]} patches."
        )
    ids = ids[0] if ids.ndim == 3 else ids
    own = ids[ids[:, 0] == made][:, 1:3].float()
    rows, cols = own[:, 0].unique(), own[:, 1].unique()
    if not len(own) or not torch.equal(own, torch.cartesian_prod(rows, cols)):
        raise InvalidValueError(
            f"img_ids name {len(own)} patches of the image in {len(rows)} rows and {len(cols)} "
            "columns, which is no grid, row by row, so where a patch lies is not known."
        )
    return len(rows), len(cols)


def head_count(attn: Model) -> int:
    """Heads of an attention layer, by either of diffusers' names for it."""
    return int(attn.heads if hasattr(attn, "heads") else attn.num_heads)


def holds_processor(module: object) -> bool:
    """Whether a module is attention as diffusers has it: what it does is done by the processor that
    it holds. Most have a ``set_processor`` as well, Mochi's have none."""
    return hasattr(module, "processor")


def innermost(processor: Any) -> Any:
    """The processor behind those that only observe."""
    while getattr(processor, "is_observer", False):
        processor = processor.inner
    return processor


def unwrapped(model: object) -> Any:
    """The module behind ``torch.compile(model)``, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: Model) -> bool:
    """Whether ``torch.compile(model)``, ``model.compile()`` or the same on a part was called."""
    return any(compiled_parts(model))


def compiled_parts(model: Model) -> Iterator[tuple[Any, str]]:
    """(module, the attribute that holds what was compiled)"""
    for module in model.modules():
        held = vars(module)
        if hasattr(module, "_orig_mod") and held.get("forward") != module._orig_mod.__call__:
            yield module, "forward"  # torch.compile(module)
        if held.get("_compiled_call_impl") is not None:
            yield module, "_compiled_call_impl"  # module.compile()
