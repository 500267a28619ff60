"""Joint attention observed: the image's attention to the text, without the ``[N, N]`` matrix.

Source: Esser et al. 2024, "Scaling Rectified Flow Transformers", for joint attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..attention import TorchJointProcessor, merge_heads
from ..attention.calls import AttentionCall
from ..attention.device_copies import DeviceCopies
from ..attention.joint_processor import Spans
from ..errors import RunError
from .attended import Attended, Softmax, softmax_of, without_padding
from .joint_checks import (
    check_order,
    is_diffusers_own,
    made_by,
    otherwise_joined,
    own_lengths,
    token_count,
    whole_call,
)
from .output_space import OutputSpace, Space
from .projections import ARRIVED, by_name, output_projection
from .queries import IMAGE_TO_TEXT, Queries
from .refined import Refined, Spreading
from .row_orders import RowCalls, RowOrder, as_one_call, with_every_query
from .sdpa import ProductWatch, SdpaWatch
from .sources import shown
from .unknown_processors import agrees

if TYPE_CHECKING:
    from .observers import ObservingProcessor

# Once the layer has run: one for all rows or one per row; None if the call is not kept.
RowSpans = Callable[[], Sequence[Spans] | None]
Seen = tuple[Any, AttentionCall]  # a processor's output, and the call for all its tokens


class JointLook:
    """See the attention of the image's queries to the text in one layer of joint attention.

    What a processor attends to is seen where it calls torch's ``scaled_dot_product_attention``:
    normed, rotated and joined. The output comes from the kernel that torch would choose. A
    :class:`sdattn.TorchJointProcessor` shows its own call, as a controller left it. A user's
    processor may also multiply the values by its probabilities: what reaches the output projection
    is compared, see :mod:`sdattn.look.unknown_processors`. Rows are the text's part of the joint
    softmax and sum to less than 1.

    Args:
        spans: places of the image's queries and the text's keys, one pair or one per row.
        spreading: for maps that are spread along the image's own attention, else None.
        space: kind of product, see :mod:`sdattn.look.output_space`.
        queries: who attends, and to what.
        caches_text: True if the image's queries have a call of their own, a layer's last.

    Raises (when called):
        RuntimeError: the processor did not call ``scaled_dot_product_attention`` just once for text
            and image together, or joined them in another order than ``spans`` says.
    """

    def __init__(
        self,
        spans: RowSpans,
        spreading: Spreading | None = None,
        space: Space = "attention",
        queries: Queries = IMAGE_TO_TEXT,
        caches_text: bool = False,
    ):
        self.spans = spans
        self.spreading = spreading
        self.space = space
        self.queries = queries
        self.caches_text = caches_text
        self.checked = False  # whether the text's values were found, which reads from the device
        self._order: RowOrder | None = None  # for rows that differ; the previous call's

    def __call__(
        self, observer: ObservingProcessor, inner: Any, attn: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Attended | None]:
        see = self._see_unknown
        if isinstance(inner, TorchJointProcessor):
            see = self._see_open
        elif is_diffusers_own(inner):
            see = self._see_dispatched
        output, call = see(observer, inner, attn, *args, **kwargs)
        rows = self.spans()
        return output, None if rows is None else self._shown(call, rows, inner)

    def _see_open(
        self, observer: ObservingProcessor, inner: Any, attn: Any, *args: Any, **kwargs: Any
    ) -> Seen:
        output, call = shown(observer, inner, attn, *args, **kwargs)
        rows = self.spans()
        if rows is not None and len(rows) == 1 and call.text not in (None, rows[0][1]):
            raise RunError(otherwise_joined(type(inner).__name__, rows[0][1]))
        return output, call

    def _see_dispatched(
        self, observer: ObservingProcessor, inner: Any, attn: Any, *args: Any, **kwargs: Any
    ) -> Seen:
        """Run a diffusers processor; of several calls (SD3.5), the one over all tokens is joint."""
        calls: list[AttentionCall] = []
        names = () if self.checked else ("add_v_proj", "to_added_qkv")
        with observer.projected(attn, *names) as projected:
            output = observer.watched(calls, SdpaWatch, attn, *args, **kwargs)
        arguments = by_name(inner, args, kwargs)
        name = type(inner).__name__
        if self.caches_text and calls:
            calls = [with_every_query(calls[-1])]
        call = whole_call(as_one_call(calls, arguments), token_count(arguments), name)
        rows = self.spans()
        if not self.checked and rows is not None and len(rows) == 1:
            self.checked = True
            # Once per layer: the text's values must be where its keys are said to be.
            image, text = rows[0]
            check_order(call, image, text, attn=attn, projected=projected, name=name)
        return output, call

    def _see_unknown(
        self, observer: ObservingProcessor, inner: Any, attn: Any, *args: Any, **kwargs: Any
    ) -> Seen:
        """Run a user's processor, whose call is a product with the values or torch's attention."""
        calls: list[AttentionCall] = []
        to_out = output_projection(attn)
        with observer.projections.during([(ARRIVED, to_out)]) as seen:
            output = observer.watched(calls, ProductWatch, attn, *args, **kwargs)
        arguments = by_name(inner, args, kwargs)
        if to_out is None:  # a layer of one stream leaves the output projection to its block
            arrived = [output[0] if isinstance(output, tuple) else output]
        else:
            # the single blocks of FLUX.2 project their feed-forward part with it
            more = getattr(attn, "mlp_hidden_dim", 0)
            arrived = [states[..., : states.shape[-1] - more] for states in seen.get(ARRIVED, [])]
        call = made_by(as_one_call(calls, arguments), arrived, attn, arguments, inner)
        rows = self.spans()
        if rows is not None:
            self._check_arrived(observer, inner, call, rows[0], arrived)
        return output, call

    def _check_arrived(
        self,
        observer: ObservingProcessor,
        inner: object,
        call: AttentionCall,
        spans: Spans,
        arrived: Sequence[Tensor],
    ) -> None:
        """Refuse a call that did not make the output projection's input, in this order."""
        predicted = merge_heads(call.output)  # [B, S, heads*d]
        cells = arrived[-1].shape[1]
        if cells < predicted.shape[1]:  # the image's alone
            first = spans[0].start
            other = predicted[:, :cells] if first else predicted[:, -cells:]
            # Reference images follow the generated one and reach the projection with it.
            predicted = predicted[:, first : first + cells]
            if not self.checked:
                self.checked = True
                if agrees(other, arrived[-1]) and not agrees(predicted, arrived[-1]):
                    raise RunError(otherwise_joined(type(inner).__name__, spans[1]))
        observer.check(predicted, *arrived)

    def _shown(self, call: AttentionCall, rows: Sequence[Spans], inner: object) -> Attended:
        """Return what is shown of one call for text and image, and where each of them is."""
        image, text = rows[0]
        kept = None
        if len(rows) > 1:
            if call.probs is not None:
                raise RunError(own_lengths(inner))
            order = self._order
            if order is None or order.spans != tuple(rows) or order.length != call.shape[3]:
                order = self._order = RowOrder(tuple(rows), call.shape[3])
            call = order(call)
            image = order.image
            text = order.text
            kept = order.tokens
        elif isinstance(call, RowCalls):
            kept = DeviceCopies(call.taken[:, None, None, text])
        place = {"image": image, "text": text}
        keys = place[self.queries.keys]
        attended: Attended
        if self.space == "output":
            attended = OutputSpace(call.output[:, :, image], call.output[:, :, text])
        elif kept is not None and self.queries.side == "text":
            call = without_padding(call, text, kept)
            attended = Softmax(call, keys)
        else:
            attended = softmax_of(call, place[self.queries.side], keys)
        if self.spreading is None:
            return attended
        return Refined(attended, self.spreading, call.between(image, image))
