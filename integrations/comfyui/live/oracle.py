"""Maps by the softmax written out in float64, from the queries and keys that the core's attention
function was given, at places counted here once more.

Where text and image stand is checked another way too: by which queries and keys change when a
patch of the latent, or a token's state, changes.
"""

import math
from dataclasses import dataclass, field

import torch


@dataclass
class Seen:
    """One attention call of the core, copied."""

    query: torch.Tensor  # [B, heads, N, d]
    key: torch.Tensor
    mask: torch.Tensor | None
    options: dict
    call: int  # of the model


@dataclass
class Oracle:
    """An ``optimized_attention_override`` that keeps what it is given and changes nothing.

    Attributes:
        text_from: keys before the text, of captions of reference images.
        tokens: tokens of a joint call, if there are reference images; 0 for no such images.
    """

    inner: object = None
    text_from: int = 0
    tokens: int = 0
    seen: list = field(default_factory=list)
    calls: int = 0
    sigmas: object = None
    uuids: object = None

    def __deepcopy__(self, memo):
        return self

    def __call__(self, func, *args, **kwargs):
        self.keep(*args, **kwargs)
        return func(*args, **kwargs) if self.inner is None else self.inner(func, *args, **kwargs)

    def keep(self, q, k, v, heads, mask=None, *_, skip_reshape=False, **kwargs):
        options = kwargs["transformer_options"]
        if options["sigmas"] is not self.sigmas or options["uuids"] != self.uuids:
            self.calls += 1
            self.sigmas = options["sigmas"]
            self.uuids = options["uuids"]
        if not skip_reshape:
            q, k = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k))
        told = {
            name: options.get(name)
            for name in ("cond_or_uncond", "uuids", "block", "block_index", "block_type")
        }
        told["shape"] = list(options.get("activations_shape", ()))
        self.seen.append(Seen(q.clone(), k.clone(), mask, told, self.calls))

    def means(self, name, latent, texts, kind=0):
        """Return the means over calls and heads by place and grid, float64 ``[images, N, T]``.

        Args:
            name: of the model, in :data:`live.models.MODELS`.
            latent: shape of the latent, [B, C, rows, cols].
            texts: columns of the text of this kind; more, repeated, if batched with a longer one.
            kind: 0 for the positive text, 1 for the negative.
        """
        by_head = self.by_head(name, latent, texts, kind)
        return {key: maps.mean(1) for key, maps in by_head.items()}

    def by_head(self, name, latent, texts, kind=0):
        """Return the means over calls, ``[images, heads, N, T]``; see :meth:`means`."""
        found = {}
        for place, probs in self._calls(name, latent, texts, kind):
            if not place.text:
                continue
            shown = probs[..., place.text[0]].clone()
            for part in place.text[1:]:  # HiDream's second part of Llama
                shown[..., shown.shape[-1] - (part.stop - part.start) :] += probs[..., part]
            if shown.shape[-1] > texts:
                shown = shown.unflatten(-1, (-1, texts)).sum(-2)
            if shown.shape[-1] < texts:
                shown = torch.nn.functional.pad(shown, (0, texts - shown.shape[-1]))
            found.setdefault((place.name, place.grid), []).append(shown)
        return {key: torch.stack(maps).mean(0) for key, maps in found.items()}

    def self_attention(self, name, latent, texts):
        """Return the means over calls and heads of what the image attends to in itself."""
        found = {}
        for place, probs in self._calls(name, latent, texts, 0):
            if place.keys is not None and place.name not in ("down", "mid"):
                shown = probs[..., place.keys].mean(1)
                found.setdefault((place.name, place.grid), []).append(shown)
        return {key: torch.stack(maps).mean(0) for key, maps in found.items()}

    def _calls(self, name, latent, texts, kind):
        """Yield the place of each call that shows the image, and its queries' softmax."""
        order = {}
        for seen in self.seen:
            kinds = seen.options["cond_or_uncond"]
            if kind not in kinds:
                continue
            block = seen.call, str(seen.options["block"]), seen.options["block_index"]
            order[block] = order.get(block, 0) + 1
            if kind == 0 and self.tokens and seen.key.shape[2] != self.tokens:
                continue
            place = place_of(name, latent, seen, texts, order[block])
            if place is None:
                continue
            if kind == 0 and self.text_from:
                place.text = (slice(self.text_from, self.text_from + texts),)
            probs = softmax(seen)
            each = len(probs) // len(kinds)
            rows = slice(kinds.index(kind) * each, (kinds.index(kind) + 1) * each)
            yield place, probs[rows, :, place.queries]


@dataclass
class Place:
    """Where image and text stand in a call.

    Attributes:
        name, grid: as the recorder names them.
        queries: the image's.
        text: keys of the text; empty for a layer that sees the image alone.
        keys: the image's, or None.
    """

    name: str
    grid: tuple
    queries: slice
    text: tuple
    keys: slice | None


def softmax(seen):
    scores = seen.query.double() @ seen.key.double().mT / math.sqrt(seen.query.shape[-1])
    mask = seen.mask
    if mask is not None:
        if mask.ndim == 2:
            mask = mask[None, None]
        elif mask.ndim == 3:
            mask = mask[:, None]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask.double()
    scores = (scores - scores.amax(-1, keepdim=True)).exp()
    return scores / scores.sum(-1, keepdim=True)


def place_of(name, latent, seen, texts, number):
    """Return the place of a call, the ``number``-th of its block; None if it shows no image."""
    queries = seen.query.shape[2]
    keys = seen.key.shape[2]
    rows, cols = latent[-2:]
    half = (rows + 1) // 2, (cols + 1) // 2
    cells = half[0] * half[1]
    if name in ("sd15", "sdxl"):
        grid = tuple(seen.options["shape"][-2:])
        where = {"input": "down", "middle": "mid", "output": "up"}[seen.options["block"][0]]
        if number == 2 and keys % texts == 0:
            return Place(where, grid, slice(None), (slice(0, keys),), None)
        return Place(where, grid, slice(None), (), slice(None)) if number == 1 else None
    if name == "flux2_klein":
        half = (rows, cols)
        cells = rows * cols
    if queries != keys:
        return None
    if name == "hidream":
        llama = (keys - cells - 128) // 2
        if keys < cells + 128 or texts != 128 + llama:
            return None
        image = slice(0, cells)
        text = slice(cells, keys - llama), slice(keys - llama, keys)
        return Place("block", half, image, text, image)
    if name.startswith("z_image") or name == "lumina2":
        multiple = 1 if name == "lumina2" else 32
        padded = cells + -cells % multiple
        if keys < padded + texts:
            return None
        image = slice(keys - padded, keys - padded + cells)
        return Place("block", half, image, (slice(0, texts),), image)
    if keys < cells + texts:
        return None
    where = "double" if name == "sd3" else seen.options["block_type"]
    image = slice(texts, texts + cells)
    return Place(where or "block", half, image, (slice(0, texts),), image)
