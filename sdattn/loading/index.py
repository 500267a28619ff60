"""The contents of a folder's ``model_index.json``, checked before diffusers reads it.

A model is data. diffusers would also run Python from the folder, import a module that the index
names, and read pickles, which run code: some of its versions without being asked to.
"""

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import InvalidValueError, SdattnError, is_out_of_memory
from ..files.terminal import shown
from .file_errors import said_by

if TYPE_CHECKING:
    from torch.nn import Module

_LIBRARIES = ("diffusers", "transformers")
_KINDS = {"ModelMixin", "PreTrainedModel", "SchedulerMixin", "BaseGuidance"}
_KINDS |= {"PreTrainedTokenizerBase", "FeatureExtractionMixin", "ImageProcessingMixin"}
_KINDS |= {"ProcessorMixin"}
_KERNELS = ("attn_implementation", "experts_implementation")  # only a kernel's name has a slash
MOST_LAYERS = 1_000  # of a kind in a model; the largest here have some 100
# Settings that say how many layers or blocks are built, one after the other
_LAYERS = re.compile(r"(?:layers?|depths?)(?:_|$)|num_\w*blocks?$")


def read_index(folder: Path, names: Collection[str]) -> dict[str, Any]:
    """Return a pipeline folder's ``model_index.json``; raise ValueError if it is not one or names
    classes from elsewhere than diffusers and transformers.

    Args:
        names: the folder's files, see :func:`files_in`; of a repository on the hub also those that
            are not fetched yet.
    """
    index = _object(folder / "model_index.json")
    parts = _parts_of(_pipeline_class(folder, names, index.get("_class_name")))
    for name, entry in index.items():
        match entry:
            case [str(library), str(kind)]:
                _check_part(folder, names, name, library, kind)
            case [None, None]:  # the pipeline was saved without it
                pass
            case _ if name in parts:
                raise InvalidValueError(
                    f"{folder / 'model_index.json'} has {shown(entry)} for its {name}, where a "
                    f'part is ["library", "class"]. {_ANEW}'
                )
    return index


def files_in(folder: Path) -> set[str]:
    """Return the files of a folder and of its parts, as ``unet/config.json``."""
    paths = [*folder.glob("*"), *folder.glob("*/*")]
    return {path.relative_to(folder).as_posix() for path in paths if path.is_file()}


def models_in(index: Mapping[str, Any]) -> dict[str, bool]:
    """Return the parts of a pipeline that are not left out, and whether each has weights."""
    parts = {}
    for name, entry in index.items():
        match entry:
            case [str(library), str(kind)]:
                cls = getattr(home_of(library), kind, None)
                # what needs a package that is missing has a stand-in: of models, none
                bases = {base.__name__ for base in getattr(cls, "__mro__", ())}
                parts[name] = bool(bases & {"ModelMixin", "PreTrainedModel"})
    return parts


@contextmanager
def named_errors(folder: Path) -> Iterator[None]:
    """Name the folder in libraries' errors over what its files hold. Errors of the disk and of
    memory pass through."""
    try:
        yield
    except (SdattnError, OSError, ImportError, Warning):
        raise
    except Exception as error:  # any error: the files say what the libraries do
        if is_out_of_memory(error):
            raise
        raise InvalidValueError(
            f"{folder} cannot be loaded: a settings or tokenizer file in it is broken, or of "
            f"another model ({type(error).__name__}: {said_by(error)}). {_ANEW}"
        ) from error


def as_dtype(dtype: object) -> dict[str, object]:
    """Return the option of ``from_pretrained``; diffusers before 0.40 ignores ``dtype``."""
    release = tuple(map(int, version("diffusers").split(".")[:2]))
    return {"dtype" if release >= (0, 40) else "torch_dtype": dtype}


def check_whole(folder: Path, models: "Mapping[str, Module]") -> None:
    """Raise ValueError, naming the first weight, for models that have no values for some."""
    for name, model in models.items():
        lost = [key for key, value in model.state_dict().items() if value.is_meta]
        if lost:
            raise InvalidValueError(
                f"The files of {folder / name} lack {len(lost)} of its weights, e.g. {lost[0]}. "
                f"{_ANEW}"
            )


def without_weights(cls: Any, folder: Path, device: str = "meta") -> Any | None:
    """Return a model from its ``config.json``, with random weights on any device but meta, or None
    for a class that holds several models and has no config."""
    import torch

    if hasattr(cls, "config_class"):  # from transformers
        config = cls.config_class.from_pretrained(folder)
        with torch.device(device):
            return cls(config)
    if not hasattr(cls, "load_config"):
        return None
    config = cls.load_config(folder)
    with torch.device(device):
        return cls.from_config(config)


def _object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{path} is not JSON ({error}). {_ANEW}") from None
    if not isinstance(document, dict):
        raise InvalidValueError(f"{path} holds a {type(document).__name__}, not an object. {_ANEW}")
    return document


_ANEW = "Get the model's folder again, or save it again with pipe.save_pretrained(folder)."


