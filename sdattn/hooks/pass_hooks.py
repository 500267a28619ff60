"""`PassHooks`: hooks before and behind each pass of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..models.denoiser_call import is_compiled
from ..models.running_call import forward_variables
from .installer import Installation


def in_backward() -> bool:
    """Check whether a backward pass is calling this; it runs checkpointed layers a second time."""
    # torch.utils.checkpoint and torch.utils.module_tracker ask so; there is no public name for it
    return torch._C._current_graph_task_id() != -1


class PassHooks:
    """Hooks before and after each pass of a model, and of ``unet.forward(...)`` too, which called
    directly runs no hooks but those of the UNet's parts.

    Args:
        installed: takes the hooks out again.
        model: held weakly.
        before: called with (model, args, kwargs).
        after: called when the pass has ended.
        direct: called in place of ``before`` for ``unet.forward(...)``.
    """

    def __init__(
        self,
        installed: Installation,
        model: Any,
        before: Callable[..., None],
        after: Callable[[], None] = lambda: None,
        direct: Callable[..., None] | None = None,
    ):
        self._before, self._after, self._direct = before, after, direct or before
        self._model = weakref.ref(model)
        self._is_hooked = self._is_direct = False
        installed.watch(model, self._begin, self._end)
        if hasattr(model, "conv_in") and hasattr(model, "conv_out") and not is_compiled(model):
            installed.watch(model.conv_in, self._begin_part)
            installed.follow(model.conv_out, self._end_part)

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_hooked, self._is_direct = True, False
        self._before(model, args, kwargs)

    def _end(self, *_: Any) -> None:
        self._after()

    def _begin_part(self, *_: Any) -> None:
        was_hooked, self._is_hooked = self._is_hooked, False  # one that broke off may have left it
        is_known = was_hooked or in_backward()
        given = None if is_known else forward_variables(self._model())
        if given is not None:
            names = ("sample", "timestep", "encoder_hidden_states")
            self._is_direct = True
            self._direct(self._model(), (), {name: given[name] for name in names})

    def _end_part(self, *_: Any) -> None:
        if self._is_direct:
            self._is_direct = False
            self._after()
