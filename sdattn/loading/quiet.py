"""What diffusers and transformers print while they load, and what of it need not be seen."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


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
def no_torchvision_notices() -> Iterator[None]:
    """Without the notices that torchvision is missing, which transformers prints for each image
    processor that diffusers imports, whether or not the pipeline has it; all else is printed."""
    with _without("requires torchvision (not installed)", "transformers.utils.import_utils"):
        yield


@contextmanager
def no_lora_notices() -> Iterator[None]:
    """Keep away notices that a LoRA has nothing for a model, and those of errors and names that the
    caller tells itself."""
    loggers = "diffusers.loaders.peft", "diffusers.loaders.lora_base"
    texts = ("No LoRA keys associated", "was unsuccessful with", "led to unexpected keys")
    with ExitStack() as undo:
        for text in texts:
            undo.enter_context(_without(text, *loggers, "diffusers.utils.peft_utils"))
        yield


@contextmanager
def no_cast_notices() -> Iterator[None]:
    """Without the notice that no module is kept in float32."""
    with _without("should be kept in float32: []", "diffusers.models.modeling_utils"):
        yield


@contextmanager
def _without(text: str, *loggers: str) -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logs = [logging.getLogger(name) for name in loggers]
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
