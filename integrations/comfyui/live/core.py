"""ComfyUI's core from a folder, on the CPU, and the nodes of ``integrations/comfyui`` in it."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

NODES = Path(__file__).parents[1]
# What the core's modules name but this script never runs: image and sound processing.
STAND_INS = (
    "torchvision",
    "torchvision.models",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchaudio",
    "torchaudio.functional",
    "torchaudio.transforms",
    "kornia",
    "spandrel",
)


def load(folder, device="cpu"):
    """Put the core on the path and import it; return the package of our nodes.

    Packages that cannot be installed beside a CPU build of torch are stood in for by empty modules.
    """
    folder = str(Path(folder).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
        from diffusers import StableDiffusionPipeline  # noqa: F401  (before the stand-ins)

        stood_in = [name for name in STAND_INS if _stand_in(name)]
        if stood_in:
            print(f"stood in for: {', '.join(name for name in stood_in if '.' not in name)}")
        argv = sys.argv
        sys.argv = argv[:1]
        import comfy.cli_args

        comfy.cli_args.args.cpu = device == "cpu"
        sys.argv = argv
        import comfy.sample
        import comfy.samplers
        import comfy.sd
    return nodes()


def nodes():
    """Import our nodes as ComfyUI imports a folder of custom_nodes."""
    name = "sdattn_nodes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, NODES / "__init__.py", submodule_search_locations=[str(NODES)]
        )
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def version():
    import comfyui_version

    return comfyui_version.__version__


def _stand_in(name):
    """Make an empty module unless there is a real one; return whether it was made."""
    parent, _, child = name.rpartition(".")
    is_made = isinstance(sys.modules.get(parent), _StandIn)
    if not is_made and importlib.util.find_spec(name) is not None:
        return False
    module = sys.modules[name] = _StandIn(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    if parent:
        setattr(sys.modules[parent], child, module)
    return True


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
