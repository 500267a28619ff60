"""Checks of a command's options before its model is loaded, all in one message. No torch."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer

from ..errors import InvalidValueError, SdattnError
from .options import OF_PIPELINES, setting

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

    def settings(self, texts: list[str] | None) -> dict[str, Any]:
        """Return the options in --set that can be read."""
        return dict(filter(None, (self.run(setting, text) for text in texts or ())))

    def of_call(
        self, model: str, loading: dict[str, Any] | None, prompts: list[str], seed: int, given: Any
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
        self.run(check_size, model, given)
        self.run(check_frames, model, given)
        further = set(given) - {*OF_PIPELINES}
        if further and not self._failed:  # it takes seconds
            where = loading or {}
            revision = where.get("revision")
            config = where.get("config")
            self.run(check_names, model, sorted(further), revision=revision, config=config)
        if (how := self.run(lambda: LoadingOptions(**(loading or {})))) is not None:
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
