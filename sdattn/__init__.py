"""sdattn: where each word of a prompt went in a Stable Diffusion image.

pipe = sdattn.load_pipeline("demo")
run = sdattn.generate(pipe, "a cat left of a pizza", seed=0)
run.heatmaps["cat"].overlay(run.image)

with sdattn.capture(pipe) as store:                     # around any call of your own
    image = pipe("a cat left of a pizza").images[0]
sdattn.heatmaps(store, pipe.tokenizer, "a cat left of a pizza")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .files.version import __version__ as __version__

if TYPE_CHECKING:
    from . import attention as attention
    from . import batch as batch
    from . import edit as edit
    from . import errors as errors
    from . import figures as figures
    from . import models as models
    from .attention import TorchAttnProcessor as TorchAttnProcessor
    from .attention import TorchJointProcessor as TorchJointProcessor
    from .control.attention_store import AttentionStore as AttentionStore
    from .control.knockouts import Knockout as Knockout
    from .control.knockouts import knockout as knockout
    from .edit.editing import edit_image as edit_image
    from .errors import CaptureError as CaptureError
    from .errors import NotFiniteError as NotFiniteError
    from .errors import SdattnError as SdattnError
    from .follow.passes import CaptureWarning as CaptureWarning
    from .loading.pipelines import load_pipeline as load_pipeline
    from .maps.by_place import aggregate_attention as aggregate_attention
    from .maps.capture import MapStore as MapStore
    from .maps.capture import capture as capture
    from .maps.from_stores import heatmaps as heatmaps
    from .maps.heatmap import Heatmap as Heatmap
    from .maps.heatmaps import Heatmaps as Heatmaps
    from .maps.presets import PRESETS as PRESETS
    from .maps.presets import Preset as Preset
    from .models.reading import read_prompts as read_prompts
    from .prompts.tokens import Prompt as Prompt
    from .prompts.tokens import TruncationWarning as TruncationWarning
    from .prompts.tokens import Word as Word
    from .prompts.tokens import read_pieces as read_pieces
    from .prompts.tokens import read_prompt as read_prompt
    from .runs.diff import diff as diff
    from .runs.diff.comparison import Comparison as Comparison
    from .runs.explaining import explain as explain
    from .runs.folder import SavedRun as SavedRun
    from .runs.folder import load_run as load_run
    from .runs.generation import generate as generate
    from .runs.imagerun import ImageRun as ImageRun
    from .runs.run import Run as Run
    from .unknown.inspection import inspect_attention as inspect_attention

# Module of each public name; "" is a module of this package. Loaded on first use, so that the
# import is light and the command line starts before torch does.
_PUBLIC = {
    "PRESETS": "maps.presets",
    "AttentionStore": "control.attention_store",
    "CaptureError": "errors",
    "CaptureWarning": "follow.passes",
    "Comparison": "runs.diff.comparison",
    "Heatmap": "maps.heatmap",
    "Heatmaps": "maps.heatmaps",
    "ImageRun": "runs.imagerun",
    "Knockout": "control.knockouts",
    "MapStore": "maps.capture",
    "NotFiniteError": "errors",
    "Preset": "maps.presets",
    "Prompt": "prompts.tokens",
    "Run": "runs.run",
    "SavedRun": "runs.folder",
    "SdattnError": "errors",
    "TorchAttnProcessor": "attention",
    "TorchJointProcessor": "attention",
    "TruncationWarning": "prompts.tokens",
    "Word": "prompts.tokens",
    "aggregate_attention": "maps.by_place",
    "attention": "",
    "batch": "",
    "capture": "maps.capture",
    "diff": "runs.diff",
    "edit": "",
    "edit_image": "edit.editing",
    "errors": "",
    "explain": "runs.explaining",
    "figures": "",
    "generate": "runs.generation",
    "heatmaps": "maps.from_stores",
    "inspect_attention": "unknown.inspection",
    "knockout": "control.knockouts",
    "load_pipeline": "loading.pipelines",
    "load_run": "runs.folder",
    "models": "",
    "read_pieces": "prompts.tokens",
    "read_prompt": "prompts.tokens",
    "read_prompts": "models.reading",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sdattn' has no attribute {name!r}")
    home = _PUBLIC[name]
    found = (
        getattr(import_module(f".{home}", __name__), name)
        if home
        else import_module(f".{name}", __name__)
    )
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names for completion, loaded or not."""
    return sorted((*_PUBLIC, "__version__"))
