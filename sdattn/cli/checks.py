"""How values of options are read, and checks of them before a model is loaded, all in one message.
No torch."""

import json
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer

from ..errors import InvalidValueError, SdattnError
from .options import CALL, LOADING

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


class Checks:
    """Checks that go on after one has failed.

    checks = Checks()
    checks.run(check_target, out, force=force)
    checks.refuse()
    """

    def __init__(self) -> None:
        self._failed: list[SdattnError | typer.BadParameter] = []

    def run(
        self, check: Callable[_Given, _Found], *args: _Given.args, **kwargs: _Given.kwargs
    ) -> _Found | None:
        """Return what a check returns, or None if it refuses."""
        try:
            return check(*args, **kwargs)
        except (SdattnError, typer.BadParameter) as error:
            self._failed.append(error)
            return None

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the pipeline's call, with those in --set that can be read."""
        given = {name: value for name, value in call.items() if name != "set_"}
        for text in call.get("set_", ()):
            if (found := self.run(setting, text)) is not None:
                name, value = found
                given[name] = value
        return given

    def of_call(
        self, loaded: dict[str, Any], prompts: list[str], seed: int, given: dict[str, Any]
    ) -> None:
        """Check the options of a run, as far as they can be judged without its model."""
        from ..loading.facts import check_frames, check_names, check_size
        from ..loading.options import LoadingOptions
        from ..models.values import check_text, check_values, checked_seeds
        from ..prompts.words import empty_prompt

        for prompt in prompts:
            self.run(check_text, prompt, "prompt")
            if not prompt.strip():
                self._failed.append(empty_prompt(prompt))
        self.run(checked_seeds, seed)
        for name, value in given.items():
            self.run(check_values, {name: value})
        model = loaded["model"]
        self.run(check_size, model, given)
        self.run(check_frames, model, given)
        further = sorted(given.keys() - CALL.keys())
        if further and not self._failed:  # it takes seconds
            where: dict[str, Any] = {name: loaded.get(name) for name in ("revision", "config")}
            self.run(check_names, model, further, **where)
        loading = {name: value for name, value in loaded.items() if name in LOADING}
        if (how := self.run(LoadingOptions, **loading)) is not None:
            self.run(how.check_files, model)

    def refuse(self) -> None:
        """Raise what a check has refused, in one error for all of them.

        Raises:
            SdattnError, typer.BadParameter: the only one.
            typer.BadParameter: all, if one of them is wrong usage.
            InvalidValueError: all.
        """
        if len(self._failed) == 1:
            raise self._failed[0]
        if self._failed:
            text = " ".join(dict.fromkeys(map(_said, self._failed)))
            usage = any(isinstance(error, typer.BadParameter) for error in self._failed)
            raise typer.BadParameter(text) if usage else InvalidValueError(text)


def _said(error: SdattnError | typer.BadParameter) -> str:
    if isinstance(error, SdattnError):
        return str(error)
    return f"{error.param_hint}: {error.message}" if error.param_hint else error.message


# How values are read

_WITH_OPTION = {  # names that --set refuses: options of the commands and of generate()
    *("prompt", "pipe", "seed", "words", "capture_options", "preset", "refine", "ask", "causal"),
    *("spots", "max_bytes", "candidates", "decide_at", "at_once"),
    *CALL,
}


def setting(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE; the value is JSON if it parses as JSON, else text."""
    name, is_set, value = text.partition("=")
    if not is_set or not name.isidentifier():
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE.", param_hint="--set")
    if name in _WITH_OPTION:
        raise typer.BadParameter(f"Pass {name} by its own option or argument.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def names_of(text: str) -> tuple[str, ...]:
    """Read names with commas between."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def threshold_of(text: str | None) -> float | str | None:
    """Read a threshold of masks: a number, or a name."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def bytes_of(size: str | None) -> int | None:
    """Read --max-memory.

    >>> bytes_of("500 MB"), bytes_of("1.5GiB")
    (500000000, 1610612736)
    """
    if size is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT])(i?)B", size.strip(), re.IGNORECASE)
    number = 0
    if found:
        base = 1024 if found[3] else 1000
        number = round(float(found[1]) * base ** ("KMGT".index(found[2].upper()) + 1))
    if not number:
        raise typer.BadParameter(
            f"{size!r} is not a size such as 4GB, 500 MB or 1.5GiB.", param_hint="--max-memory"
        )
    return number
