"""One call of a denoiser: what families share in reading it, and what may be wrapped around the
model.

Every model has its own arguments for the timestep, the image's grid and the text; its
:class:`sdattn.models.family.Family` reads them into a :class:`DenoiserCall`, once per call.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..attention.joint_processor import Spans
from ..errors import InvalidTypeError, InvalidValueError
from .pipeline import Given, Model

Size = tuple[int, ...]  # (rows, cols) of an image, (frames, rows, cols) of a video


class Timestep:
    """Timestep as a model got it, a number or a tensor.

    A tensor counts by the first row of the batch; if each token has its own timestep, by the last
    token, since the tokens of a given first frame have 0 (Wan 2.2).

    ``float(timestep)`` reads the value, which waits for the tensor's device. Until then a copy is
    kept, so that a tensor that is overwritten later is still read as the model got it.

    Args:
        given: the model's argument, a tensor of any shape.
        unit: factor from the model's unit to the scheduler's.
        start: the scheduler's timestep at the model's 0; not 0 if the model counts up.
    """

    def __init__(self, given: object, unit: float = 1.0, start: float = 0.0):
        self._unit = unit
        self._start = start
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
        """Return the index of the schedule entry that the model got, or None.

        Known only if the timestep was a view of that very tensor, as in pipelines that loop over
        ``scheduler.timesteps``. It is compared by its place in memory; no value is read.
        """
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

    Anything that must be read back from the model's device, which waits for its work to finish, is
    read only when asked for.

    Attributes:
        timestep: timestep in the scheduler's unit (the batch's first, if rows differ).
        size: :attr:`latent_size`, or a function that computes it.
        batch: rows that the attention layers see.
        text: text states, ``[B, T, width]``; None for a custom model, or if each row has states of
            its own.
        text_2: text states of a second encoder, whose columns follow the first one's, or None.
        frame_rows: frames of a video whose frames are consecutive rows of the batch; 1 for an
            image, and for a video that is one sequence.
        sample: latents as the model gets them; None for a custom model.
        n_image: columns of image prompts (IP-Adapter), after the text's.
        skips_layers: True in a further pass that leaves out some layers, as in skip-layer guidance
            (SD 3.5, similar in LTX-2); it is neither branch of the guidance.
        grid_ids: tensor whose values give the size; None if shapes or numbers give it.
        spans: places of image and text in each row, for joint attention whose rows have texts of
            their own lengths, see :attr:`sdattn.models.Family.spans`; None elsewhere.
        spans_of: tensors whose values give the spans; empty if shapes give them.
        n_told: number of text columns, if a user told it; else 0.
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
    n_told: int = 0

    @cached_property
    def latent_size(self) -> Size | None:
        """(rows, cols) of the finest queries, (frames, rows, cols) for a video: cells of a UNet's
        latent, patches of a transformer. None for a custom model, whose grid no argument names."""
        return self.size() if callable(self.size) else self.size

    @property
    def n_text(self) -> int:
        """Number of text columns; 0 while unknown."""
        texts = (self.text, self.text_2)
        return self.n_told or sum(text.shape[1] for text in texts if text is not None)


@lru_cache(64)
def _names(forwards: tuple[Callable[..., object], ...]) -> tuple[str, ...]:
    """Return the names of arguments, without self, of the first forward that names them all."""
    signatures = [inspect.signature(forward).parameters.values() for forward in forwards]
    rest = inspect.Parameter.VAR_POSITIONAL
    named = [one for one in signatures if all(p.kind is not rest for p in one)]
    first = (named or signatures)[0]
    return tuple(p.name for p in first if p.kind not in (rest, inspect.Parameter.VAR_KEYWORD))[1:]


def arguments(model: Model, args: tuple[object, ...], kwargs: Given) -> dict[str, Any]:
    """Return the arguments of ``model(*args, **kwargs)`` by name.

    Names come from the model's class: the object itself, or a subclass, may have a wrapping forward
    of ``(*args, **kwargs)`` (DeepCache, a timer).
    """
    classes = map(vars, type(unwrapped(model)).__mro__)
    names = _names(tuple(names["forward"] for names in classes if "forward" in names))
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given[name] for name in names if name in given}


def grid_of_patches(model: Model, given: Given, axes: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the grid of a latent that the model cuts into patches, of one frame unless the
    configuration says more. ``axes`` of the latent are the grid's, by default
    all but the first two, ``[B, C, (frames,) rows, cols]``."""
    shape = given["hidden_states"].shape
    patch = model.config.patch_size
    sizes = [shape[axis] for axis in axes or range(2, len(shape))]
    if isinstance(patch, int):
        patch = (getattr(model.config, "patch_size_t", None) or 1, patch, patch)
    return tuple(size // each for size, each in zip(sizes, patch[-len(sizes) :], strict=True))


def grid_of_ids(
    _model: Model,
    given: Given,
    *,
    made: int = 0,
    name: str = "img_ids",
    after_text: bool = False,
) -> tuple[int, ...]:
    """Return the grid of packed patches ``[B, N, C]`` with ids ``[(B,) N, (image, row, col)]``,
    perhaps after the text's.

    The generated image has number ``made`` and comes first; reference images follow. The values are
    read, so a family with this grid names the argument as its ``grid_argument``.

    Raises:
        ValueError: its patches form no grid, or the ids have no values.
    """
    ids = given[name]
    if ids.is_meta:
        raise InvalidValueError(
            f"The grid of the image is in the values of {name}, which are on torch's meta device "
            "and have none. Pass `latent_size` to `capture()`, the (rows, cols) of "
            f"{ids.shape[-2]} patches."
        )
    ids = ids[0] if ids.ndim == 3 else ids
    if after_text:
        ids = ids[given["encoder_hidden_states"].shape[1] :]
    return grid_of_places(name, ids[ids[:, 0] == made][:, 1:3].float())


def grid_of_places(name: str, places: Tensor, advice: str = "") -> tuple[int, ...]:
    """Return the grid of cells whose (row, col) or (time, row, col) an argument gives, ``[N,
    axes]``; raise ValueError, with advice, if they are not listed row by row."""
    axes = [axis.unique() for axis in places.unbind(1)]
    if not len(places) or not torch.equal(places, torch.cartesian_prod(*axes)):
        sides = " x ".join(str(len(axis)) for axis in axes)
        raise InvalidValueError(
            f"{name} gives the image {len(places)} cells, which do not form a grid of {sides}, row "
            f"by row, so they have no known place. {advice}".rstrip()
        )
    return tuple(map(len, axes))


def head_count(attn: Model) -> int:
    """Return the heads of an attention layer, by either of diffusers' names for it."""
    return int(attn.heads if hasattr(attn, "heads") else attn.num_heads)


def innermost(processor: Any) -> Any:
    """Return the processor inside any wrappers that only observe."""
    while getattr(processor, "is_observer", False):
        processor = processor.inner
    return processor


def unwrapped(model: object) -> Any:
    """Return the model inside all wrappings (``torch.compile``, ``DistributedDataParallel``, PEFT
    …), or the model itself."""
    return _wrappings(model)[-1]


def called(model: object) -> Any:
    """Return the module whose calls are the model's passes: the model inside all wrappings, or the
    outermost compiled one, since hooks inside a graph would break it.

    Raises:
        TypeError: a wrapping that calls copies of the model, in threads.
    """
    *around, inner = _wrappings(model)
    for wrapping in around:
        devices = getattr(wrapping, "device_ids", None) or ()
        if len(devices) > 1:
            raise InvalidTypeError(
                f"A {type(wrapping).__name__} runs a copy of its {type(inner).__name__} on each of "
                f"{len(devices)} devices, in threads of their own, and copies are not watched. "
                "Pass its `.module`, and call that."
            )
    return next((module for module in around if _original(module) is not None), inner)


def _wrappings(model: Any) -> list[Any]:
    """Return a model with what it is wrapped in, from the outermost on.

    A wrapping has one part, which it calls with whatever it is called with, as do
    DistributedDataParallel, DataParallel and PEFT's and FSDP's models. A compiled one has an
    original.
    """
    found = [model]
    while isinstance(found[-1], nn.Module):
        inner = _original(found[-1])
        parts = {*found[-1]._modules.values()} - {None}  # children() takes its time
        forward = getattr(type(found[-1]), "forward", None)  # a scripted module's is not to be had
        if inner is None and len(parts) == 1 and forward is not None and _hands_on(forward):
            (inner,) = parts
        if inner is None:
            break
        found.append(inner)
    return found


def _original(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` compiled, or whose regions accelerate did."""
    for held in (module._modules, vars(module)):
        if "_orig_mod" in held:
            return cast(nn.Module, held["_orig_mod"])
    return None


@lru_cache(64)
def _hands_on(forward: Callable[..., object]) -> bool:
    """Check whether a forward names no argument: ``(self, *args, **kwargs)``."""
    kinds = [p.kind for p in inspect.signature(forward).parameters.values()]
    return kinds[1:] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def is_compiled(model: Model) -> bool:
    """Check whether a model or a part of it was compiled, by ``torch.compile`` or ``compile()``."""
    return bool(compiled_parts(model.modules()))


def compiled_parts(modules: Iterable[Model]) -> list[tuple[Any, str]]:
    """Return the compiled ones of some modules, with the attribute that holds the compiled call."""
    found = []
    for module in modules:
        held = vars(module)
        has_original = "_orig_mod" in module._modules
        if has_original and held.get("forward") != module._modules["_orig_mod"].__call__:
            found.append((module, "forward"))  # torch.compile(module)
        if held.get("_compiled_call_impl") is not None:
            found.append((module, "_compiled_call_impl"))  # module.compile()
    return found
