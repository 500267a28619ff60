"""The header of a ``.safetensors`` file, checked before anything is made from its tensors."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import AccessError, InvalidValueError, SdattnError, is_out_of_memory
from ..files.terminal import shorter, shown, visible

# diffusers compares each block's name with every name: far above any model, less than a minute
_MOST = 20_000
_MOST_BLOCKS = 2_000
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_WHOLE = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"}
_WEIGHTS = ("weight", "bias", "embedding", "projection")  # others may be integers: position_ids
_TO_PROGRAMMERS = re.compile(r"\. (?:If you want|For more information|Please) ")  # advice to cut
_SCALES = ("scaled_fp8", ".scale_weight", ".weight_scale")  # scales of 8-bit weights


@dataclass(frozen=True)
class Entry:
    """A tensor in a file's header: safetensors' name for its dtype, ``"F16"``, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        """Check whether the values are floating-point numbers."""
        return self.dtype in _FLOATS


@dataclass(frozen=True)
class WeightFile:
    """The header of a file: each tensor by its name, and the unchecked metadata."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    def told(self) -> str:
        """Return the number of tensors and the name of one, for messages."""
        name = next(iter(self.entries), None)
        return f"{len(self.entries)} tensors" + (f", {shown(name)} for one" if name else "")


def read_weights(path: Path) -> WeightFile:
    """Read the header; raise ValueError if the file is not a whole ``.safetensors`` file, or has
    more tensors than any model, or an unsupported dtype."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix != ".safetensors":  # diffusers decides by it how to read the file
            raise SafetensorError("its name does not end in .safetensors")
        with safe_open(path, framework="pt") as file:
            number = len(file.keys())
            if not 0 < number <= _MOST:
                text = f"{number:,} tensors, more than any model has" if number else "no tensor"
                raise InvalidValueError(
                    f"{path} holds {text}. Get the file again, or pass another one."
                )
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            entries = {
                name: Entry(part.get_dtype(), tuple(part.get_shape()))
                for name, part in parts.items()
            }
            weights = WeightFile(path, entries, file.metadata() or {})
    except OSError as error:
        raise AccessError(f"{path} cannot be read: {visible(str(error))}") from error
    except SafetensorError as error:
        raise InvalidValueError(
            f"{path} is not a complete .safetensors file "
            f"({shorter(visible(str(error)), 200)}). Get it again. Pickled "
            "checkpoints are not read, since they can run code; convert them to safetensors first."
        ) from error
    _check_kinds(weights)
    return weights


@contextmanager
def loading_errors(path: str | Path, what: str, advice: str) -> Iterator[None]:
    """Turn library errors over a file's content into a ValueError that says what it was loaded as,
    ``"a StableDiffusionPipeline"``, and what to do; other errors pass through."""
    try:
        yield
    except (SdattnError, ImportError, MemoryError, Warning):
        raise
    except Exception as error:  # any error, including IndexError, TypeError and torch's
        if is_out_of_memory(error):
            raise
        said = said_by(error)
        raise InvalidValueError(f"{path} cannot be loaded as {what}: {said}. {advice}") from error


def said_by(error: BaseException) -> str:
    """Return a library error's message in one line, with its class if the message is unclear."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    text = shorter(visible(_TO_PROGRAMMERS.split(text)[0]), 240).rstrip(".")
    if not isinstance(error, (ValueError, RuntimeError, OSError)) or not text:
        text = f"{type(error).__name__} {text}".strip()
    return f"{text} ({said_by(error.__cause__)})" if error.__cause__ else text


def _check_kinds(found: WeightFile) -> None:
    names = [name for name in found.entries if not name.startswith("model_ema.")]
    blocks = {tuple(name.split(".", 4)[:4]) for name in names}
    if len(blocks) > _MOST_BLOCKS:
        raise InvalidValueError(
            f"{found.path} names {len(blocks):,} blocks, more than any model has "
            f"(e.g. {shown(names[-1])}). Get the file again, or pass another one."
        )
    for name, entry in found.entries.items():
        if not entry.is_float and (entry.dtype not in _WHOLE or name.endswith(_WEIGHTS)):
            raise InvalidValueError(
                f"{found.path} holds {shown(name)} as {entry.dtype}, but weights must be floats of "
                "8 to 64 bits. Convert the file first."
            )
        if name.endswith(_SCALES):
            raise InvalidValueError(
                f"{found.path} holds 8-bit weights with scales next to them ({shown(name)}), "
                "which diffusers would ignore. Pass the checkpoint in 16 bits."
            )
