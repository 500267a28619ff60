"""`View`: the part of a layer's calls that is shown."""

from __future__ import annotations

from dataclasses import dataclass

from ..attention.calls import ALL, AttentionCall, LayerCall, Rows, chosen_rows
from .attended import Attended, SideBySide, Softmax, softmax_of, without_padding
from .output_space import OutputSpace, Space
from .queries import IMAGE_TO_TEXT, Queries
from .refined import Refined, Spreading


@dataclass(frozen=True)
class View:
    """The part of a layer's calls that is shown, and its kind.

    The text's part of a joint softmax has rows that sum to less than 1.

    Args:
        queries: who attends, and to what, where text and image are in one call.
        space: kind of product, see :mod:`sdattn.look.output_space`.
        spreading: for maps that are spread along the image's own attention, else None.
    """

    queries: Queries = IMAGE_TO_TEXT
    space: Space = "attention"
    spreading: Spreading | None = None

    def of(self, call: LayerCall, rows: Rows = ALL) -> Attended:
        """Return what some rows of a call show."""
        some = call.of_rows(rows)
        attended: Attended
        if some.spans is None:
            attended = softmax_of(some)
            if some.beside:
                others = [one if isinstance(one, int) else softmax_of(one) for one in some.beside]
                attended = SideBySide(attended, others)
            return attended
        image, text = some.spans
        place = {"image": image, "text": text}
        keys = place[self.queries.keys]
        if self.space == "output":
            assert isinstance(call, AttentionCall)  # joint attention's, seen whole
            output = chosen_rows(call.output, rows)
            attended = OutputSpace(output[:, :, image], output[:, :, text])
        elif some.tokens is not None and self.queries.side == "text":
            attended = Softmax(without_padding(some, text, some.tokens), keys)
        else:
            attended = softmax_of(some, place[self.queries.side], keys)
        if self.spreading is not None:
            attended = Refined(attended, self.spreading, some.between(image, image))
        return attended if some.frames == 1 else attended.together(some.frames)
