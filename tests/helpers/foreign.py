"""Models in the manner of other projects' code, tiny and random, that know nothing of sdattn.

Each is called as ``model(latents, ..., text)`` and keeps, in ``model.seen``, the query and key of
its attention as it had them, ``[B, heads, N, d]`` and ``[B, heads, T, d]``, for an oracle.
"""

import math

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

HEADS, WIDTH = 2, 16


def tokens_of(latents: Tensor) -> Tensor:
    """``[B, C, (frames,) rows, cols]`` to ``[B, N, C]``."""
    return latents.flatten(2).transpose(1, 2)


def by_heads(states: Tensor) -> Tensor:
    """``[B, N, heads*d]`` to ``[B, heads, N, d]``."""
    return states.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class EinsumAttention(nn.Module):
    """CompVis' manner: heads folded into the rows, einsum, softmax, einsum."""

    def __init__(self, text_width: int = WIDTH, heads_first: bool = False):
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_k = nn.Linear(text_width, WIDTH, bias=False)
        self.to_v = nn.Linear(text_width, WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))
        self.heads_first = heads_first
        self.seen: list[tuple[Tensor, Tensor]] = []

    def folded(self, states: Tensor) -> Tensor:
        split = by_heads(states)
        return (split.transpose(0, 1) if self.heads_first else split).flatten(0, 1)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        self.seen.append((by_heads(q), by_heads(k)))
        q, k, v = map(self.folded, (q, k, v))
        sim = einsum("b i d, b j d -> b i j", q, k) * (WIDTH // HEADS) ** -0.5
        out = einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
        if self.heads_first:
            out = out.unflatten(0, (HEADS, -1)).transpose(0, 1)
        else:
            out = out.unflatten(0, (-1, HEADS))
        return self.to_out(out.transpose(1, 2).flatten(2))


class CompVisUNet(nn.Module):
    """A UNet of two resolutions with self- and cross-attention in each."""

    def __init__(self, heads_first: bool = False):
        super().__init__()
        self.conv_in = nn.Conv2d(4, WIDTH, 3, padding=1)
        names = ("down", "mid", "up")
        self.attn1 = nn.ModuleDict({n: EinsumAttention(WIDTH, heads_first) for n in names})
        self.attn2 = nn.ModuleDict({n: EinsumAttention(WIDTH, heads_first) for n in names})
        self.conv_out = nn.Conv2d(WIDTH, 4, 3, padding=1)

    def attended(self, name: str, h: Tensor, context: Tensor) -> Tensor:
        x = tokens_of(h)
        x = x + self.attn1[name](x)
        x = x + self.attn2[name](x, context)
        return x.transpose(1, 2).unflatten(2, h.shape[2:])

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        h = self.conv_in(x) + timesteps.view(-1, 1, 1, 1) / 1000
        h = self.attended("down", h, context)
        inner = self.attended("mid", F.avg_pool2d(h, 2), context)
        h = h + F.interpolate(inner, size=h.shape[2:])
        return self.conv_out(self.attended("up", h, context))

    @property
    def seen(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        return {f"attn2.{name}": part.seen for name, part in self.attn2.items()}


def rotated(states: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of ``[B, heads, S, d]``, a pair at a time."""
    even, odd = states[..., ::2], states[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, -1).flatten(-2)


class JointBlock(nn.Module):
    """A double block in Black Forest Labs' manner: the block itself calls the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.img_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.txt_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.img_proj = nn.Linear(WIDTH, WIDTH)
        self.txt_proj = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, img: Tensor, txt: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        parts = zip(self.txt_qkv(txt).chunk(3, -1), self.img_qkv(img).chunk(3, -1), strict=True)
        q, k, v = (torch.cat([by_heads(t), by_heads(i)], dim=2) for t, i in parts)
        q, k = rotated(q, angles), rotated(k, angles)
        self.seen.append((q, k))
        made = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        txt_made, img_made = made[:, : txt.shape[1]], made[:, txt.shape[1] :]
        return img + self.img_proj(img_made), txt + self.txt_proj(txt_made)


class JointTransformer(nn.Module):
    """Two double blocks over packed latents ``[B, N, C]`` with positions by ids ``[B, N, 3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in = nn.Linear(4, WIDTH)
        self.txt_in = nn.Linear(WIDTH, WIDTH)
        self.double_blocks = nn.ModuleList(JointBlock() for _ in range(2))
        self.final = nn.Linear(WIDTH, 4)

    def forward(self, img: Tensor, img_ids: Tensor, txt: Tensor, txt_ids: Tensor) -> Tensor:
        ids = torch.cat([txt_ids, img_ids], dim=1).sum(-1)[:, None, :, None]
        angles = ids / 10 ** torch.arange(WIDTH // HEADS // 2)
        img, txt = self.img_in(img), self.txt_in(txt)
        for block in self.double_blocks:
            img, txt = block(img, txt, angles)
        return self.final(img)

    @property
    def seen(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        return {f"double_blocks.{i}": block.seen for i, block in enumerate(self.double_blocks)}


class Decoder(nn.Module):
    """torch's own decoder layer, over patches; its attention is ``nn.MultiheadAttention``."""

    def __init__(self, norm_first: bool = True):
        super().__init__()
        self.proj_in = nn.Linear(4, WIDTH)
        self.layer = nn.TransformerDecoderLayer(
            WIDTH, HEADS, 32, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.proj_out = nn.Linear(WIDTH, 4)
        self.seen_states: list[tuple[Tensor, Tensor]] = []
        self.layer.multihead_attn.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module: nn.Module, args: tuple[Tensor, ...], _kwargs: object) -> None:
        self.seen_states.append((args[0], args[1]))

    def forward(self, sample: Tensor, memory: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.layer(self.proj_in(tokens_of(sample)), memory, memory_key_padding_mask=padding)
        return self.proj_out(x).transpose(1, 2).unflatten(2, sample.shape[2:])

    @property
    def seen(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        attn = self.layer.multihead_attn
        (wq, wk, _), (bq, bk, _) = attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3)
        pairs = [(by_heads(x @ wq.T + bq), by_heads(m @ wk.T + bk)) for x, m in self.seen_states]
        return {"layer.multihead_attn": pairs}


class FusedAttention(nn.Module):
    """timm's manner: one projection makes query, key and value of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        self.seen.append((q, k))
        attn = ((q * (WIDTH // HEADS) ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class InContext(nn.Module):
    """U-ViT's manner: the image's tokens first, then the text's, in one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(FusedAttention() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        image = self.patch(tokens_of(x))
        tokens = torch.cat([image, context], dim=1)
        for block in self.blocks:
            tokens = tokens + block(tokens)
        image = self.head(tokens[:, : image.shape[1]])
        return image.transpose(1, 2).unflatten(2, x.shape[2:])

    @property
    def seen(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        return {f"blocks.{i}": block.seen for i, block in enumerate(self.blocks)}


class KernelAttention(nn.Module):
    """Attention by torch's kernel, to itself or to a context."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = by_heads(self.q(x)), by_heads(self.k(context)), by_heads(self.v(context))
        self.seen.append((q, k))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VideoTransformer(nn.Module):
    """A video as one sequence, ``[B, C, frames, rows, cols]``: self- and cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.self_attn, self.cross_attn = KernelAttention(), KernelAttention()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, latents: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = self.patch(tokens_of(latents))
        x = x + self.self_attn(x, x)
        x = x + self.cross_attn(x, encoder_hidden_states)
        return self.head(x).transpose(1, 2).unflatten(2, latents.shape[2:])

    @property
    def seen(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        return {"cross_attn": self.cross_attn.seen}


class FewerQueries(nn.Module):
    """PRX's manner: the image attends to text and image, the text to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.attn = KernelAttention()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, latents: Tensor, txt: Tensor) -> Tensor:
        x = self.patch(tokens_of(latents))
        x = x + self.attn(x, torch.cat([txt, x], dim=1))
        return self.head(x).transpose(1, 2).unflatten(2, latents.shape[2:])

    @property
    def seen(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        return {"attn": self.attn.seen}


def softmax64(query: Tensor, key: Tensor) -> Tensor:
    """The mean over heads of the softmax written out in float64, ``[B, N, T]``."""
    scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    return scores.softmax(-1).mean(1)
