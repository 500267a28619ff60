"""Joint attention observed: what the image's queries pay to the text, without the ``[N, N]``
matrix of text and image together.

Source: Esser et al. 2024, "Scaling Rectified Flow Transformers", for joint attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..attention import TorchJointProcessor, merge_heads
from ..attention.device_copies import DeviceCopies
from ..attention.joint_processor import JointCall, Spans
from ..errors import RunError
from ..models.denoiser_call import head_count, innermost
from .attended import Attended, GivenProbs
from .gramcol import BEST, GramCol
from .joint_checks import (
    check_exact,
    check_order,
    fits,
    is_diffusers_own,
    only_call,
    otherwise_joined,
    own_lengths,
    token_count,
    whole_call,
)
from .keep import Z_SCORES, Space
from .output_space import OutputSpace
from .projections import ARRIVED, by_name, output_projection
from .refined import Refined, RefinedProbs, Spreading
from .row_calls import RowCalls, as_one_call
from .row_spans import RowOrder
from .sdpa import SdpaCall, SdpaWatch
from .unknown_processors import ProductWatch, maker_in, unknown_use

if TYPE_CHECKING:
    from .observers import ObservingProcessor

# Once the layer has run: for all rows in one, or for each, None where the call is not kept.
RowSpans = Callable[[], Sequence[Spans] | None]


class JointLook:
    """See what the image's queries pay to the text in one layer of joint attention.

    What a processor attends to is seen where it calls torch's ``scaled_dot_product_attention``:
    normed, rotated and joined. The output is that of the very kernel that torch would choose. A
    :class:`sdattn.TorchJointProcessor` shows what it used itself, as a controller left it. A user's
    own processor may also multiply the values by its probabilities; what reaches the output
    projection is compared, see :mod:`sdattn.hooks.unknown_processors`. What is shown is the text's
    part of the joint softmax, so a row sums to less than 1.

    Args:
        spans: where the image's queries and the text's keys are, a pair for all rows of the batch
            or for each.
        spreading: of a capture whose maps are spread along the image's own attention, see
            :mod:`sdattn.hooks.refined`; None for maps as they are.
        space: ``"attention"``; ``"output"`` for how alike the outputs of both are, see
            :class:`sdattn.hooks.output_space.OutputSpace`; ``"gramcol"`` or ``"imap"``, see
            :mod:`sdattn.hooks.gramcol`.
        frames: says how many frames the pass that runs now has.

    Raises (when called):
        RuntimeError: the processor did not call ``scaled_dot_product_attention`` just once for text
            and image together, or joined them in another order than ``spans`` says.
    """

    def __init__(
        self,
        spans: RowSpans,
        spreading: Spreading | None = None,
        space: Space = "attention",
        frames: Callable[[], int] = lambda: 1,
    ):
        self.spans, self.spreading, self.space = spans, spreading, space
        self.frames = frames
        self.checked = False  # where the text's values are, which is read back from the device
        self._order: RowOrder | None = None  # of rows that differ, as of the call before

    def __call__(
        self, observer: ObservingProcessor, attn: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Attended | None]:
        inner = innermost(observer)
        if isinstance(inner, TorchJointProcessor):
            return self._of_open(inner, observer, attn, *args, **kwargs)
        if not is_diffusers_own(inner):
            return self._of_unknown(observer, attn, *args, **kwargs)
        calls: list[SdpaCall] = []
        names = () if self.checked else ("add_v_proj", "to_added_qkv")
        with observer.projected(attn, *names) as projected:
            output = observer.watched(calls, SdpaWatch, attn, *args, **kwargs)
        # Of several calls (SD3.5 has self-attention as well) the one over all tokens is the joint
        # one.
        given = by_name(inner, args, kwargs)
        whole = as_one_call(calls, given)
        seen = whole_call(whole, token_count(given), type(observer.inner).__name__)
        rows = self.spans()
        if rows is None:
            return output, None
        if not self.checked and len(rows) == 1:
            self.checked = True
            # Once a layer: the text's values must lie where its keys are said to.
            check_order(seen, *rows[0], attn, projected, type(inner).__name__)
        return output, self._shown(seen, rows)

    def _of_unknown(
        self, observer: ObservingProcessor, attn: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Attended | None]:
        """What a user's own processor used: the product with the values, or call of torch's
        attention, whose image reached the output projection."""
        calls: list[Any] = []
        to_out = output_projection(attn)
        with observer.projections.during([(ARRIVED, to_out)]) as seen:
            output = observer.watched(calls, ProductWatch, attn, *args, **kwargs)
        given = by_name(innermost(observer), args, kwargs)
        events = as_one_call(calls, given)
        length, heads = token_count(given), head_count(attn)
        # a layer of one stream leaves the output projection to its block
        whole = output[0] if isinstance(output, tuple) else output
        arrived = seen.get(ARRIVED, []) if to_out is not None else [whole]
        # the single blocks of FLUX.2 project their feed-forward part with it
        more = getattr(attn, "mlp_hidden_dim", 0) if to_out is not None else 0
        arrived = [one[..., : one.shape[-1] - more] for one in arrived]
        rows, maker = self.spans(), None
        if arrived:
            features = arrived[-1].shape[-1] // heads
            maker = maker_in(events, len(given["hidden_states"]), heads, length, features)
        if maker is None:
            for call in events:
                check_exact(call)
            raise RunError(unknown_use(innermost(observer)))
        if rows is None:
            return output, None
        spans = rows[0]
        predicted = merge_heads(maker.output)  # [B, S, heads*d]
        cells, first = arrived[-1].shape[1], spans[0].start
        # Reference images, which follow the one that is made, reach the projection with it.
        own = predicted[:, first : first + cells]
        if not self.checked and cells < length:
            self.checked = True
            other = predicted[:, :cells] if first else predicted[:, -cells:]
            if fits(other, arrived[-1]) and not fits(own, arrived[-1]):
                raise RunError(otherwise_joined(type(innermost(observer)).__name__, spans[1]))
        observer.check(own if cells < length else predicted, *arrived)
        if isinstance(maker, SdpaCall):
            return output, self._shown(maker, rows)
        if len(rows) > 1:
            raise RunError(own_lengths(innermost(observer)))
        if self.space in Z_SCORES:
            raise RunError(
                f"space={self.space!r} reads the query and key of torch's "
                f"scaled_dot_product_attention, and a {type(innermost(observer)).__name__} "
                "multiplies by probabilities of its own. Set another processor, or take "
                "space='output'."
            )
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
        seen, rows = only_call(calls, type(inner).__name__), self.spans()
        if rows is None:
            return output, None
        if len(rows) > 1:
            raise RunError(own_lengths(inner))
        spans = rows[0]
        if seen.text not in (None, spans[1]):
            raise RunError(otherwise_joined(type(inner).__name__, spans[1]))
        return output, self._shown_of(seen.probs, seen.output, *spans, (seen.query, seen.key))

    def _shown_of(
        self,
        probs: Tensor,
        made: Tensor,
        image: slice,
        text: slice,
        made_by: tuple[Tensor, Tensor] | None = None,
    ) -> Attended:
        """Of probabilities ``[B, heads, S, S]``, what they made, ``[B, heads, S, d]``, and the
        query and key that they were made by, where these are known."""
        if self.space == "output":
            shown: Attended = OutputSpace(made[:, :, image], made[:, :, text])
        elif self.space in Z_SCORES and made_by is not None:
            shown = self._compared(*made_by, made, image, text)
        else:
            shown = GivenProbs(probs[:, :, image, text])
        if self.spreading is None:
            return shown
        return RefinedProbs(shown, self.spreading, probs[:, :, image, image])

    def _shown(self, seen: SdpaCall, rows: Sequence[Spans]) -> Attended:
        """Of one call for text and image together, and where in it each of them is."""
        (image, text), kept = rows[0], None
        if len(rows) > 1:
            of = tuple(rows), seen.shape[3]
            if self._order is None or self._order.of != of:
                self._order = RowOrder(*of)
            seen, image, text = self._order(seen), self._order.image, self._order.text
            kept = self._order.tokens
        elif isinstance(seen, RowCalls):
            kept = DeviceCopies(seen.taken[:, None, None, text])
        if self.space == "output":
            outputs = (seen.output[:, :, part] for part in (image, text))
            shown: Attended = OutputSpace(*outputs)
        elif self.space in Z_SCORES:
            shown = self._compared(seen.query, seen.key, seen.output, image, text, kept)
        else:
            shown = seen.attended(image, text)
        if self.spreading is None:
            return shown
        return Refined.of_call(seen, image, shown, self.spreading)

    def _compared(
        self,
        query: Tensor,
        key: Tensor,
        output: Tensor,
        image: slice,
        text: slice,
        kept: DeviceCopies | None = None,
    ) -> Attended:
        """Of all tokens' query, key and output, ``[B, heads, S, d]``."""
        of_image, of_text = query[:, :, image], key[:, :, text]
        best = BEST if self.space == "imap" else None
        return GramCol(of_image, of_text, output[:, :, image], self.frames(), best, kept)
