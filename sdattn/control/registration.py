from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType

from torch import nn

from ..attention import TorchAttnProcessor, TorchJointProcessor
from ..attention.controlled import (
    ControlledProcessor,
    Controller,
    LayerController,
    check_controller,
)
from ..attention.joint_processor import Queries
from ..errors import InvalidValueError, RunError, warn
from ..follow.passes import CaptureError, CaptureWarning, Pass
from ..follow.run import Run, Subscriber
from ..models.denoiser import Denoiser
from ..models.denoiser_call import Size, innermost, is_compiled, unwrapped
from ..models.families.unet import is_unet
from ..models.layers import KINDS, AttentionLayer, LayerSelection, needs_size, select_layers
from ..models.pipeline import Pipeline
from ..models.replaced_calls import bypass
from .attention_store import AttentionStore
from .controlled_layers import (
    check_batch,
    check_length,
    check_prompts,
    check_weights,
    controlled_layers,
    refuse_broken_step,
    run_of,
)


class ControlHandle(Subscriber):
    """A controller registered in a model's attention by
    :func:`sdattn.edit.register_attention_control`; ``by_size`` maps a latent's size to its layers,
    if they depend on it. ``run`` tells others too."""

    def __init__(
        self,
        denoiser: Denoiser,
        layers: list[AttentionLayer],
        controller: Controller | None,
        run: Run,
        by_size: Callable[[Size], list[AttentionLayer]] | None = None,
    ):
        self.controller = controller
        self._denoiser = denoiser
        self.run = run
        self._by_size = by_size
        self._size = Size()
        self._processors: dict[AttentionLayer, ControlledProcessor] = {}
        self._passes = 0
        self._active = True
        self._entered = False
        # Should any layer refuse its processor, those before it get theirs back.
        with ExitStack() as undo:
            self._installed = undo.enter_context(run.installed)
            self._installed.run_eagerly(denoiser.compiled_parts)
            self.put(layers)
            run.subscribe(self)
            run.watch(denoiser.model)
            undo.pop_all()

    def put(
        self, layers: Iterable[AttentionLayer], *, image: bool = True, queries: Queries = "image"
    ) -> None:
        """Make layers call the controller. In joint attention ``image`` shows it the attention
        among the image's tokens too, and ``queries`` says who attends to the text."""
        for layer in layers:
            processor: ControlledProcessor
            if layer.kind == "joint":
                processor = TorchJointProcessor(
                    self.controller,
                    layer.place,
                    spans=self.run.reader.shared_spans,
                    image=image,
                    queries=queries,
                )
            else:
                processor = TorchAttnProcessor(self.controller, layer.place)
            processor.handle = self  # type: ignore[union-attr]
            self._processors[layer] = processor
            self._installed.put(layer, processor)

    def __enter__(self) -> ControlHandle:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.restore()
        if error is None:
            self._warn_if_unused()

    def remove(self) -> None:
        """Put the previous processors back; a second call has no effect.

        Raises:
            RuntimeError: processors were set since. They stay, the others are put back.
        """
        if not self._active:
            return
        foreign = self._installed.replaced()
        for layer, _ in foreign:
            self._installed.leave(layer)
        self.restore()
        if foreign:
            layer, processor = foreign[0]
            raise RunError(
                f"{len(foreign)} processors were set since this controller was registered, the "
                f"first a {type(processor).__name__} in {layer.name}; they were left as they are."
            )
        self._warn_if_unused()

    def supersede(self) -> None:
        """Make room for another controller; raise RuntimeError if a ``with`` block is open."""
        if self._entered:
            raise RunError(
                f"A {type(self.controller).__name__} is registered in this model already, in a "
                "with block that is still open. Leave it before another one is registered."
            )
        self.restore()

    def restore(self) -> None:
        self._active = self._entered = False
        self._installed.remove()

    def _warn_if_unused(self) -> None:
        name = type(self.controller).__name__
        strays = problem = self.run.doubts.take_strays()
        blend = getattr(self.controller, "local_blend", None)
        has_asked = any(processor.has_asked for processor in self._processors.values())
        if not self._passes and not has_asked:
            problem = (
                f"The {name} saw nothing: the model it was registered in never ran. Run that very "
                f"pipeline or UNet before the registration ends. {strays}".rstrip()
            )
        elif getattr(self.controller, "cur_step", 0) and getattr(blend, "counter", 1) == 0:
            problem = (
                f"The local_blend of the {name} was never asked. Call the pipeline with "
                "callback_on_step_end=step_end(controller)."
            )
        elif not strays and (repeats := self.run.doubts.step_calls()):
            problem = f"{repeats} The {name} was shown each of them, as a pass of its own."
        if problem:
            warn(problem, CaptureWarning)

    def begin_pass(self, begun: Pass) -> None:
        """Refuse a pass that the controller would not see whole, and tell a store."""
        model = self._denoiser.model
        is_shown = is_unet(model) or not begun.of_no_prompt
        self._show(is_shown)
        self._passes += 1
        if not begun.is_direct:
            self._refuse(begun, is_shown)
        self._fit(begun)
        self._tell_store(begun)

    def end_pass(self, ended: Pass) -> None:
        """Refuse a model whose layers do not call what they hold."""
        asking = [layer for layer, one in self._processors.items() if one.asks and one.controller]
        if not asking or any(self._processors[layer].has_asked for layer in asking):
            return
        names = [layer.name for layer in asking]
        problem = bypass(unwrapped(self._denoiser.model), names)
        if problem and isinstance(self.controller, LayerController):
            self.controller.pass_over(f"none of {len(names)} layers called it. {problem}")
        elif problem:
            name = type(self.controller).__name__
            raise CaptureError(f"None of {len(names)} layers called the {name}. {problem}")

    def stray(self, call: Pass) -> None:
        self._show(False)

    def _refuse(self, begun: Pass, is_shown: bool) -> None:
        model = self._denoiser.model
        name = type(self.controller).__name__
        if is_compiled(model):
            raise CaptureError(
                f"The {type(unwrapped(model)).__name__} was compiled while the {name} was "
                "registered, so the compiled code may call it differently. Compile the model "
                "first: with a controller it then runs eagerly."
            )
        if is_shown:
            check_batch(self.controller, begun, is_unet(model))
            check_length(self.controller, begun)
            if begun.begins_run:
                check_prompts(self.controller, self.run.drawn)
        refuse_broken_step(self.controller)
        if replaced := self._installed.replaced():
            layer, processor = replaced[0]
            raise CaptureError(
                f"The processor of {layer.name} was replaced by a {type(processor).__name__}, so "
                f"the {name} would miss this layer. Set processors before the run, and do not "
                "change them until it ends."
            )

    def _fit(self, begun: Pass) -> None:
        """Make exactly the layers for this latent's size call the controller."""
        if self._by_size is None or begun.latent_size in (None, self._size):
            return
        self._size = begun.latent_size
        chosen = self._by_size(self._size)
        for layer in [layer for layer in self._processors if layer not in chosen]:
            self._installed.take_out(layer)
            del self._processors[layer]
        self.put(layer for layer in chosen if layer not in self._processors)
        count_calls(self.controller, chosen)

    def _show(self, is_shown: bool) -> None:
        for processor in self._processors.values():
            processor.asks = is_shown

    def _tell_store(self, begun: Pass) -> None:
        """Tell a store the facts of a pass, which an attached store already knows."""
        store = self.controller
        if not isinstance(store, AttentionStore) or store.attachment is not None:
            return
        store.repeats = self.run.doubts.repeats
        if begun.begins_run:
            store.begin_run()
        if begun.again:
            store.note(
                f"{self.run.doubts.step_calls()} capture(pipe, step_call=0) keeps one of them."
            )
        if begun.of_no_prompt and not is_unet(self._denoiser.model):
            return
        prompts = None
        with suppress(InvalidValueError):  # a batch of another guidance than the pipeline's
            prompts = begun.prompts
        places = tuple(dict.fromkeys(layer.place for layer in self._processors))
        levels = self._denoiser.levels
        store.begin_pass(begun, levels=levels, places=places, prompts=prompts)