def _pipeline_class(folder: Path, names: Collection[str], name: object) -> Any:
    """Return the pipeline that an index names, a class of diffusers' own."""
    import diffusers

    path = folder / "model_index.json"
    if name is None:
        raise InvalidValueError(f"{path} has no _class_name, so it names no pipeline. {_ANEW}")
    if not isinstance(name, str):
        _refuse_code(path, f"_class_name={shown(name)}")
    cls = getattr(diffusers, name, None)
    if cls is diffusers.DiffusionPipeline or not _is_one_of(cls, {"DiffusionPipeline"}):
        raise InvalidValueError(
            f"{path} asks for a {shown(name)}, and diffusers {diffusers.__version__} has no "
            "pipeline of that name. Use a version of diffusers that has it."
        )
    if getattr(cls, "_load_connected_pipes", False):
        raise InvalidValueError(
            f"A {name} loads other models that its README names. Load those, each by itself."
        )
    if "None.py" in names:  # diffusers runs it as the code of custom_pipeline=None
        _refuse_code(folder, "None.py")
    return cls


def _parts_of(cls: Any) -> set[str]:
    """Return the names of a pipeline's parts; its other arguments are settings."""
    optional = getattr(cls, "_optional_components", [])
    parts = set[str]()
    for name, one in inspect.signature(cls.__init__).parameters.items():
        if name != "self" and (one.default is one.empty or name in optional):
            parts.add(name)
    return parts


def _check_part(folder: Path, names: Collection[str], name: str, library: str, kind: str) -> None:
    path = folder / "model_index.json"
    entry = f"{shown(name)}: [{shown(library)}, {shown(kind)}]"
    home = home_of(library)
    if not name.isidentifier() or home is None:
        _refuse_code(path, entry)
    part = folder / name
    if f"{name}/{library}.py" in names:  # diffusers prefers it to the library itself
        _refuse_code(part, f"{library}.py")
    cls = getattr(home, kind, None)  # diffusers reports a missing class
    if cls is not None and not _is_one_of(cls, _KINDS):
        _refuse_code(path, entry)
    if not any(file.startswith(f"{name}/") for file in names):
        raise InvalidValueError(f"{path} names a {name}, and there is no file in {part}. {_ANEW}")
    if f"{name}/adapter_config.json" in names:
        raise InvalidValueError(
            f"{part} holds an adapter (adapter_config.json), which names another model to load. "
            "Merge it (model.merge_and_unload()) and save the whole model."
        )
    _check_config(part / "config.json")
    _check_shards(part)


def _is_one_of(cls: object, kinds: set[str]) -> bool:
    """Check for a class of these kinds, or a stand-in that names the package it needs."""
    if not isinstance(cls, type):
        return False
    stands_in = "dummy" in cls.__module__ and not cls.__name__.startswith("Onnx")
    return stands_in or bool(kinds & {base.__name__ for base in cls.__mro__})


def home_of(library: str) -> Any:
    """Return the module where diffusers looks for a library's classes; None if it is foreign."""
    from diffusers import pipelines

    if library in _LIBRARIES:
        return import_module(library)
    module = getattr(pipelines, library, None)  # for example the safety checker's stable_diffusion
    is_its_own = getattr(module, "__name__", "") == f"{pipelines.__name__}.{library}"
    return module if is_its_own and isinstance(module, ModuleType) else None


def _check_config(config: Path) -> None:
    """Refuse a kernel from the hub, which is code, and numbers of layers that would fill memory."""
    for name, value in _pairs(_object(config)) if config.is_file() else ():
        if name.endswith(_KERNELS) and "/" in json.dumps(value):
            _refuse_code(config, f"{name}={shown(value)}")
        if _LAYERS.search(name) and _largest(value) > MOST_LAYERS:
            raise InvalidValueError(
                f"{config} has {name}={shown(value)}, and no model here has over {MOST_LAYERS:,} "
                f"layers or blocks. {_ANEW}"
            )


def _largest(value: object) -> float:
    """Return the largest number in a setting that may be a list of some; 0 without any."""
    numbers = [_largest(item) for item in value] if isinstance(value, list) else [value]
    return max((one for one in numbers if isinstance(one, (int, float))), default=0)


def _pairs(config: object) -> Iterator[tuple[str, object]]:
    if isinstance(config, dict):
        for name, value in config.items():
            yield name, value
            yield from _pairs(value)


def _check_shards(part: Path) -> None:
    """Refuse a list of shards that names pickles, or files elsewhere."""
    for index in part.glob("*.safetensors.*.json"):
        files = _object(index).get("weight_map")
        for file in files.values() if isinstance(files, dict) else [files]:
            if Path(str(file)).name != file or not file.endswith(".safetensors"):
                raise InvalidValueError(
                    f"{index} names {shown(file)}, which is not a .safetensors file next to it. "
                    f"{_ANEW}"
                )


def _refuse_code(where: Path, what: str) -> NoReturn:
    raise InvalidValueError(
        f"{where} asks for code that is not part of diffusers or transformers ({what}). Models are "
        "loaded as data here, and their code is not run. If you trust it, load the pipeline "
        "yourself and pass it to sdattn's functions."
    )
