"""Joint attention observed: what the picture's queries pay to the text, without the ``[N, N]``
matrix of text and picture together.

Source: Esser et al. 2024, "Scaling Rectified Flow Transformers", for joint attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention import TorchJointProcessor, merge_heads, split_heads
from ..attention.joint_processor import JointCall, Spans
from ..errors import RunError
from ..models.denoiser_call import head_count, innermost
from ..models.layers import AttentionLayer
from .attended import Attended, GivenProbs
from .keep import Space
from .output_space import OutputSpace
from .projections import ARRIVED, by_name, output_projection
from .refined import Refined, RefinedProbs, Spreading
from .row_spans import RowOrder
from .sdpa import SdpaCall, SdpaWatch
from .unknown_processors import ProductWatch, maker_in, misfit, unknown_use

if TYPE_CHECKING:
    from .observers import ObservingProcessor

# Once the layer has run: for all rows in one, or for each, None where the call is not kept.
RowSpans = Callable[[], Sequence[Spans] | None]
DISPATCH = "diffusers.models.attention_dispatch"
# Of its backends those that call torch's scaled_dot_product_attention, so that they can be seen.
SEEN_BACKENDS = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def check_backends(layers: Sequence[AttentionLayer]) -> None:
    """Refuse joint attention whose backend hides its query and key, before the model runs.

    Raises:
        RuntimeError: a backend of diffusers' own that does not call torch's attention, or attention
            that is spread over several devices.
    """
    dispatch = sys.modules.get(DISPATCH)
    for layer in layers:
        inner = innermost(layer.module.processor)
        if layer.kind != "joint" or dispatch is None or not hasattr(inner, "_attention_backend"):
            continue
        registry = dispatch._AttentionBackendRegistry
        backend = inner._attention_backend or registry._active_backend
        backend = dispatch.AttentionBackendName(backend)
        own = getattr(registry._backends.get(backend), "__module__", DISPATCH) == DISPATCH
        config = getattr(inner, "_parallel_config", None)
        spread = getattr(config, "context_parallel_config", None) is not None
        if spread or (own and backend.value not in SEEN_BACKENDS):
            name = "context parallelism" if spread else f"the attention backend {backend.value!r}"
            raise RunError(
                f"{layer.name} runs with {name}, which does not show its query and key, so what it "
                "attends to cannot be known. Call model.set_attention_backend('native') first, or "
                "leave joint layers out (layers=…)."
            )


class JointLook:
    """See what the picture's queries pay to the text in one layer of joint attention.

    What a processor attends to is seen where it calls torch's ``scaled_dot_product_attention``:
    normed, rotated and joined. The output is that of the very kernel that torch would choose. A
    :class:`sdattn.TorchJointProcessor` shows what it used itself, as a controller left it. A user's
    own processor may also multiply the values by its probabilities; what reaches the output
    projection is compared, see :mod:`sdattn.hooks.unknown_processors`. What is shown is the text's
    part of the joint softmax, so a row sums to less than 1.

    Args:
        spans: where the picture's queries and the text's keys are, a pair for all rows of the batch
            or for each.
        spreading: of a capture whose maps are spread along the picture's own attention, see
            :mod:`sdattn.hooks.refined`; None for maps as they are.
        space: ``"attention"``, or ``"output"`` for how alike the outputs of both are, see
            :class:`sdattn.hooks.output_space.OutputSpace`.

    Raises (when called):
        RuntimeError: the processor did not call ``scaled_dot_product_attention`` just once for text
            and picture together, or joined them in another order than ``spans`` says.
    """

    def __init__(
        self, spans: RowSpans, spreading: Spreading | None = None, space: Space = "attention"
    ):
        self.spans, self.spreading, self.space = spans, spreading, space
        self.checked = False  # where the text's values are, which is read back from the device
        self._order: RowOrder | None = None  # of rows that differ, as of the call before

    def __call__(
        self, observer: ObservingProcessor, attn: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Attended | None]:
        inner = innermost(observer)
        if isinstance(inner, TorchJointProcessor):
            return self._of_open(inner, observer, attn, *args, **kwargs)
        if not type(inner).__call__.__module__.startswith("diffusers."):
            return self._of_unknown(observer, attn, *args, **kwargs)
        calls: list[SdpaCall] = []
        names = () if self.checked else ("add_v_proj", "to_added_qkv")
        with observer.projected(attn, *names) as projected:
            output = observer.watched(calls, SdpaWatch, attn, *args, **kwargs)
        # Of several calls (SD3.5 has self-attention as well) the one over all tokens is the joint
        # one.
        seen = _whole(calls, _length(by_name(inner, args, kwargs)), type(observer.inner).__name__)
        rows = self.spans()
        if rows is None:
            return output, None
        if not self.checked and len(rows) == 1:
            self.checked = True
            # Once a layer: the text's values must lie where its keys are said to.
            _check_order(seen, rows[0][1], attn, projected, type(inner).__name__)
        return output, self._shown(seen, rows)

    def _of_unknown(
        self, observer: ObservingProcessor, attn: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Attended | None]:
        """What a user's own processor used: the product with the values, or call of torch's
        attention, whose picture reached the output projection."""
        events: list[Any] = []
        to_out = output_projection(attn)
        with observer.projections.during([(ARRIVED, to_out)]) as seen:
            output = observer.watched(events, ProductWatch, attn, *args, **kwargs)
        given = by_name(innermost(observer), args, kwargs)
        length, heads = _length(given), head_count(attn)
        # a layer of one stream leaves the output projection to its block
        whole = output[0] if isinstance(output, tuple) else output
        arrived = seen.get(ARRIVED, []) if to_out is not None else [whole]
        rows, maker = self.spans(), None
        if arrived:
            features = arrived[-1].shape[-1] // heads
            maker = maker_in(events, len(given["hidden_states"]), heads, length, features)
        if maker is None:
            for call in events:
                _check_plain(call)
            raise RunError(unknown_use(innermost(observer)))
        if rows is None:
            return output, None
        spans = rows[0]
        predicted = merge_heads(maker.output)  # [B, S, heads*d]
        cells, first = arrived[-1].shape[1], spans[0].start
        # Reference pictures, which follow the one that is made, reach the projection with it.
        own = predicted[:, first : first + cells]
        if not self.checked and cells < length:
            self.checked = True
            other = predicted[:, :cells] if first else predicted[:, -cells:]
            if _fits(other, arrived[-1]) and not _fits(own, arrived[-1]):
                raise RunError(_otherwise_joined(type(innermost(observer)).__name__, spans[1]))
        observer.check(own if cells < length else predicted, *arrived)
        if isinstance(maker, SdpaCall):
            return output, self._shown(maker, rows)
        if len(rows) > 1:
            raise RunError(_own_lengths(innermost(observer)))
        return output, self._shown_of(maker.probs, maker.output, *spans)

    def _of_open(
        self,
        inner: TorchJointProcessor,
        observer: ObservingProcessor,
        attn: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Attended | None]:
        """What a processor of ours shows of its call."""
        calls: list[JointCall] = []

        def watcher(call: JointCall) -> None:
            if get_ident() == observer.thread:
                calls.append(call)

        inner.joint_watchers.append(watcher)
        try:
            output = observer.inner(attn, *args, **kwargs)
        finally:
            inner.joint_watchers.remove(watcher)
        seen, rows = _of_only(calls, type(inner).__name__), self.spans()
        if rows is None:
            return output, None
        if len(rows) > 1:
            raise RunError(_own_lengths(inner))
        spans = rows[0]
        if seen.text not in (None, spans[1]):
            raise RunError(_otherwise_joined(type(inner).__name__, spans[1]))
        return output, self._shown_of(seen.probs, seen.output, *spans)

    def _shown_of(self, probs: Tensor, made: Tensor, picture: slice, text: slice) -> Attended:
        """Of probabilities ``[B, heads, S, S]`` and what they made, ``[B, heads, S, d]``."""
        if self.space == "output":
            shown: Attended = OutputSpace(made[:, :, picture], made[:, :, text])
        else:
            shown = GivenProbs(probs[:, :, picture, text])
        if self.spreading is None:
            return shown
        return RefinedProbs(shown, self.spreading, probs[:, :, picture, picture])

    def _shown(self, seen: SdpaCall, rows: Sequence[Spans]) -> Attended:
        """Of one call for text and picture together, and where in it each of them is."""
        picture, text = rows[0]
        if len(rows) > 1:
            of = tuple(rows), seen.shape[3]
            if self._order is None or self._order.of != of:
                self._order = RowOrder(*of)
            seen, picture, text = self._order(seen), self._order.picture, self._order.text
        if self.space == "output":
            outputs = (seen.output[:, :, part] for part in (picture, text))
            shown: Attended = OutputSpace(*outputs)
        else:
            shown = seen.attended(picture, text)
        if self.spreading is None:
            return shown
        return Refined.of_call(seen, picture, shown, self.spreading)


def _length(given: dict[str, Any]) -> int:
    """Tokens of a layer's call; of a layer of one stream some models hand them over twice."""
    picture, text = given["hidden_states"], given.get("encoder_hidden_states")
    return int(picture.shape[1] + (0 if text is None or text is picture else text.shape[1]))


