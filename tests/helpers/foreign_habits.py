"""Habits of other projects' models, tiny and random, written after their code: learned null keys,
registers, a time token, tokens in a list, ids for images, a batch in one sequence.

Each keeps in ``seen``, by layer, the query and key of its attention, ``[B, heads, N, d]``, with the
scale, the image's queries and the text's keys, for an oracle.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

from .foreign import HEADS, WIDTH, KernelAttention, by_heads, tokens_of

ROWS, COLS, T, FRAMES = 4, 6, 7, 3
CELLS, HEAD = ROWS * COLS, WIDTH // HEADS
ALL, FIRST = slice(None), slice(0, T)


def merged(states: Tensor) -> Tensor:
    return states.transpose(1, 2).flatten(2)


def linears(number: int, out: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, out) for _ in range(number))


class Noting(nn.Module):
    """Base of the models: it notes what its attention got."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[Any, ...]] = {}

    def note(self, name: str, pair: Any, image: slice, text: slice, scale: float = HEAD**-0.5):
        self.seen.setdefault(name, (*pair, scale, image, text))


class Attention(nn.Module):
    """Attention written out: with ``nulls``, a learned first key; with ``is_cosine``, of unit
    vectors."""

    def __init__(self, nulls: bool = False, is_cosine: bool = False):
        super().__init__()
        self.q, self.k, self.v, self.o = linears(4)
        self.null = nn.Parameter(torch.randn(2, 1, 1, WIDTH)) if nulls else None
        self.is_cosine = is_cosine
        self.scale = 8 if is_cosine else HEAD**-0.5

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(context), self.v(context)
        if self.null is not None:
            null_k, null_v = (null.expand(len(x), -1, -1) for null in self.null)
            k, v = torch.cat([null_k, k], 1), torch.cat([null_v, v], 1)
        q, k, v = map(by_heads, (q, k, v))
        if self.is_cosine:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        self.last = q, k
        return self.o(merged((q @ k.mT * self.scale).softmax(-1) @ v))


class TwoWay(Noting):
    """SAM's decoder: learned output tokens before the prompt's; the image attends to both."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Embedding(5, WIDTH)
        names = ("self_attn", "token_to_image", "image_to_token")
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: Attention() for name in names}) for _ in range(2)
        )

    def forward(self, image_embeddings: Tensor, image_pe: Tensor, sparse: Tensor) -> Tensor:
        output = self.output.weight.expand(len(sparse), -1, -1)
        tokens, image = torch.cat([output, sparse], 1), tokens_of(image_embeddings)
        places = tokens_of(image_pe)
        for number, layer in enumerate(self.layers):
            tokens = tokens + layer["self_attn"](tokens, tokens)
            tokens = tokens + layer["token_to_image"](tokens, image + places)
            image = image + layer["image_to_token"](image + places, tokens)
            last = layer["image_to_token"].last
            self.note(f"layers.{number}.image_to_token", last, ALL, slice(5, None))
        return image


class PooledText(Noting):
    """imagen-pytorch: the text's mean is added to the image; tokens of time stand between a null
    key and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time = nn.Conv2d(4, WIDTH, 3, padding=1), nn.Linear(1, 2 * WIDTH)
        self.own, self.cross = Attention(True, True), Attention(True, True)

    def forward(self, x: Tensor, time: Tensor, *, text_embeds: Tensor) -> Tensor:
        image = tokens_of(self.conv(x)) + text_embeds.mean(1, keepdim=True)
        context = torch.cat([self.time(time[:, None]).unflatten(-1, (2, -1)), text_embeds], 1)
        image = image + self.cross(image, context)
        image = image + self.own(image, image)
        self.note("cross", self.cross.last, ALL, slice(3, None), 8)
        return image


