"""Modular pipelines of the parts of a classic one."""

from typing import Any

from helpers.newer import newer


def modular(classic: Any, name: str, **settings: Any) -> Any:
    """Return the modular pipeline of a name with a classic pipeline's own parts.

    Args:
        classic: its models, tokenizers and scheduler are shared.
        name: of the class.
        settings: of its guider.
    """
    pipe = newer(name)()
    parts = {part: held for part, held in classic.components.items() if held is not None}
    pipe.update_components(**{part: parts[part] for part in parts if part in pipe.component_names})
    for setting, value in settings.items():
        setattr(pipe.guider, setting, value)
    return pipe