def _own_lengths(processor: Any) -> str:
    return (
        f"The rows of this model's batch have texts of their own lengths, and of a "
        f"{type(processor).__name__}, which multiplies by its own probabilities, they cannot be "
        "told apart. Draw one prompt at a time, or call torch's scaled_dot_product_attention."
    )


def _of_only(calls: Sequence[JointCall], name: str) -> JointCall:
    if len(calls) != 1:
        raise RunError(
            f"The processor {name} computed its attention {len(calls)} times in one call, so what "
            "it attended to cannot be known. Leave __call__ to TorchJointProcessor and edit by a "
            "controller, or leave this layer out (layers=…)."
        )
    return calls[0]


def _whole(calls: Sequence[SdpaCall], length: int, name: str) -> SdpaCall:
    """The one call for all tokens of text and picture."""
    fitting = [call for call in calls if call.shape[2:] == (length, length)]
    if len(fitting) != 1:
        lengths = ["x".join(map(str, call.shape[2:])) for call in calls]
        raise RunError(
            f"The processor {name} called torch's "
            f"scaled_dot_product_attention {len(fitting)} times for all of its {length} "
            f"tokens of text and picture together (in all {lengths or 'never'}), so what "
            "it attended to cannot be known. Choose a backend that calls it, "
            "model.set_attention_backend('native'), or leave this layer out (layers=...)."
        )
    _check_plain(fitting[0])
    return fitting[0]