class ImageOfIds(Noting):
    """muse-maskgit-pytorch: the image's codes are ids, and each block lists self- and
    cross-attention by number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(65, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(True, True), Attention(True, True)]) for _ in range(2)
        )

    def forward(self, x: Tensor, text_embeds: Tensor) -> Tensor:
        image = self.embed(x.flatten(1))
        for number, (own, cross) in enumerate(self.layers):
            image = image + cross(image, text_embeds)
            image = image + own(image, image)
            self.note(f"layers.{number}.1", cross.last, ALL, slice(1, None), 8)
        return image


class ChannelsFirst(Noting):
    """GLIDE: ids of the text, its last token in the embedding of time, its keys before the image's,
    heads folded into ``[B*heads, d, N]``, no linear layer after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pad = nn.Embedding(60, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.conv = nn.Conv2d(4, WIDTH, 1)
        self.qkv, self.text_kv = nn.Conv1d(WIDTH, 3 * WIDTH, 1), nn.Conv1d(WIDTH, 2 * WIDTH, 1)

    def forward(self, x: Tensor, timesteps: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        text = torch.where(mask[..., None], self.embed(tokens), self.pad)
        h = self.conv(x) + (timesteps[:, None] + text[:, -1])[:, :, None, None]
        folded = (len(x) * HEADS, -1, CELLS)
        q, k, v = self.qkv(h.flatten(2)).reshape(folded).split(HEAD, 1)
        text_k, text_v = self.text_kv(text.mT).reshape(*folded[:2], T).split(HEAD, 1)
        k, v = torch.cat([text_k, k], -1), torch.cat([text_v, v], -1)
        scale = HEAD**-0.25
        weight = einsum("bct,bcs->bts", q * scale, k * scale).softmax(-1)
        self.note("model", (one.mT.unflatten(0, (len(x), HEADS)) for one in (q, k)), ALL, FIRST)
        return h + einsum("bts,bcs->bct", weight, v).reshape(h.shape)


class Registers(Noting):
    """mmdit of lucidrains: registers between text and image, whose grid no argument tells."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.randn(3, WIDTH))
        self.qkv, self.o = linears(2, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, text_tokens: Tensor, image_tokens: Tensor, time_cond: Tensor) -> Tensor:
        image = torch.cat([self.registers.expand(len(image_tokens), -1, -1), image_tokens], 1)
        scale = 1 + time_cond[:, None]
        parts = self.qkv[0](text_tokens * scale), self.qkv[1](image * scale)
        q, k, v = map(by_heads, torch.cat(parts, 1).chunk(3, -1))
        self.note("model", (q, k), slice(T + 3, None), FIRST)
        return self.o(merged(F.scaled_dot_product_attention(q, k, v)))


class Lists(Noting):
    """Wan's own repository: a list of videos, a list of texts of their own lengths, both padded."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv3d(4, WIDTH, (1, 2, 2), (1, 2, 2))
        self.own, self.cross = Attention(), Attention()

    def forward(self, x: list[Tensor], t: Tensor, context: list[Tensor], seq_len: int) -> Tensor:
        videos = (tokens_of(self.patch(one[None]))[0] for one in x)
        video = torch.stack([F.pad(one, (0, 0, 0, seq_len - len(one))) for one in videos])
        text = torch.stack([F.pad(one, (0, 0, 0, T - len(one))) for one in context])
        video = video + self.cross(video * t[:, None, None], text)
        video = video + self.own(video, video)
        self.note("cross", self.cross.last, slice(0, FRAMES * CELLS), FIRST)
        return video


class TimeToken(Noting):
    """U-ViT and OmniGen: a token of time stands before the text, or behind it."""

    def __init__(self, order: str = "time text image"):
        super().__init__()
        self.patch, self.time, self.order = nn.Conv2d(4, WIDTH, 2, 2), nn.Linear(1, WIDTH), order
        self.attn = Attention()

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        time = self.time(timesteps[:, None])[:, None]
        parts = {"time": time, "text": context, "image": tokens_of(self.patch(x))}
        tokens = torch.cat([parts[name] for name in self.order.split()], 1)
        tokens = tokens + self.attn(tokens, tokens)
        text = slice(1, 1 + T) if self.order.startswith("time") else FIRST
        self.note("attn", self.attn.last, slice(1 + T, None), text)
        return tokens


class OneSequence(Noting):
    """PixArt's own repository: the texts of a batch in one sequence, and its images; a mask keeps
    them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, WIDTH, 2, 2)
        self.q, self.k, self.v, self.o = linears(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        image = tokens_of(self.patch(x))
        q = by_heads(self.q(image).reshape(1, -1, WIDTH))
        k, v = (by_heads(part(y).reshape(1, -1, WIDTH)) for part in (self.k, self.v))
        mask = torch.block_diag(*[torch.ones(CELLS, T)] * len(x)).bool()
        self.note("model", (q, k), ALL, ALL)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return image + self.o(merged(made).reshape(image.shape))


class ChannelsLast(Noting):
    """An image ``[B, rows, cols, channels]``, and a register before it that is a query too."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.register = nn.Linear(5, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.cross = KernelAttention()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        image = torch.cat([self.register.expand(len(x), -1, -1), self.proj(x.flatten(1, 2))], 1)
        image = image + self.cross(image, context)
        self.note("cross", self.cross.seen[-1], slice(1, None), ALL)
        return image


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text(batch: int) -> Tensor:
    return noise(batch, T, WIDTH, seed=1)


def image(batch: int, patch: int = 1) -> Tensor:
    return noise(batch, 4, patch * ROWS, patch * COLS)


def ids(batch: int) -> Tensor:
    """Ids of a text: a first, words, a last, padding."""
    return torch.tensor([[1, 20, 31, 42, 2, 0, 0], [1, 20, 2, 0, 0, 0, 0], [1, 9, 8, 7, 6, 5, 2]])[
        :batch
    ]


@dataclass(frozen=True)
class Habit:
    """A model, a call of so many images, the grid, and where its facts come from.

    Attributes:
        touch: changes the patch of the image in row 1 and column 2, in place.
        reach: cells that a patch reaches before the first attention.
        told: what is passed to ``inspect_attention``.
        refused: what a refusal says, by batch.
        is_told: whether the arguments tell the grid.
    """

    model: Callable[[], Noting]
    call: Callable[[int], dict[str, Any]]
    touch: Callable[[dict[str, Any]], object]
    grid: tuple[int, ...] = (ROWS, COLS)
    reach: int = 0
    told: dict[str, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    is_told: bool = True


def touched(name: str, patch: int = 1) -> Callable[[dict[str, Any]], object]:
    rows, cols = slice(patch, 2 * patch), slice(2 * patch, 3 * patch)
    return lambda given: given[name][..., rows, cols].add_(1)


HABITS = {
    "SAM": Habit(
        TwoWay,
        lambda b: {
            "image_embeddings": noise(b, WIDTH, ROWS, COLS),
            "image_pe": noise(1, WIDTH, ROWS, COLS, seed=3),
            "sparse": text(b),
        },
        touched("image_embeddings"),
        told={"text": "sparse"},
    ),
    "imagen-pytorch": Habit(
        PooledText,
        lambda b: {"x": image(b), "time": torch.rand(b), "text_embeds": text(b)},
        touched("x"),
        reach=1,
    ),
    "Muse": Habit(
        ImageOfIds,
        lambda b: {
            "x": torch.arange(b * CELLS).reshape(b, ROWS, COLS) % 60,
            "text_embeds": text(b),
        },
        touched("x"),
    ),
    "GLIDE": Habit(
        ChannelsFirst,
        lambda b: {
            "x": image(b),
            "timesteps": torch.rand(b),
            "tokens": ids(b),
            "mask": ids(b) > 0,
        },
        touched("x"),
        told={"text": "tokens"},
        refused={3: "which image each row belongs to"},
    ),
    "mmdit": Habit(
        Registers,
        lambda b: {
            "text_tokens": text(b),
            "image_tokens": noise(b, CELLS, WIDTH),
            "time_cond": noise(b, WIDTH, seed=2),
        },
        lambda given: given["image_tokens"][:, COLS + 2].add_(1),
        is_told=False,
    ),
    "Wan": Habit(
        Lists,
        lambda b: {
            "x": [noise(4, FRAMES, 2 * ROWS, 2 * COLS, seed=n) for n in range(b)],
            "t": torch.rand(b),
            "context": [noise(T - n, WIDTH, seed=9 + n) for n in range(b)],
            "seq_len": FRAMES * CELLS + 8,
        },
        lambda given: [one[:, 0, 2:4, 4:6].add_(1) for one in given["x"]],
        grid=(FRAMES, ROWS, COLS),
    ),
    "U-ViT": Habit(
        TimeToken,
        lambda b: {"x": image(b, 2), "timesteps": torch.rand(b), "context": text(b)},
        touched("x", 2),
    ),
    "OmniGen": Habit(
        lambda: TimeToken("text time image"),
        lambda b: {"x": image(b, 2), "timesteps": torch.rand(b), "context": text(b)},
        touched("x", 2),
    ),
    "PixArt": Habit(
        OneSequence,
        lambda b: {"x": image(b, 2), "y": text(b)},
        touched("x", 2),
        refused={3: "No cross or joint attention of the OneSequence fits"},
    ),
    "channels last": Habit(
        ChannelsLast,
        lambda b: {"x": noise(b, ROWS, COLS, 5), "context": text(b)},
        lambda given: given["x"][:, 1, 2].add_(1),
    ),
}


def truth(model: Noting) -> dict[str, Tensor]:
    """Return the mean over heads of each layer's softmax in float64, image to text, ``[B, N, T]``,
    by the first call."""
    found = {}
    for name, (query, key, scale, image, text) in model.seen.items():
        scores = query.double() @ key.double().mT * scale
        found[name] = scores.softmax(-1).mean(1)[:, image, text].detach()
    return found
