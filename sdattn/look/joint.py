"""Joint attention seen: one call for text and image, whose ``[N, N]`` matrix is never made.

What a processor attends to is seen where it calls torch's ``scaled_dot_product_attention``: normed,
rotated and joined. The output comes from the kernel that torch would choose. A user's processor may
also multiply the values by its probabilities.

Source: Esser et al. 2024, "Scaling Rectified Flow Transformers", for joint attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..attention import merge_heads
from ..attention.calls import AttentionCall, Spans
from ..attention.device_copies import DeviceCopies
from ..errors import RunError
from ..models.denoiser_call import head_count
from .joint_checks import check_exact, otherwise_joined, token_count
from .layer import Arguments, Layer
from .row_orders import RowCalls, RowOrder, as_one_call
from .unknown_processors import agrees, maker_in, unknown_use

# Once the layer has run: one for all rows or one per row; None if the call is not kept.
RowSpans = Callable[[], Sequence[Spans] | None]


class Joint:
    """The places of text and image in the calls of one layer of joint attention.

    Args:
        spans: places of the image's queries and the text's keys, one pair or one per row.
        caches_text: True if the image's queries have a call of their own, a layer's last.

    Attributes:
        is_checked: True once the text's values were found, which reads from the device.
    """

    def __init__(self, spans: RowSpans, caches_text: bool = False):
        self.spans = spans
        self.caches_text = caches_text
        self.is_checked = False
        self._order: RowOrder | None = None  # for rows that differ; the previous call's

    def placed(self, call: AttentionCall, inner: object) -> AttentionCall | None:
        """Return a call with the places of text and image, the same for all rows; None if it is not
        kept."""
        rows = self.spans()
        if rows is None:
            return None
        if len(rows) > 1:
            if call.probs is not None:
                raise RunError(
                    "The rows of this model's batch have texts of their own lengths, and of a "
                    f"{type(inner).__name__}, which multiplies by its own probabilities, they "
                    "cannot be told apart. Draw one prompt at a time, or call torch's "
                    "scaled_dot_product_attention."
                )
            order = self._order
            if order is None or order.spans != tuple(rows) or order.length != call.shape[3]:
                order = self._order = RowOrder(tuple(rows), call.shape[3])
            return order(call)
        call.spans = rows[0]
        _, text = rows[0]
        if call.text not in (None, text):
            raise RunError(otherwise_joined(type(inner).__name__, text))
        if isinstance(call, RowCalls):
            call.tokens = DeviceCopies(call.taken[:, None, None, text])
        return call


def made_for_all(
    joint: Joint,
    calls: Sequence[AttentionCall],
    arrived: Sequence[Tensor],
    attn: Layer,
    arguments: Arguments,
    inner: object,
) -> tuple[AttentionCall, Tensor | None]:
    """Return the call for all tokens that may have made the output projection's input, ``arrived``
    ``[B, N, heads*d]``, and its own result as that should have arrived, None if the call is not
    kept; refuse one in another order."""
    calls = as_one_call(calls, arguments)
    call = None
    if arrived:
        heads = head_count(attn)
        batch = len(arguments["hidden_states"])
        cells = token_count(arguments)
        call = maker_in(calls, batch, heads, cells, features=arrived[-1].shape[-1] // heads)
    if call is None:
        for one in calls:
            check_exact(one)
        raise RunError(unknown_use(inner))
    rows = joint.spans()
    if rows is None:
        return call, None
    predicted = merge_heads(call.output)  # [B, S, heads*d]
    cells = arrived[-1].shape[1]
    if cells >= predicted.shape[1]:
        return call, predicted
    # The image's alone; reference images follow the generated one and reach the projection with it.
    image, text = rows[0]
    other = predicted[:, :cells] if image.start else predicted[:, -cells:]
    predicted = predicted[:, image.start : image.start + cells]
    if not joint.is_checked:
        joint.is_checked = True
        if agrees(other, arrived[-1]) and not agrees(predicted, arrived[-1]):
            raise RunError(otherwise_joined(type(inner).__name__, text))
    return call, predicted
