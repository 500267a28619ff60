"""Put a prompt-to-prompt controller, ours or another's, into the attention of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, cast

from torch import Tensor, nn

from ..attention.controlled import Controller, Spans, check_controller
from ..errors import InvalidValueError, RunError, warn
from ..hooks.installer import Installation, PassHooks
from ..hooks.pass_reader import PassReader
from ..hooks.passes import CaptureError, CaptureWarning, Pass, Strays
from ..models.attention_layer import KINDS
from ..models.denoiser_call import Size, innermost, is_compiled, unwrapped
from ..models.layers import AttentionLayer, Denoiser, LayerSelection, is_unet, select_layers
from .attention_store import AttentionStore
from .controlled_layers import check_weights, controlled_layers
from .registered import check_batch, passes_of, refuse_broken_step, registered


def register_attention_control(
    target: Any, controller: Controller | None, *, layers: LayerSelection = None
) -> ControlHandle:
    """Have every attention layer of a model show its probabilities to ``controller``.

    Each layer gets a :class:`sdattn.TorchAttnProcessor`, which calls ``controller(probs [B*heads,
    N, T], is_cross, place)`` once a pass, layers in execution order (down, mid, up; self before
    cross in a block). A layer of joint attention gets a :class:`sdattn.TorchJointProcessor`, which
    calls twice: with ``is_cross=False`` for what the image's queries pay to the image,
    ``[B*heads, N, N]``, then with ``is_cross=True`` for what they pay to the text, in the places
    ``"double"`` and ``"single"``. A tensor that it returns is used. If it returns None, what it has
    left in ``probs`` is used, so edits in place count. Without gradients ``probs`` may be written
    to; with them it is part of the live graph.

    Source: the contract of google/prompt-to-prompt, of the community pipeline in diffusers and of
    Attend-and-Excite; controllers written for any of them run here. For a transformer they may need
    two changes: keys ``double_cross``, ``double_self`` (and ``single_…``) in their stores, and the
    number of its text's columns for a fixed 77.

    Args:
        target: a pipeline of SD 1.x, 2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its UNet
            or transformer. A pass of a transformer's pipeline that is of no prompt (of the negative
            one where guidance runs in turn, or with layers skipped) is not shown.
        controller: its ``num_att_layers`` is set to the number of calls a pass. None for plain
            attention in pure torch. It takes the place of one registered before by a plain call.
        layers: those that call it, see :func:`sdattn.models.layers.select_layers`; the others keep
            their processors. By default all.

    Returns:
        A handle whose ``remove()`` puts the processors from before back. As a context manager it
        does so at the end of the block.

    A model that is compiled runs eagerly meanwhile, with a warning; one that is compiled after the
    registration is refused when it runs.

    Raises:
        TypeError: ``target`` is no model that sdattn knows; ``controller`` takes other arguments.
        ValueError: the model has processors with weights of their own (IP-Adapter), which pure
            torch attention would leave out; ``layers`` that fit none.
        RuntimeError: a controller is registered in a ``with`` block that is still open.
    """
    check_controller(controller)
    denoiser, found = controlled_layers(target)
    chosen = select_layers(found, layers, KINDS)
    passes = passes_of(denoiser, controller)
    for layer in found:  # one that was registered before may be in other layers
        former = getattr(innermost(layer.module.processor), "handle", None)
        if former is not None:
            former.supersede()
    check_weights(chosen)
    with suppress(AttributeError):  # a bound method counts no layers
        calls = sum(2 if layer.kind == "joint" else 1 for layer in chosen)
        controller.num_att_layers = calls  # type: ignore[union-attr]
    if is_compiled(denoiser.model):
        _warn_eager(denoiser.model, controller)
    return ControlHandle(denoiser, chosen, controller, passes)


def step_end(controller: Any) -> Callable[..., dict[str, Any]]:
    """A ``callback_on_step_end`` for diffusers' pipelines, for controllers that change the latents.

    It calls ``controller.step_callback(latents)`` after each step of the scheduler.
    """

    def callback(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        latents: Tensor = controller.step_callback(tensors["latents"])
        return {"latents": latents}

    return callback


class ControlHandle:
    """A controller in its place; see :func:`register_attention_control`.

    Args:
        denoiser, layers, controller: as found there; :meth:`put` takes further layers.
        passes: reads the model's calls.
        begin_pass: called before each pass that is no stray; by default it tells a store of it.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        layers: list[AttentionLayer],
        controller: Controller | None,
        passes: PassReader,
        begin_pass: Callable[[Pass], None] | None = None,
    ):
        self.controller = controller
        self._denoiser = denoiser
        self._reader, self._places = passes, tuple(dict.fromkeys(la.place for la in layers))
        self._begin_pass = begin_pass or self._tell_store
        self._strays = Strays(denoiser.model)
        self._processors: list[Any] = []
        self._passes = 0
        self._active, self._entered = True, False
        # Should any layer refuse its processor, those before it get theirs back.
        with ExitStack() as undo:
            self._installed = undo.enter_context(Installation())
            self._installed.run_eagerly(denoiser.model)
            self.put(layers)
            before = self._before_pass
            PassHooks(self._installed, denoiser.model, before, direct=self._before_direct)
            self._installed.undo(passes.close)
            passes.listen()
            undo.pop_all()

    def put(self, layers: Iterable[AttentionLayer], **joint: Any) -> None:
        """Have layers call the controller; ``joint`` has options for the processors of joint
        attention."""
        for layer in layers:
            self._processors.append(registered(self, layer, **joint))
            self._installed.put(layer, self._processors[-1])

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
        """Put the processors from before back; of no effect a second time.

        Raises:
            RuntimeError: processors were set since. They stay, the others are put back.

        Warns:
            CaptureWarning: the model never ran, or blending never began.
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
        """Make room for another controller.

        Raises:
            RuntimeError: the ``with`` block of this one is still open.
        """
        if self._entered:
            raise RunError(
                f"A {type(self.controller).__name__} is registered in this model already, in a "
                "with block that is still open. Leave it before another one is registered."
            )
        self.restore()

    def restore(self) -> None:
        """Put the processors from before back, whatever was set since."""
        self._active = self._entered = False
        self._installed.remove()

    def tell_strays(self) -> None:
        """Warn of calls of the model that were no passes of its run, once."""
        self._strays.tell()

    def _warn_if_unused(self) -> None:
        name = type(self.controller).__name__
        problem, strays = "", str(self._strays)
        self._strays.forget()
        if not self._passes and not any(one.has_asked for one in self._processors):
            problem = (
                f"The {name} saw nothing: the model it was registered in never ran. Run that very "
                f"pipeline or UNet before the registration ends. {strays}".rstrip()
            )
        elif (
            getattr(self.controller, "cur_step", 0)
            and getattr(getattr(self.controller, "local_blend", None), "counter", 1) == 0
        ):
            problem = (
                f"The local_blend of the {name} was never asked. Call the pipeline with "
                "callback_on_step_end=step_end(controller)."
            )
        if problem := problem or strays:
            warn(problem, CaptureWarning)

    def _before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook of the model: refuse what the controller would not see whole."""
        found = self._reader.read(model, args, kwargs)
        is_shown = not found.stray and (is_unet(model) or not found.of_no_prompt)
        self._show(is_shown)
        if found.stray:
            return self._strays.note(found.stray)
        self._passes += 1
        if is_compiled(model):
            raise CaptureError(
                f"The {type(unwrapped(model)).__name__} was compiled while the "
                f"{type(self.controller).__name__} was registered, and what is compiled may call "
                "it otherwise. Compile the model first: with a controller it then runs eagerly."
            )
        if is_shown:
            check_batch(self.controller, found, is_unet(model))
        refuse_broken_step(self.controller)
        if replaced := self._installed.replaced():
            layer, processor = replaced[0]
            raise CaptureError(
                f"The processor of {layer.name} was replaced by a {type(processor).__name__}, "
                f"so the {type(self.controller).__name__} would miss this layer from here on. Set "
                "processors before it begins, and leave them alone until it ends."
            )
        self._begin_pass(found)

    def _before_direct(self, model: nn.Module, _: Any, given: dict[str, Any]) -> None:
        """Tell a store of ``unet.forward(...)``, where nothing is refused."""
        found = self._reader.read(model, (), given)
        self._show(not found.stray)
        if found.stray:
            return self._strays.note(found.stray)
        self._begin_pass(found)

    def _show(self, is_shown: bool) -> None:
        for processor in self._processors:
            processor.asks = is_shown

    def _tell_store(self, found: Pass) -> None:
        """Tell a store what it does not know, which one that is attached does."""
        store, call = self.controller, self._reader.call
        if not isinstance(store, AttentionStore) or store.attachment is not None or call is None:
            return
        if found.of_no_prompt and not is_unet(self._denoiser.model):
            return
        prompts = None
        with suppress(InvalidValueError):  # a batch of another guidance than the pipeline's
            prompts = found.prompts
        if prompts is None:
            store.repeats.note(call)
        size = cast(Size, found.latent_size)
        store.begin_pass(found.batch, size, self._denoiser.levels, prompts, self._places)

    def spans(self) -> Spans | None:
        """Where image and text are in the pass that runs now, in joint attention."""
        return self._reader.shared_spans()


def _warn_eager(model: Any, controller: Any) -> None:
    warn(
        f"The {type(unwrapped(model)).__name__} is compiled. While the {type(controller).__name__} "
        "is registered it runs eagerly, so the image can differ from the compiled model's in its "
        "last bits.",
        CaptureWarning,
    )