def count_calls(controller: Controller | None, layers: Sequence[AttentionLayer]) -> None:
    with suppress(AttributeError):  # a bound method counts no layers
        calls = sum(2 if layer.kind == "joint" else 1 for layer in layers)
        controller.num_att_layers = calls  # type: ignore[union-attr]


def register_attention_control(
    target: Pipeline | nn.Module, controller: Controller | None, *, layers: LayerSelection = None
) -> ControlHandle:
    """Make every attention layer of a model show its probabilities to ``controller``.

    Each layer gets a :class:`sdattn.TorchAttnProcessor`, which calls ``controller(probs [B*heads,
    N, T], is_cross, place)`` once a pass, layers in execution order (down, mid, up; self before
    cross in a block). A layer of joint attention gets a :class:`sdattn.TorchJointProcessor`, which
    calls twice: with ``is_cross=False`` for image-to-image attention, ``[B*heads, N, N]``, then
    with ``is_cross=True`` for image-to-text attention, in the places ``"double"`` and ``"single"``.

    A returned tensor is used; after None, ``probs`` is, so edits in place count. With gradients
    ``probs`` is part of the live graph.

    Source: the contract of google/prompt-to-prompt, of the community pipeline in diffusers and of
    Attend-and-Excite; their controllers run here. A transformer needs keys ``double_cross``,
    ``double_self`` (and ``single_…``) in their stores, and its number of text columns instead of
    77.

    Args:
        target: a pipeline of SD 1.x, 2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its UNet
            or transformer. A transformer's passes for no prompt are not shown.
        controller: its ``num_att_layers`` is set to the number of calls per pass. None for plain
            attention in pure torch. It replaces one that a plain call registered before.
        layers: layers that call it, see :func:`sdattn.models.layers.select_layers`; the others keep
            their processors. Default: all.

    Returns:
        A handle whose ``remove()``, or the end of its ``with`` block, puts the previous processors
        back. A compiled model runs eagerly meanwhile, with a warning; one compiled later is
        refused.

    Raises:
        TypeError: ``target`` is no model that sdattn knows; ``controller`` takes other arguments.
        ValueError: the model has processors with weights of their own (IP-Adapter), which pure
            torch attention would ignore; ``layers`` that fit none.
        RuntimeError: a controller is registered in a ``with`` block that is still open.
    """
    check_controller(controller)
    denoiser, known = controlled_layers(target)
    chosen = select_layers(known, layers, KINDS)
    run = run_of(denoiser, controller)
    for layer in known:  # one that was registered before may be in other layers
        former = getattr(innermost(layer.module.processor), "handle", None)
        if former is not None:
            former.supersede()
    check_weights(chosen)
    count_calls(controller, chosen)
    if denoiser.compiled_parts:
        warn(
            f"The {type(unwrapped(denoiser.model)).__name__} is compiled. While the "
            f"{type(controller).__name__} is registered it runs eagerly, so the image can differ "
            "from the compiled model's in its last bits.",
            CaptureWarning,
        )
    by_size = partial(select_layers, known, layers, KINDS) if needs_size(layers) else None
    return ControlHandle(denoiser, chosen, controller, run, by_size=by_size)
