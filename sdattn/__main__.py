"""The process of the command line: ``python -m sdattn``, and the program ``sdattn``.

Ctrl-C ends it with exit code 130 and one sentence, also while it imports or exits.
"""

import atexit
import os
import signal
import sys
from types import FrameType
from typing import Any

_SENTENCE = "sdattn: The command was interrupted.\n"
_heard = list[int]()  # interrupts of this process


def main() -> None:
    """Run the command line, see `sdattn.cli.main`; exit code 130 if it was interrupted."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:  # not where the shell had it ignored, in the background
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the last to run
        signal.signal(signal.SIGINT, _interrupt)
    sys.excepthook = _end_if_interrupted
    sys.unraisablehook = _end_if_dropped
    try:
        from . import cli

        cli.main()
    except BaseException as error:
        is_finished = isinstance(error, SystemExit) and not error.code
        if is_finished or not _heard:
            raise
        print(_SENTENCE, end="", file=sys.stderr)
        exec("")  # or Python, interrupted in an earlier one, dies of the signal after all
        sys.exit(130)
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, _leave if _heard else _end)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but end the process while it imports: libraries take an import that
    failed for one that is not there, and nothing is being written."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _end()
        frame = frame.f_back
    _heard.append(number)
    raise KeyboardInterrupt


def _end_if_interrupted(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _end()
    sys.__excepthook__(kind, error, trace)


def _end_if_dropped(dropped: Any) -> None:
    """End where Python drops an interrupt: in a finalizer, or in a callback of C."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(dropped)


def _end(*_: Any) -> None:
    os.write(2, _SENTENCE.encode())
    _leave()


def _leave(*_: Any) -> None:
    os._exit(130)


if __name__ == "__main__":
    main()
