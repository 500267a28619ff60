"""Ways to watch a pipeline while it runs: none, sdattn's, and what other tools do.

A way is a context around the calls of a model. It yields what it holds, which tells its size as
``nbytes``, or None where it holds nothing or does not tell.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import sdattn
from sdattn.maps.aggregation import refining
from sdattn.models.denoiser import find_denoiser
from sdattn.models.guidance import GuidanceWatch
from sdattn.models.layers import TEXT_KINDS


class Seeds:
    """What hand-written stores do: attention by matrix product and softmax, and every map of every
    step, of the conditional half, copied to the CPU."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def controller(self, _layer: Any) -> Callable[[Tensor, bool, str], None]:
        return lambda probs, _is_cross, _place: self.maps.append(_half(probs).to("cpu", copy=True))

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.maps)


class Daam:
    """What DAAM does: attention by matrix product and softmax, and the sum over the steps of each
    head of the layers of the way down and up, but for the coarsest.

    Source: Tang et al. 2022, "What the DAAM", section 3; github.com/castorini/daam, daam/trace.py.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))

    def controller(self, layer: Any) -> Callable[[Tensor, bool, str], None]:
        def add(probs: Tensor, _is_cross: bool, _place: str) -> None:
            if layer.place != "mid":
                self.sums[layer.name] = self.sums[layer.name] + _half(probs)

        return add

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.sums.values())

    def heatmaps(self, words: list[list[int]], size: int) -> list[Tensor]:
        """One for each word's columns, ``[size, size]``; of a square image."""
        finest = max(round(one.shape[1] ** 0.5) for one in self.sums.values())
        resized = []
        for one in self.sums.values():
            side = round(one.shape[1] ** 0.5)
            for head in one:
                cells = head.T.reshape(-1, 1, side, side)
                shown = interpolate(cells, size=(finest, finest), mode="bicubic").clamp_(min=0)
                resized.append(shown)
        total = torch.stack(resized).mean(0)[:, 0]
        means = [total[columns].mean(0)[None, None] for columns in words]
        return [interpolate(one, size=(size, size), mode="bicubic")[0, 0] for one in means]


def _half(probs: Tensor) -> Tensor:
    """The conditional rows of ``[B*heads, N, T]``."""
    return probs[len(probs) // 2 :]


@contextmanager
def _computing(pipe: Any, way: Any) -> Iterator[Any]:
    """Processors that compute the probabilities and hand them to ``way``, in cross-attention."""
    layers = [layer for layer in find_denoiser(pipe.unet).layers if layer.kind == "cross"]
    before = [layer.module.processor for layer in layers]
    for layer in layers:
        processor = sdattn.TorchAttnProcessor(way.controller(layer), layer.place)
        layer.module.set_processor(processor)
    try:
        yield way
    finally:
        for layer, processor in zip(layers, before, strict=True):
            layer.module.set_processor(processor)


@contextmanager
def _nothing(_pipe: Any) -> Iterator[Any]:
    yield None


@contextmanager
def _daam_itself(pipe: Any) -> Iterator[Any]:
    import daam  # of its users' own environment

    with daam.trace(pipe):
        yield None


class QueriesAndKeys:
    """What attention-map-diffusers 1.0 keeps by default: queries and keys of the last step, on the
    CPU; ``compute()`` makes probabilities of them, the mean over the heads, where the model is."""

    def __init__(self, tool: Any, device: torch.device) -> None:
        self.tool = tool
        self.device = device

    @property
    def nbytes(self) -> int:
        return int(self.tool.collector.capture_bytes)

    def layer_maps(self, _preset: str) -> Any:
        return self.tool.compute(compute_device=self.device)


@contextmanager
def _attention_map_diffusers(pipe: Any, **options: Any) -> Iterator[QueriesAndKeys]:
    import attention_map_diffusers  # of its users' own environment

    options |= {"max_map_elements": 2**40, "max_capture_bytes": 2**40}
    with attention_map_diffusers.AttentionCapture(pipe, **options) as tool:
        yield QueriesAndKeys(tool, pipe.device)


def capture(pipe: Any, **options: Any) -> AbstractContextManager[Any]:
    """Capture calls that no call of the pipeline makes: the first half of the batch is
    unconditional, but for pipelines that run the negative prompt in a pass of its own."""
    in_turn = GuidanceWatch(pipe).in_turn
    return sdattn.capture(pipe, guidance=None if in_turn else "batch", **options)


Way = Callable[[Any], AbstractContextManager[Any]]
OURS: dict[str, Way] = {
    "none": _nothing,
    "default": capture,
    "last step": lambda pipe: capture(pipe, steps="last"),
    "three words": lambda pipe: capture(pipe, tokens=[2, 3, 7]),
    "full detail": lambda pipe: capture(pipe, steps="all", heads="all"),
}
JOINT: dict[str, Way] = {
    "refined": lambda pipe: capture(pipe, refine="self"),
    "refined, three words": lambda pipe: capture(pipe, refine="self", tokens=[2, 3, 7]),
    "refined, 32 columns": lambda pipe: capture(pipe, refine="self", tokens=range(32)),
    "output": lambda pipe: capture(pipe, space="output"),
}
THEIRS: dict[str, Way] = {  # of UNets
    "refined": lambda pipe: capture(pipe, kinds=("cross", "self"), layers=refining(pipe)),
    "seeds' way": lambda pipe: _computing(pipe, Seeds()),
    "DAAM's way": lambda pipe: _computing(pipe, Daam()),
}
PACKAGES = ("daam", "attention-map-diffusers")
PEERS: dict[str, Way] = {  # their names begin with those of their packages
    "daam": _daam_itself,
    "attention-map-diffusers": _attention_map_diffusers,
    "attention-map-diffusers, held on the GPU": partial(_attention_map_diffusers, offload=None),
}


def ways_for(pipe: Any, peers: Collection[str] = ()) -> dict[str, Way]:
    """Return sdattn's ways, and those of ``peers`` that know such a model."""
    is_unet = hasattr(pipe, "unet")
    known = {name: way for name, way in PEERS.items() if name.split(",")[0] in peers}
    if not is_unet:
        known.pop("daam", None)
    if pipe.device.type != "cuda":
        known.pop("attention-map-diffusers, held on the GPU", None)
    return {**OURS, **(THEIRS if is_unet else JOINT), **known}


def read_maps(held: Any) -> None:
    """Make one map a layer of what a way holds, where that knows how to."""
    if hasattr(held, "layer_maps"):
        held.layer_maps("sum")


class LayerClock:
    """The time that a model spends in its layers that see the text, and in hooks after it ran.

    with LayerClock(model) as clock:
        model(...)
        clock.mark()
        clock.seconds()     of the calls since it was asked last
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.layers = [
            layer.module for layer in find_denoiser(model).layers if layer.kind in TEXT_KINDS
        ]
        self.on_gpu = next(model.parameters()).is_cuda
        self._marks: list[Any] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> "LayerClock":
        for layer in self.layers:
            self._hooks.append(layer.register_forward_pre_hook(self.mark))
            self._hooks.append(layer.register_forward_hook(self.mark))
        self._hooks.append(self.model.register_forward_hook(self.mark))  # before any way's
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def mark(self, *_: object) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(perf_counter())

    def seconds(self) -> float:
        marks, self._marks = self._marks, []
        pairs = zip(marks[::2], marks[1::2], strict=True)
        if self.on_gpu:
            torch.cuda.synchronize()
            return sum(start.elapsed_time(end) for start, end in pairs) / 1000
        return sum(end - start for start, end in pairs)
