"""Count the modules of sdattn that run: for generate(), a command and a layer's call in capture().

    python -m scripts.count_modules            # the numbers, beside their targets
    python -m scripts.count_modules --names    # the modules, and the functions most often called

Modules are counted as Python enters their functions, not as it imports them. Everything runs on the
demo model, with two steps.
"""

import argparse
import inspect
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

PROMPT = "a cat left of a pizza"
TARGETS = {"generate()": 60, "sdattn generate": 85, "a layer's call": 10}
MOST = 12  # functions named


class Count:
    """Calls of functions by their module and name, and calls from one module into another."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.between = 0

    @property
    def modules(self) -> list[str]:
        return sorted({module for module, _ in self.calls})

    @contextmanager
    def counting(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        module, caller = _module(frame), frame.f_back
        if event != "call" or not _is_ours(frame) or _is_import(frame):
            return
        self.calls[module, frame.f_code.co_name] += 1
        self.between += caller is not None and _module(caller) != module


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _is_ours(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] == "sdattn"


def _is_import(frame: FrameType | None) -> bool:
    """Check whether a frame runs the body of a module or a class of ours, or what one called."""
    while frame is not None:
        if _is_ours(frame) and not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return True
        frame = frame.f_back
    return False


def of_generate(pipe: Any) -> Count:
    import sdattn

    count = Count()
    with count.counting():
        sdattn.generate(pipe, PROMPT, num_inference_steps=2)
    return count


def of_command() -> Count:
    from sdattn import cli

    count = Count()
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["sdattn", "generate", PROMPT, "--steps", "2", "--quiet", "--device", "cpu"]
        sys.argv += ["--out", f"{folder}/run"]
        with count.counting():
            with suppress(SystemExit):
                cli.main()
    return count


def of_layer(pipe: Any) -> Count:
    """Count the last call of one layer, when all is warm."""
    import sdattn
    from sdattn.models.denoiser import find_denoiser

    count = Count()
    layer = next(one for one in find_denoiser(pipe).layers if one.kind == "cross").module

    def begin(*_: object) -> None:
        count.calls.clear()
        count.between = 0
        sys.setprofile(count._note)

    hooks = [
        layer.register_forward_pre_hook(begin),
        layer.register_forward_hook(lambda *_: sys.setprofile(None)),
    ]
    try:
        with sdattn.capture(pipe):
            pipe(PROMPT, num_inference_steps=3, output_type="latent")
    finally:
        for hook in hooks:
            hook.remove()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="Name modules and functions.")
    names = parser.parse_args().names
    counts = {"sdattn generate": of_command()}
    from sdattn import load_pipeline

    pipe = load_pipeline("demo", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    counts |= {"generate()": of_generate(pipe), "a layer's call": of_layer(pipe)}
    for name, count in counts.items():
        print(f"{name}: {len(count.modules)} modules, at most {TARGETS[name]} allowed;", end=" ")
        print(f"{sum(count.calls.values()):,} calls, {count.between:,} from another module")
        if names:
            print("  " + ", ".join(one.removeprefix("sdattn.") for one in count.modules))
            for (module, function), number in count.calls.most_common(MOST):
                print(f"  {number:6,}  {module.removeprefix('sdattn.')}.{function}")


if __name__ == "__main__":
    main()
