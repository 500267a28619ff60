"""LoRAs (Hu et al. 2021) that a pipeline is loaded with, by diffusers and peft."""

import warnings
from typing import Any

from ..errors import OptionError
from .hub import needs_the_hub
from .loading_options import LoadingOptions
from .locating import find_lora
from .quiet import no_lora_notices


def check_takes_lora(kind: type, options: LoadingOptions) -> None:
    """Refuse LoRAs of a class of pipelines that diffusers loads none into.

    Raises:
        ValueError: there are some.
    """
    if options.lora and not hasattr(kind, "load_lora_weights"):
        text = "diffusers loads no LoRA into a {0}. Leave it out."
        raise OptionError("lora", options.lora[0], text, kind.__name__)


def load_loras(pipe: Any, options: LoadingOptions) -> None:
    """Load each LoRA as an adapter, and have them act together, each with its scale.

    Raises:
        ValueError: one of them is of another model: nothing in it belongs to this one.
        OSError: it cannot be had from the hub.
    """
    scales: dict[str, float] = {}
    for path, scale in options.adapters():
        name = f"lora_{len(scales)}"
        try:
            with no_lora_notices(), warnings.catch_warnings():
                # peft warns of a second one
                warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
                _load(pipe, path, name)
        except (ValueError, RuntimeError) as error:  # sizes of another model
            text = "it does not fit a {0}: {1}"
            raise OptionError("lora", path, text, type(pipe).__name__, error) from error
        if not any(name in held for held in pipe.get_list_adapters().values()):
            text = "nothing in it belongs to a {0}. It is the LoRA of another model."
            raise OptionError("lora", path, text, type(pipe).__name__)
        scales[name] = scale
    if scales:
        pipe.set_adapters([*scales], [*scales.values()])


def _load(pipe: Any, path: str, name: str) -> None:
    here = find_lora(path)
    given: dict[str, Any] = {"adapter_name": name, "use_safetensors": True}
    if here.is_file():
        pipe.load_lora_weights(str(here.parent), weight_name=here.name, **given)
    elif here.is_dir():
        pipe.load_lora_weights(str(here), **given)
    else:
        with needs_the_hub(f"the LoRA {path!r}, which is no file here,"):
            pipe.load_lora_weights(path, **given)
