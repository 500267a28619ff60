"""What a demo model has from another: left out of the folder that ships."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from sdattn.models.demos import HOME

from .record import write_digests


def leave_out_what_is_lent(folder: Path, lent: Mapping[str, str]) -> None:
    """Leave the weights that another demo has out of a written folder, as it ships; what is left
    is read by ``sdattn.load_pipeline`` alone.

    Args:
        folder: of the model.
        lent: parts of the model, and the folders in sdattn/models that have their weights.
    """
    for part, source in lent.items():
        [own], [theirs] = (place.glob("*.safetensors") for place in (folder / part, HOME / source))
        weights, known = load_file(own), load_file(theirs)
        for name, one in weights.items():
            if name not in known or not torch.equal(one, known[name]):
                raise ValueError(
                    f"{own}: {name} is not that of {theirs}. It was made from another."
                )
        own.unlink()
    write_digests(folder)
