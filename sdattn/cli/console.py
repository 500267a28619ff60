"""Console for text from elsewhere."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from ..files.terminal import visible


class Console(rich.console.Console):
    """Console that prints text as it is: no markup, and no control codes except its own styles."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*args, **kwargs):
            yield Segment(text if control else visible(text), style, control)