def _check_plain(call: Any) -> None:
    if isinstance(call, SdpaCall) and not call.plain:
        raise RunError(
            "A joint attention with dropout, a causal mask or grouped queries is not known. "
            "Leave this layer out (layers=...)."
        )


def _fits(predicted: Tensor, arrived: Tensor) -> bool:
    """Whether one is the other; read from the device."""
    return arrived.device.type != "meta" and bool(misfit(predicted, arrived) <= 1)


def _check_order(
    seen: SdpaCall, text: slice, attn: Any, projected: dict[str, Tensor], name: str
) -> None:
    """Refuse a layer that did not put the values of the text where its keys are said to be.

    Values are neither normed nor rotated. Layers that get text and picture joined already
    project them in one; their order is that of the layers before.
    """
    own = projected.get("add_v_proj")
    if own is None and "to_added_qkv" in projected:
        own = projected["to_added_qkv"].chunk(3, dim=-1)[-1]
    if own is None or own.device.type == "meta":
        return
    expected = split_heads(own, head_count(attn)).to(seen.value.dtype)  # [B, heads, T, d]
    if not torch.equal(seen.value[:, :, text], expected):
        raise RunError(_otherwise_joined(name, text))


def _otherwise_joined(name: str, text: slice) -> str:
    return (
        f"The processor {name} does not join text and picture in the order that is known of this "
        f"model (the text at {text.start} to {text.stop}), so which column is which token cannot "
        "be known. Leave this layer out (layers=...)."
    )
