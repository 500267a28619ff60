"""The query, key and value of a layer of joint attention: projected, normed, joined and rotated.

A two-stream layer (double) gets image and text separately and projects each with its own weights; a
one-stream layer (single) gets them joined.

Source: the processors of diffusers 0.42 for SD3, FLUX.1, FLUX.2 and Qwen-Image; Su et al. 2021,
"RoFormer", for rotary embeddings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidTypeError
from .core import heads_of, split_heads

FUSED_WITH_MLP = "to_qkv_mlp_proj"  # FLUX.2's parallel blocks: one projection for all
IMAGE = ("to_q", "to_k", "to_v", "to_qkv", "norm_q", "norm_k")
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "to_added_qkv", "norm_added_q", "norm_added_k")
# Parts of diffusers' layers that no processor of joint attention uses.
UNKNOWN_PARTS = ("spatial_norm", "group_norm", "norm_cross", "residual_connection")
Pair = tuple[Tensor, Tensor]


class Joined(NamedTuple):
    """Inputs of the softmax in a layer of joint attention.

    Attributes:
        query, key, value: ``[B, heads, S, d]``, for text and image.
        text: position of the text among them; None if the layer got them joined already.
        mlp: MLP input that a parallel block carries along, ``[B, S, width]``; else None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    text: slice | None
    mlp: Tensor | None = None


def check_layer(attn: Any) -> None:
    """Raise TypeError unless it is joint or self-attention of SD3, FLUX, FLUX.2 or Qwen-Image."""
    held = next((name for name in UNKNOWN_PARTS if getattr(attn, name, None)), None)
    if held is not None:
        raise unknown_layer(attn, f"has {held}")
    has_query = any(hasattr(attn, name) for name in ("to_q", "to_qkv", FUSED_WITH_MLP))
    if not hasattr(attn, "heads") or not has_query:
        raise unknown_layer(attn, "has no heads with projections to_q, to_k and to_v")


def unknown_layer(attn: Any, found: str) -> InvalidTypeError:
    return InvalidTypeError(
        "TorchJointProcessor computes the attention of SD3, FLUX.1, FLUX.2 and Qwen-Image; it "
        f"does not know a {type(attn).__name__} that {found}. Leave its own processor in "
        "place; capture() can watch it. For cross-attention use TorchAttnProcessor."
    )


def joined(
    attn: Any, hidden_states: Tensor, text_states: Tensor | None, rotary: Any = None
) -> Joined:
    """Project, norm, join and rotate; raise TypeError for another kind of layer or embeddings.

    The text comes first if there are rotary embeddings; without them the image, as in SD3.

    Args:
        attn: the layer.
        hidden_states: ``[B, N, C]`` of the image, or of text and image in one.
        text_states: ``[B, T, C_text]``, or None if the layer gets no separate text.
        rotary: (cos, sin), real ``[S, d]``, over all tokens, the text first; (image, text), complex
            ``[N, d/2]`` and ``[T, d/2]``; or None.
    """
    check_layer(attn)
    if hasattr(attn, FUSED_WITH_MLP):
        return _parallel(attn, hidden_states, rotary)
    has_own = getattr(attn, TEXT[1], None) is not None or hasattr(attn, TEXT[3])
    if has_own != (text_states is not None):
        found = "no text" if has_own else "text"
        raise unknown_layer(
            attn, f"is given {found} and has {'' if has_own else 'no '}projections for it"
        )
    image = _projected(attn, hidden_states, IMAGE)
    if text_states is None:
        return Joined(*_rotated_by(attn, image, rotary), text=None)
    text = _projected(attn, text_states, TEXT)
    n_text = text_states.shape[1]
    if rotary is None:
        cells = hidden_states.shape[1]
        return Joined(*_cat(image, text), text=slice(cells, cells + n_text))
    if _are_complex(rotary):  # separate for image and text
        of_image, of_text = rotary
        image = _rotated_pair(attn, image, of_image)
        text = _rotated_pair(attn, text, of_text)
        return Joined(*_cat(text, image), text=slice(0, n_text))
    return Joined(*_rotated_by(attn, _cat(text, image), rotary), text=slice(0, n_text))


Three = tuple[Tensor, Tensor, Tensor]  # query, key and value, [B, heads, S, d] each


def _parallel(attn: Any, hidden_states: Tensor, rotary: Any) -> Joined:
    made = getattr(attn, FUSED_WITH_MLP)(hidden_states)
    width = 3 * attn.inner_dim
    three = _by_head(attn, made[..., :width].chunk(3, dim=-1), IMAGE)
    return Joined(*_rotated_by(attn, three, rotary), text=None, mlp=made[..., width:])


def _projected(attn: Any, states: Tensor, names: tuple[str, ...]) -> Three:
    to_q, to_k, to_v, fused = names[:4]
    if getattr(attn, "fused_projections", False) and hasattr(attn, fused):
        parts = getattr(attn, fused)(states).chunk(3, dim=-1)
    else:
        parts = tuple(getattr(attn, name)(states) for name in (to_q, to_k, to_v))
    if len({part.shape for part in parts}) > 1:
        raise unknown_layer(attn, "has keys and values of fewer heads than its queries")
    return _by_head(attn, parts, names)


def _by_head(attn: Any, parts: tuple[Tensor, ...], names: tuple[str, ...]) -> Three:
    query, key, value = parts  # [B, S, heads*d] each
    norm_q, norm_k = (getattr(attn, name, None) for name in names[4:])
    query = heads_of(query, attn.heads, norm_q)
    key = heads_of(key, attn.heads, norm_k)
    return query, key, split_heads(value, attn.heads)


def _cat(first: Three, second: Three) -> Three:
    query, key, value = (torch.cat(pair, dim=2) for pair in zip(first, second, strict=True))
    return query, key, value


def _are_complex(rotary: object) -> bool:
    if not isinstance(rotary, tuple):
        return False
    return all(isinstance(part, Tensor) and part.is_complex() for part in rotary)


def _rotated_by(attn: Any, three: Three, rotary: Any) -> Three:
    """Rotate by real (cos, sin) ``[S, d]``, neighbouring features together."""
    if rotary is None:
        return three
    query, key, value = three
    shapes = [tuple(getattr(part, "shape", ())) for part in rotary]
    # diffusers' Attention, which has no head_dim, is rotated in other ways by other processors.
    if shapes != [tuple(query.shape[2:])] * 2 or not hasattr(attn, "head_dim"):
        raise unknown_layer(attn, f"is given rotary embeddings {shapes} for {list(query.shape)}")
    return rotate(query, *rotary), rotate(key, *rotary), value


def _rotated_pair(attn: Any, three: Three, turns: Tensor) -> Three:
    query, key, value = three
    if turns.shape != (query.shape[2], query.shape[3] // 2):
        found = f"is given rotary embeddings {list(turns.shape)} for {list(query.shape)}"
        raise unknown_layer(attn, found)
    return rotate_complex(query, turns), rotate_complex(key, turns), value


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features 2i and 2i+1 of ``[B, heads, S, d]`` in float32, by cos and sin ``[S, d]``."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)  # [B, heads, S, d/2] each
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos.to(x.device) + turned.float() * sin.to(x.device)).to(x.dtype)


def rotate_complex(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns.to(x.device)).flatten(3).to(x.dtype)
