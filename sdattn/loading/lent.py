from typing import Any

from ..models.demos import DEMO, folder_name
from .folder import PipelineFolder
from .index import without_weights

# Parts of a demo, and the parts of the first demo that hold their weights
LENT = {
    "demo-mmdit": {"vae": "vae", "text_encoder": "text_encoder", "text_encoder_2": "text_encoder"},
    "demo-video": {"vae": "vae", "text_encoder": "text_encoder", "unet": "unet"},
}


def lent_parts(folder: PipelineFolder, dtype: Any) -> dict[str, object]:
    """Return the parts of a demo whose weights the first demo has, on the CPU; none for other
    folders. The demo's own files hold configurations, and the MM-DiT's projections of text."""
    import diffusers
    import torch
    import transformers
    from safetensors.torch import load_file

    found, libraries = {}, {"diffusers": diffusers, "transformers": transformers}
    for part, source in LENT.get(folder_name(folder.path) or "", {}).items():
        library, kind = folder.index[part]
        model: Any = without_weights(getattr(libraries[library], kind), folder.path / part, "cpu")
        files = [
            *(DEMO / source).glob("*.safetensors"),
            *(folder.path / part).glob("*.safetensors"),
        ]
        weights = {name: one for file in files for name, one in load_file(file).items()}
        names = {name: name for name in model.state_dict()}
        # the files have a text encoder's prefix; transformers 5 dropped it for some
        names |= {name: before for name in names if (before := f"text_model.{name}") in weights}
        model.load_state_dict({name: weights[saved] for name, saved in names.items()})
        found[part] = torch.nn.Module.to(model.eval(), dtype)  # diffusers' own method warns
    return found
