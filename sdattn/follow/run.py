"""`follow()`: follow a model through its runs.

`Run` reads each call once, for all subscribers:

    run = follow(find_denoiser(pipe), branch="conditional")
    run.subscribe(mine)  # its begin_run, begin_pass, end_pass, stray
    with run.installed:
        run.watch(pipe.unet)
        pipe("a cat")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any

from torch import nn

from ..models.denoiser import Denoiser
from ..models.layers import AttentionLayer
from ..models.pipeline import Given
from ..models.running_call import running_variables
from ..models.values import refuse_crop
from .doubts import Doubts
from .drawn import DrawnPrompts, PromptWatch
from .installer import Installation, PassHooks, in_backward
from .pass_options import Guidance
from .pass_reader import PassReader
from .passes import Pass

_captures: list[Run] = []  # that are open, in all threads


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


class Run:
    """A model's runs, as :func:`follow` follows them.

    It alone knows the thread, the backward pass and the call that is running; what watches layers
    asks :meth:`is_open`.

    Attributes:
        reader: reader of the model's calls.
        installed: hooks and processors; removing them ends it all.
        doubts: what is to be told when maps are read.
        running: pass that is running, a stray too; None outside, and if it could not be read.
        in_call: True while the model runs.
        drawn: prompts of the last run that began; None if unknown, or not asked for.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        reader: PassReader,
        doubts: Doubts,
        layers: Sequence[AttentionLayer] = (),
        thread: int | None = None,
        hears_texts: bool = False,
    ):
        self.reader = reader
        self.doubts = doubts
        self.installed = Installation(layers)
        self.running: Pass | None = None
        self.in_call = False
        self.drawn: DrawnPrompts | None = None
        self._thread = thread
        self._open: int | None = None  # thread of the pass that is running
        self._subscribers: list[Subscriber] = []
        self._prompts = PromptWatch(denoiser) if hears_texts else None
        self._is_watching = False

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell another one too, after those before."""
        self._subscribers.append(subscriber)

    def watch(self, model: nn.Module) -> None:
        """Follow a model; a pipeline may have a second one that runs some of the steps."""
        if not self._is_watching:
            self._is_watching = True
            self.installed.undo(self._end_watch)
            self.reader.listen()
            if self._prompts is not None:
                self._prompts.listen(self.installed)
            if self._thread is not None:
                _captures.append(self)
        PassHooks(self.installed, model, self._begin, self._end)

    def is_open(self) -> bool:
        """Check whether a pass of the run is running, in this thread. When a backward pass runs
        checkpointed layers a second time, none is."""
        return self._open == get_ident()  # asked several times a layer

    def is_followed(self) -> bool:
        """Check for the followed thread, outside of a backward pass."""
        return not in_backward() and self._thread in (None, get_ident())

    def variables(self) -> Mapping[str, Any]:
        """Return the variables of the pipeline's running call; empty outside of one."""
        return running_variables(self.reader.pipeline) or {}

    def refuse_crop(self) -> None:
        """Raise ValueError if the running call crops its images."""
        refuse_crop(self.variables())

    def _end_watch(self) -> None:
        self._subscribers.clear()  # a cycle would keep their maps
        self.reader.close()
        if self in _captures:
            _captures.remove(self)

    def _begin(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: Given,
        is_direct: bool = False,
    ) -> None:
        if not self.is_followed():
            return
        self.running = None
        self._open = None
        self.in_call = True
        try:
            call = self.reader.read(model, args, kwargs)
        except Exception as error:
            for subscriber in self._subscribers:
                subscriber.failed(error)
            return
        call.is_direct = is_direct
        self.running = call
        if call.stray is not None:
            who, other = call.stray
            if other is None or all(run.reader.pipeline is not other for run in tuple(_captures)):
                self.doubts.note_stray(who)
            for subscriber in self._subscribers:
                subscriber.stray(call)
            return
        self._open = get_ident()
        self.doubts.note(call, self.reader.call)
        if call.begins_run and self._prompts is not None:
            self.drawn = self._prompts.drawn()
        for subscriber in self._subscribers:
            if call.begins_run:
                subscriber.begin_run(call)
            subscriber.begin_pass(call)

    def _end(self) -> None:
        if not self.in_call or not self.is_followed():
            return
        ended = self.running
        self.running = None
        self._open = None
        self.in_call = False
        if ended is not None and ended.stray is None:
            for subscriber in self._subscribers:
                subscriber.end_pass(ended)


def follow(
    denoiser: Denoiser,
    *,
    branch: str | None = None,
    guidance: Guidance | None = "auto",
    latent_size: tuple[int, int] | None = None,
    counts_gradients: bool = True,
    frames: Sequence[int] | None = None,
    step_call: int | None = None,
    layers: Sequence[AttentionLayer] = (),
    hears_texts: bool = False,
) -> Run:
    """Return a run to subscribe to. Nothing is put into the model before :meth:`Run.watch`.

    Args:
        denoiser: model and its pipeline.
        branch, guidance, latent_size, counts_gradients, frames, step_call: see
            :class:`PassReader`. A run with a branch is a capture's, and follows this thread alone.
        layers: layers whose processors come back at the end, whoever sets them.
        hears_texts: True if the prompts are to be known, see :attr:`Run.drawn`.

    Raises:
        ValueError: as :class:`PassReader`.
    """
    reader = PassReader(
        denoiser, branch, guidance, latent_size, counts_gradients, frames, step_call
    )
    thread = None if branch is None else get_ident()
    return Run(denoiser, reader, Doubts(denoiser, branch, step_call), layers, thread, hears_texts)
