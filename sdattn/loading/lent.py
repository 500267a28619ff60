"""Parts of the demo models that share their weights with another demo."""

from typing import Any

from ..models.demos import HOME, folder_name
from .folder import PipelineFolder
from .index import home_of, without_weights

# Parts of a demo, and the folders that hold their weights
LENT = {"demo-video": {part: f"demo/{part}" for part in ("vae", "text_encoder", "unet")}}


def lent_parts(folder: PipelineFolder, dtype: Any) -> dict[str, object]:
    """Return the parts of a demo whose weights another demo has, on the CPU; no parts for any
    other folder."""
    import torch
    from safetensors.torch import load_file

    found = {}
    for part, source in LENT.get(folder_name(folder.path) or "", {}).items():
        library, kind = folder.index[part]
        model: Any = without_weights(getattr(home_of(library), kind), folder.path / part, "cpu")
        [file] = (HOME / source).glob("*.safetensors")
        weights = load_file(file)
        names = {name: name for name in model.state_dict()}
        # the files have a text encoder's prefix; transformers 5 dropped it for some
        names |= {name: before for name in names if (before := f"text_model.{name}") in weights}
        model.load_state_dict({name: weights[saved] for name, saved in names.items()})
        found[part] = torch.nn.Module.to(model.eval(), dtype)  # diffusers' own method warns
    return found
