"""`Follower`: what follows a model through its runs, and tells its subscribers."""

from __future__ import annotations

from threading import get_ident

from torch import nn

from ..models.denoiser import Denoiser
from ..models.pipeline import Given
from .installer import Installation, PassHooks, in_backward
from .pass_reader import PassReader
from .passes import Pass, StepCalls, Strays


class Subscriber:
    """Base of what follows a run: captures, stores, controllers and knockouts."""

    def begin_run(self, first: Pass) -> None:
        """Begin a run; its first pass follows."""

    def begin_pass(self, begun: Pass) -> None:
        """Begin a pass, before its layers run."""

    def end_pass(self, ended: Pass) -> None:
        """End a pass that was begun; a call that raised an error never ends."""

    def stray(self, call: Pass) -> None:
        """Leave a call alone that belongs to no run."""

    def failed(self, error: Exception) -> None:
        """Deal with a call that could not be read; by default the model's call fails."""
        raise error


class Follower:
    """Follower of a model, whose calls it reads once for all its subscribers.

    Args:
        denoiser: model and its pipeline.
        passes: reader of its calls.
        installed: hooks, which go with it.
        thread: thread whose calls are followed; None for all.

    Attributes:
        running: pass that is running, a stray too; None outside, and if it could not be read.
        in_call: True while the model runs.
        strays: calls of no run.
        step_calls: calls in steps that had one already.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        passes: PassReader,
        installed: Installation,
        thread: int | None = None,
    ):
        self.passes = passes
        self.thread = thread
        self.strays = Strays(denoiser.model)
        self.step_calls = StepCalls(denoiser.pipeline, denoiser.model)
        self.running: Pass | None = None
        self.in_call = False
        self._installed = installed
        self._subscribers: list[Subscriber] = []
        installed.undo(self._subscribers.clear)  # a cycle would keep their maps
        installed.undo(passes.close)
        passes.listen()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell another one too, after those before."""
        self._subscribers.append(subscriber)

    def follow(self, model: nn.Module) -> None:
        """Follow a model; a pipeline may have a second one that runs some of the steps."""
        PassHooks(self._installed, model, self._begin, self._end)

    def _begin(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Given,
        is_direct: bool = False,
    ) -> None:
        if self._is_ignored():
            return
        self.running = None
        self.in_call = True
        try:
            call = self.passes.read(model, args, kwargs)
        except Exception as error:
            for subscriber in self._subscribers:
                subscriber.failed(error)
            return
        call.is_direct = is_direct
        self.running = call
        if call.stray is not None:
            self.strays.note(call.stray)
            for subscriber in self._subscribers:
                subscriber.stray(call)
            return
        if call.again:
            self.step_calls.note(call)
        for subscriber in self._subscribers:
            if call.begins_run:
                subscriber.begin_run(call)
            subscriber.begin_pass(call)

    def _end(self) -> None:
        if self._is_ignored() or not self.in_call:
            return
        ended = self.running
        self.running = None
        self.in_call = False
        if ended is not None and ended.stray is None:
            for subscriber in self._subscribers:
                subscriber.end_pass(ended)

    def _is_ignored(self) -> bool:
        """Check for another thread's call, and for a layer that runs again for its gradient."""
        return in_backward() or self.thread not in (None, get_ident())
