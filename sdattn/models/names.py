"""`Names`: the names of the inputs of a model's ``forward``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of the inputs of a model's ``forward``.

    Attributes:
        latents: a tensor, or a list with one tensor per row.
        timestep: possible names; the first that is given counts.
        text: text states; "" if each row has states of its own.
        text_2: text states of a second encoder, whose columns follow the first one's; "" for none.
        skips: inputs that are set in the further passes of skip-layer guidance and the like.
    """

    latents: str = "hidden_states"
    timestep: tuple[str, ...] = ("timestep",)
    text: str = "encoder_hidden_states"
    text_2: str = ""
    skips: tuple[str, ...] = ("skip_layers",)
