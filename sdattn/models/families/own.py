"""Your own models, whose attention is all :class:`sdattn.attention.MultiHeadAttention`."""

from collections.abc import Mapping

from torch import Tensor, nn

from ...attention import MultiHeadAttention
from ..denoiser_call import DenoiserCall, head_count
from ..family import Family
from ..layers import AttentionLayer, Kind
from ..pipeline import Given, Model


def is_own(model: Model) -> bool:
    """Check whether all attention of a model is :class:`MultiHeadAttention`."""
    if not isinstance(model, nn.Module) or hasattr(type(model), "attn_processors"):
        return False
    attention = [module for module in model.modules() if hasattr(module, "to_q")]
    return bool(attention) and all(isinstance(module, MultiHeadAttention) for module in attention)


class OwnModels(Family):
    """Models whose queries are a plain sequence: no argument of theirs tells the grid."""

    def recognises(self, model: Model) -> bool:
        return is_own(model)

    def find_layers(self, model: Model, modules: Mapping[str, nn.Module]) -> list[AttentionLayer]:
        own = [pair for pair in modules.items() if isinstance(pair[1], MultiHeadAttention)]
        return [self.describe(model, *pair) for pair in own]

    def describe(self, _model: Model, name: str, module: nn.Module) -> AttentionLayer:
        kind: Kind = "cross" if module.is_cross_attention else "self"
        return AttentionLayer(name, "block", kind, 0, head_count(module), module)

    def read_call(self, _model: Model, args: tuple[object, ...], kwargs: Given) -> DenoiserCall:
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        batch = len(next((value for value in given if value.ndim), [0]))
        return DenoiserCall(timestep=0.0, size=None, batch=batch, text=None)


FAMILIES = (
    OwnModels(
        name="custom models built from sdattn.attention.MultiHeadAttention",
        grid=lambda *_: (),  # never asked
    ),
)
