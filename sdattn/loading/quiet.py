"""Hiding irrelevant output of diffusers and transformers during loading."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_LORA = ("diffusers.loaders.peft", "diffusers.loaders.lora_base", "diffusers.utils.peft_utils")
_NOTICES = {  # text in a log line, and the loggers that print it
    # for each image processor that diffusers imports, whether or not the pipeline has it
    "requires torchvision (not installed)": ("transformers.utils.import_utils",),
    "should be kept in float32: []": ("diffusers.models.modeling_utils",),
    # a LoRA has nothing for one of the models, or errors that the loader reports itself
    "No LoRA keys associated": _LORA,
    "was unsuccessful with": _LORA,
    "led to unexpected keys": _LORA,
}


def quiet_libraries(*, prompts: bool = False, downloads: bool = True) -> None:
    """Disable the libraries' progress bars and warnings of unused parts; with ``prompts`` also all
    warnings of diffusers, which contain the text of every truncated prompt. Without ``downloads``
    also the progress of downloads."""
    from diffusers.utils import logging as of_diffusers
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        enable_progress_bars,
    )
    from transformers.utils import logging as of_transformers

    shows = downloads and not are_progress_bars_disabled()
    of_diffusers.disable_progress_bar()
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    if shows:  # both have disabled the hub's too
        enable_progress_bars()
    if prompts:
        of_diffusers.set_verbosity_error()


@contextmanager
def no_notices() -> Iterator[None]:
    """Hide the notices in :data:`_NOTICES`; everything else is printed."""

    def keep(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _NOTICES)

    with ExitStack() as undo:
        for name in set[str]().union(*_NOTICES.values()):
            undo.callback(logging.getLogger(name).removeFilter, keep)
            logging.getLogger(name).addFilter(keep)
        yield


@contextmanager
def only_errors() -> Iterator[None]:
    """Show no progress bar, and only errors in the log."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    with ExitStack() as undo:
        if of_diffusers.is_progress_bar_enabled():
            undo.callback(of_diffusers.enable_progress_bar)
            of_diffusers.disable_progress_bar()
        for log in (of_diffusers, of_transformers):
            undo.callback(log.set_verbosity, log.get_verbosity())
            log.set_verbosity_error()
        yield
