"""What diffusers and transformers print while they load, and what of it need not be seen."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LORA = ("diffusers.loaders.peft", "diffusers.loaders.lora_base", "diffusers.utils.peft_utils")
_NOTICES = {  # what a line in the log has, and the loggers that print it
    # for each image processor that diffusers imports, whether or not the pipeline has it
    "requires torchvision (not installed)": ("transformers.utils.import_utils",),
    "should be kept in float32: []": ("diffusers.models.modeling_utils",),
    # a LoRA has nothing for one of the models, or errors that the loader tells itself
    "No LoRA keys associated": _LORA,
    "was unsuccessful with": _LORA,
    "led to unexpected keys": _LORA,
}


def quiet_libraries(*, prompts: bool = False) -> None:
    """No progress bars of the libraries and no warnings of parts that are not used here; with
    ``prompts`` also none of diffusers, which has the text of every prompt that it cuts off."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    of_diffusers.disable_progress_bar()
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    if prompts:
        of_diffusers.set_verbosity_error()


@contextmanager
def no_notices() -> Iterator[None]:
    """Keep away the notices in :data:`_NOTICES`; everything else is printed."""

    def keep(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _NOTICES)

    logs = {logging.getLogger(name) for names in _NOTICES.values() for name in names}
    for log in logs:
        log.addFilter(keep)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(keep)


@contextmanager
def only_errors() -> Iterator[None]:
    """No progress bar, and only errors in the log: loading reports the same again."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    logs = (of_diffusers, of_transformers)
    before = [log.get_verbosity() for log in logs]
    bars = of_diffusers.is_progress_bar_enabled()
    try:
        of_diffusers.disable_progress_bar()
        for log in logs:
            log.set_verbosity_error()
        yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.set_verbosity(level)
        if bars:
            of_diffusers.enable_progress_bar()
