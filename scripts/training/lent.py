"""What a demo model has from the first: left out of the folder that ships."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .record import write_digests


def leave_out_what_is_lent(folder: Path, demo: Path, lent: Mapping[str, str]) -> None:
    """Leave the weights that the first demo has out of a written folder, as it ships; what is left
    is read by ``sdattn.load_pipeline`` alone.

    Args:
        folder: of the model.
        demo: of the first demo model.
        lent: parts of the model, and the parts of the first demo that have their weights.
    """
    for part, source in lent.items():
        [own], [theirs] = (place.glob("*.safetensors") for place in (folder / part, demo / source))
        weights, known = load_file(own), load_file(theirs)
        for name in weights.keys() & known.keys():
            if not torch.equal(weights[name], known[name]):
                raise ValueError(
                    f"{own}: {name} is not that of {theirs}. It was made from another."
                )
        own.unlink()
        if left := {name: one for name, one in weights.items() if name not in known}:
            save_file(left, own, metadata={"format": "pt"})
    write_digests(folder)
