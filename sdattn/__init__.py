"""sdattn: where each word of a prompt went in a Stable Diffusion image.

pipe = sdattn.load_pipeline("demo")
run = sdattn.generate(pipe, "a red circle left of a blue square", seed=0)
run.heatmaps[0]["circle"].overlay(run.images[0])

with sdattn.capture(pipe) as store:                     # around any call of your own
    image = pipe("a red circle left of a blue square").images[0]
sdattn.heatmaps(store, pipe.tokenizer, "a red circle left of a blue square")
"""

from typing import TYPE_CHECKING, Any

from . import attention
from .attention import TorchAttnProcessor
from .capture import capture
from .folded import aggregate_attention
from .heatmap import Heatmap
from .heatmaps import Heatmaps, heatmaps
from .maps import CaptureError, CaptureWarning, MapStore
from .presets import PRESETS, Preset
from .store import AttentionStore
from .tokens import TruncationWarning, read_prompt

if TYPE_CHECKING:
    from . import batch, edit
    from .causes import Knockout, knockout
    from .comparison import diff
    from .explaining import explain
    from .files import load_run
    from .generation import generate
    from .pipelines import load_pipeline
    from .prompts import read_prompts
    from .runs import Run

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AttentionStore",
    "CaptureError",
    "CaptureWarning",
    "Heatmap",
    "Heatmaps",
    "Knockout",
    "MapStore",
    "Preset",
    "Run",
    "TorchAttnProcessor",
    "TruncationWarning",
    "aggregate_attention",
    "attention",
    "batch",
    "capture",
    "diff",
    "edit",
    "explain",
    "generate",
    "heatmaps",
    "knockout",
    "load_pipeline",
    "load_run",
    "read_prompt",
    "read_prompts",
]

_LATER = {
    "Knockout": "causes",
    "Run": "runs",
    "diff": "comparison",
    "explain": "explaining",
    "generate": "generation",
    "knockout": "causes",
    "load_pipeline": "pipelines",
    "load_run": "files",
    "read_prompts": "prompts",
}


def __getattr__(name: str) -> Any:
    """Load what draws or saves pictures only when it is used, so that the import stays light."""
    from importlib import import_module

    if name in ("batch", "edit"):
        return import_module(f".{name}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module 'sdattn' has no attribute {name!r}")
    return getattr(import_module(f".{_LATER[name]}", __name__), name)
