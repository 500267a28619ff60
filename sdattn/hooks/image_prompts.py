"""The image prompts of an IP-Adapter: columns of their own behind those of the text.

The picture attends to them apart from the text, in one softmax an adapter, or one an image where
masks say which image goes where.

Source: Ye et al. 2023, "IP-Adapter", equation 4.
"""

from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from .attended import Attended, QueryKey, SideBySide


class ImageKeys:
    """The keys that a processor makes of its image prompts, seen while it runs.

    Args:
        processor: of an IP-Adapter, or any other, which has none.
        states: what the layer is handed as text: ``(text states, [image states [B, images, tokens,
            width] of each adapter])`` where there are image prompts.
    """

    def __init__(self, processor: Any, states: Any):
        self.projections = list(getattr(processor, "to_k_ip", ()))
        given = states[1][: len(self.projections)] if isinstance(states, tuple) else ()
        self.columns = [images.shape[1] * images.shape[2] for images in given]
        self.keys: list[list[Tensor]] = [[] for _ in self.projections]

    def hooks(self, thread: int) -> list[Any]:
        def keep(keys: list[Tensor], _module: nn.Module, _args: Any, output: Tensor) -> None:
            if get_ident() == thread:
                keys.append(output.flatten(1, -2))  # [B, tokens, width]

        return [
            projection.register_forward_hook(partial(keep, keys))
            for projection, keys in zip(self.projections, self.keys, strict=True)
        ]

    def beside(self, text: Attended, attn: Any, query: Tensor) -> Attended:
        """The image columns behind those of the text; nothing is paid to an adapter that is
        switched off."""
        others: list[Attended | int] = []
        for keys, columns in zip(self.keys, self.columns, strict=False):
            others += [QueryKey(attn, query, key) for key in keys] or [columns]
        return SideBySide(text, others) if others else text
