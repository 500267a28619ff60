"""`capture()`: install the observing processors, watch the model run, put everything back."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .guidance import Branch, branch_order, branch_rows, guided_order
from .layers import (
    AttentionLayer,
    Denoiser,
    LayerSelection,
    find_denoiser,
    find_layers,
    select_layers,
)
from .maps import CaptureError, CaptureWarning, MapStore, Pass, Selection, expected_bytes
from .processors import ObservingProcessor, ProbsOf

MUCH = 1e9  # bytes; a capture that will hold more says so before it starts
logger = logging.getLogger(__name__)

BRANCHES = ("conditional", "unconditional", "both")


@contextmanager
def capture(
    target: Any,
    *,
    layers: LayerSelection = None,
    kinds: Sequence[str] = ("cross",),
    branch: str = "conditional",
    steps: Selection = "mean",
    heads: Selection = "mean",
    tokens: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
) -> Iterator[MapStore]:
    """Watch the attention of a model while it runs; its output stays what it was, bit for bit.

        with sdattn.capture(pipe) as store:
            image = pipe("a red circle left of a blue square").images[0]
        store.maps["mid_block.attentions.0.transformer_blocks.0.attn2"]  # [1, rows, cols, tokens]

    Each layer's own processor goes on making the output. On leaving, by any way, every layer holds
    the very processor it held before. One ``with`` holds one run; captures may be nested.

    Args:
        target: a Stable Diffusion pipeline with a UNet, or the UNet. On a bare UNet no guidance
            is known, so every batch row counts as an image of its own.
        layers: names, places, resolutions or a predicate, see :func:`sdattn.layers.select_layers`.
        kinds: ``"cross"`` and/or ``"self"``. Self-attention keeps a column for every cell.
        branch: ``"conditional"`` (the prompt), ``"unconditional"`` (the negative prompt), or
            ``"both"``: first the unconditional images, then the conditional ones.
        steps: ``"mean"`` over the calls of the model (a second-order scheduler calls twice a
            step), ``"all"``, or the indices of the calls to keep one by one.
        heads: ``"mean"``, ``"all"``, or the indices of the heads to keep one by one.
        tokens: key columns to keep, None for all. The softmax is over all keys either way.
        device: where the maps are held, by default where they are computed.
        dtype: of the maps; running sums are float32 at least.
        grad: keep the graph, so that a loss on the maps reaches the latents.

    Yields:
        MapStore: see there for ``maps``; with the defaults its size does not grow with the steps.

    Raises:
        TypeError: ``target`` is no model that sdattn knows.
        ValueError: an option that fits nothing; the message lists what there is.
        CaptureError: on leaving, nothing was captured; while running, the batch or the size
            changed, or a second run began.
    """
    denoiser = find_denoiser(target)
    found = find_layers(denoiser.model)
    chosen = select_layers(found, layers, kinds)
    if branch not in BRANCHES or (branch != "conditional" and denoiser.pipeline is None):
        raise ValueError(
            f"branch={branch!r}: pass one of {', '.join(BRANCHES)}; on a model without its "
            "pipeline only 'conditional', which keeps every row."
        )
    if denoiser.pipeline is not None:
        guided_order(denoiser.pipeline)  # an unknown layout is refused before anything runs
    store = MapStore(
        chosen,
        levels=denoiser.levels,
        steps=steps,
        heads=heads,
        tokens=tokens,
        device=device,
        dtype=dtype,
        grad=grad,
    )
    watch = _Watch(denoiser, store, layers, kinds, branch)
    with ExitStack() as undo:
        for layer in found:  # all of them: a user may replace any inside the block
            undo.callback(watch.uninstall, layer, layer.module.processor)
        for layer in chosen:
            watch.install(layer)
        hook = denoiser.model.register_forward_pre_hook(watch.before_pass, with_kwargs=True)
        undo.callback(hook.remove)
        yield store
    store.check()


class _Watch:
    """One capture at work: what is installed, and which pass is running."""

    def __init__(
        self,
        denoiser: Denoiser,
        store: MapStore,
        selection: LayerSelection,
        kinds: Sequence[str],
        branch: str,
    ):
        self.denoiser, self.store = denoiser, store
        self.selection, self.kinds, self.branch = selection, kinds, branch
        self.observers: dict[str, ObservingProcessor] = {}
        self.firsts: dict[str, ObservingProcessor] = {}
        self.schedule: Any = None

    def install(self, layer: AttentionLayer) -> None:
        observer = ObservingProcessor(layer.module.processor, partial(self.observe, layer))
        self.observers[layer.name] = observer
        self.firsts.setdefault(layer.name, observer)
        layer.module.set_processor(observer)

    def uninstall(self, layer: AttentionLayer, before: Any) -> None:
        """Put back what was there; where another capture has wrapped ours since, only step out."""
        ours = self.observers.get(layer.name)
        if ours is not None:  # the capture around this one may have left by now
            before = self.firsts[layer.name].inner
        outer = layer.module.processor
        while isinstance(outer, ObservingProcessor) and outer is not ours:
            if ours is None:
                return  # not ours to undo
            if outer.inner is ours:
                del outer.inner  # a module may not be overwritten by a plain object
                outer.inner = before
                return
            outer = outer.inner
        if layer.module.processor is not before:
            layer.module.set_processor(before)

    def before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook of the model: know the pass before its layers run."""
        sample = args[0] if args else kwargs["sample"]
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        self._refuse_second_run()
        self._notice_swaps()
        one = self._describe_pass(sample, timestep)
        self.store.begin_pass(one)
        if len(self.store.passes) == 1:  # resolutions and sizes can be told only now
            self.store.layers = select_layers(
                self.store.layers, self.selection, self.kinds, one.latent_size
            )
            self._say_bytes(kwargs.get("encoder_hidden_states", args[2] if len(args) > 2 else None))

    def _describe_pass(self, sample: Tensor, timestep: Any) -> Pass:
        batch = len(sample)
        layout: tuple[Branch | None, ...] = ("conditional",)
        if self.denoiser.pipeline is not None:
            layout = branch_order(self.denoiser.pipeline)
        rows = branch_rows(layout, batch)
        wanted: tuple[Branch, ...] = ("unconditional", "conditional")
        if self.branch != "both":
            wanted = tuple(name for name in wanted if name == self.branch)
        if missing := [name for name in wanted if name not in rows]:
            raise CaptureError(
                f"Asked for branch={self.branch!r}, but this run has no {missing[0]} rows: it runs "
                "without guidance. Set guidance_scale above 1."
            )
        kept = [(row, name) for name in wanted for row in range(batch)[rows[name]]]
        return Pass(
            timestep=float(torch.as_tensor(timestep).flatten()[0]),
            latent_size=(sample.shape[-2], sample.shape[-1]),
            batch=batch,
            layout=layout,
            rows=torch.tensor([row for row, _ in kept]),
            branches=tuple(name for _, name in kept),
        )

    def _say_bytes(self, text_states: Any) -> None:
        """Work out, before anything is held, how much will be; say it if it is much."""
        store = self.store
        text = text_states[0] if isinstance(text_states, tuple) else text_states
        keys = len(store.tokens) if store.tokens is not None else text.shape[1]
        passes = 1 if self.schedule is None else len(self.schedule)
        store.expected_nbytes = expected_bytes(
            store.layers,
            store.latent_size,
            keys,
            images=store.images,
            passes=passes,
            steps=store.steps,
            heads=store.heads,
            dtype=store.dtype,
        )
        if store.expected_nbytes > MUCH:
            logger.warning(
                "Capture will hold up to %.1f GB by the end of this run of %d model calls. Choose "
                "layers, tokens, steps or heads to hold less.",
                store.expected_nbytes / 1e9,
                passes,
            )

    def _refuse_second_run(self) -> None:
        scheduler = getattr(self.denoiser.pipeline, "scheduler", None)
        schedule = getattr(scheduler, "timesteps", None)
        if self.store.passes and schedule is not self.schedule:
            raise CaptureError(
                "A second run of the pipeline began inside one capture(), which would mix the maps "
                "of two pictures. Enter capture() once for each run."
            )
        self.schedule = schedule

    def _notice_swaps(self) -> None:
        swapped = []
        for layer in self.store.layers:
            processor = layer.module.processor
            while isinstance(processor, ObservingProcessor):
                if processor is self.observers[layer.name]:
                    break
                processor = processor.inner
            else:
                swapped.append(f"{layer.name} ({type(layer.module.processor).__name__})")
                self.install(layer)
        if swapped:
            warnings.warn(
                f"{len(swapped)} attention processors were replaced inside capture(); the new ones "
                "are watched from here on and those from before come back at the end: "
                + ", ".join(swapped[:3]),
                CaptureWarning,
                stacklevel=2,
            )

    def observe(self, layer: AttentionLayer, batch: int, probs_of: ProbsOf) -> None:
        if not self.store.wants(layer):
            return
        one = self.store.passes[-1]
        if batch != one.batch:
            raise CaptureError(
                f"{layer.name} ran on {batch} rows in a pass of {one.batch}, so which image "
                "each row belongs to is not known. Leave this layer out (layers=…)."
            )
        with torch.set_grad_enabled(self.store.grad and torch.is_grad_enabled()):
            self.store.add(layer, probs_of(one.rows))
