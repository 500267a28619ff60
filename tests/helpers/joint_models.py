"""Tiny transformers of the families with joint attention, and what they are called with."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from helpers.transformer_rows import flux, klein, qwen_image, sd3
from sdattn import capture

MODELS = {"SD3": sd3, "FLUX.1": flux, "FLUX.2": klein, "Qwen-Image": qwen_image}
N_TEXT, ROWS, COLS = 7, 3, 5


def inputs(kind, model, dtype=torch.float32, rows=ROWS, cols=COLS):
    """What the model is called with, one image of rows x cols patches and 7 tokens."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    width = model.config.joint_attention_dim
    given = {"encoder_hidden_states": noise(1, N_TEXT, width), "timestep": torch.tensor([0.5])}
    ids = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(cols)).float()
    if kind == "SD3":
        pooled = noise(1, model.config.pooled_projection_dim)
        image = noise(1, 4, 2 * rows, 2 * cols)
        return {**given, "hidden_states": image, "pooled_projections": pooled}
    given["hidden_states"] = noise(1, rows * cols, 16)
    if kind == "FLUX.1":
        given |= {"img_ids": ids, "txt_ids": torch.zeros(N_TEXT, 3)}
        given |= {"pooled_projections": noise(1, 32), "guidance": torch.ones(1)}
    elif kind == "FLUX.2":
        ids = torch.cat([ids, torch.zeros(len(ids), 1)], dim=1)[None]
        given |= {"img_ids": ids, "txt_ids": torch.zeros(1, N_TEXT, 4), "guidance": None}
    else:
        given["img_shapes"] = [[(1, rows, cols)]]
    return given


def first_map(model, given, **options):
    """Of the first layer, in which a token's query and key depend on that token alone."""
    with capture(model, **options) as store:
        model(**given)
    return next(iter(store.maps.values()))[0]  # [rows, cols, tokens]


class Attending(TorchFunctionMode):
    """Another attention in the place of torch's."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func, types, args=(), kwargs=None):
        attends = func is scaled_dot_product_attention
        return (self.attend if attends else func)(*args, **(kwargs or {}))


def attending(kind, attend):
    """A processor of diffusers with another attention, called ``Odd``."""

    class Odd(kind):
        def __call__(self, *args, **kwargs):
            with Attending(attend):
                return super().__call__(*args, **kwargs)

    return Odd()
