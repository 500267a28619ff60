"""ComfyUI's side of its attention override, written from facts read in 0.3.64 and 0.10.

The attention function hands its call to ``optimized_attention_override``. ``transformer_options``
has ``cond_or_uncond``, ``uuids``, ``sigmas`` and, by model, ``block``, ``block_index`` and
``activations_shape`` (a UNet), ``block_type`` and ``block_index`` (FLUX), or nothing more. Clones
of a patcher copy its options deeply; conditionings of other lengths in one batch are repeated.
"""

import copy
import math
import uuid
from dataclasses import dataclass, field

import torch
from torch.nn.functional import avg_pool2d, interpolate, scaled_dot_product_attention

HEADS, WIDTH = 2, 16


def attention(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, transformer_options=None
):
    """The function as models call it; what it is handed is kept in ``transformer_options``."""
    options = transformer_options or {}
    kept = (options, q, k, mask, skip_reshape)
    options.get("told", []).append((*kept[1:], {n: x for n, x in options.items() if n != "told"}))
    override = options.get("optimized_attention_override")
    told = {"skip_reshape": skip_reshape, "transformer_options": options}
    if override is not None:
        return override(plain, q, k, v, heads, mask=mask, attn_precision=attn_precision, **told)
    return plain(q, k, v, heads, mask, skip_reshape=skip_reshape)


def by_head(x, skip_reshape):
    return x if skip_reshape else x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def plain(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, **_):
    q, k, v = (by_head(x, skip_reshape) for x in (q, k, v))
    mask = mask[:, None] if mask is not None and mask.ndim == 3 else mask
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def weights(seed, n=WIDTH, dtype=torch.float32):
    """A matrix that spreads scores, so that maps are far from flat."""
    made = torch.randn(n, n, generator=torch.Generator().manual_seed(seed))
    return (made * 3 / math.sqrt(n)).to(dtype)


class UNet:
    """Two levels down, the middle, two levels up; self- and cross-attention in each block."""

    blocks = (("input", 1), ("input", 2), ("middle", 0), ("output", 0), ("output", 3))
    levels = (0, 1, 2, 1, 0)

    def __call__(self, x, context, options, mask=None):
        size = x.shape[-2:]
        for number, (block, level) in enumerate(zip(self.blocks, self.levels, strict=True)):
            grid = size
            for _ in range(level):
                grid = [(side + 1) // 2 for side in grid]
            x = interpolate(x, size=tuple(grid), mode="nearest")
            options["block"], options["block_index"] = block, 0
            options["activations_shape"] = list(x.shape)
            tokens = x.flatten(2).mT
            for kind, source in enumerate((tokens, context)):
                q, k, v = tokens, source @ weights(9 * number + kind, dtype=x.dtype), source
                given = {"mask": mask if kind else None, "transformer_options": dict(options)}
                tokens = tokens + attention(q, k, v, HEADS, **given)
            x = tokens.mT.unflatten(2, tuple(grid))
        return interpolate(x, size=size, mode="nearest")


@dataclass
class Flux:
    """Two double blocks and two single ones over [text, image], 2x2 cells of the latent a token."""

    named: bool = True
    types: tuple = (("double", 0), ("double", 1), ("single", 0), ("single", 1))

    def __call__(self, x, context, options, mask=None):
        size = x.shape[-2:]
        image = avg_pool2d(x, 2, ceil_mode=True)
        tokens = torch.cat([context, image.flatten(2).mT], 1)
        for number, (block_type, index) in enumerate(self.types):
            if self.named:
                options["block_type"], options["block_index"] = block_type, index
                options["total_blocks"] = 2
            q, k, v = (
                by_head(y, False) for y in (tokens, tokens @ weights(number, dtype=x.dtype), tokens)
            )
            given = {"skip_reshape": True, "transformer_options": dict(options)}
            tokens = tokens + attention(q, k, v, HEADS, **given)
        image = tokens[:, context.shape[1] :].mT.unflatten(2, image.shape[-2:])
        return interpolate(image, size=size, mode="nearest")


@dataclass
class Patcher:
    """A model and its options."""

    model: object
    model_options: dict = field(default_factory=lambda: {"transformer_options": {}})

    def clone(self):
        return Patcher(self.model, copy.deepcopy(self.model_options))


@dataclass
class Cond:
    kind: int  # 0 the prompt, 1 the negative prompt
    states: torch.Tensor  # [1, T, WIDTH]
    until: int = 99  # the step before which it is drawn


def states(seed, length, dtype=torch.float32):
    made = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def sample(patcher, x, conds, *, in_turn=False, steps=3, mask=None, start=8.0, again=False):
    """Return the latents, and what each attention call was handed; ``again`` calls the model once
    more for the prompt in each step, which is ``conds[0]``."""
    told, uuids = [], {id(cond): uuid.uuid4() for cond in conds}
    with torch.inference_mode():
        for step in range(steps):
            sigmas = torch.full((len(x),), start / (step + 1))
            now = [cond for cond in conds if step < cond.until]
            batches = [[cond] for cond in now[::-1]] if in_turn else [now[::-1]]
            guided = torch.zeros_like(x)
            for batch in [*batches, now[:1]] if again else batches:
                length = math.lcm(*(cond.states.shape[1] for cond in batch))
                texts = [c.states.repeat(len(x), length // c.states.shape[1], 1) for c in batch]
                options = dict(patcher.model_options["transformer_options"])
                options["cond_or_uncond"] = [cond.kind for cond in batch]
                options["uuids"] = [uuids[id(cond)] for cond in batch]
                options["sigmas"], options["told"] = sigmas, told
                rows = torch.cat([x] * len(batch))
                out = patcher.model(rows, torch.cat(texts), options, mask)
                guided = guided + out.chunk(len(batch))[0] / out.abs().max()
            x = x - 0.1 * guided
    return x, told


def latents(rows, cols, images=1, dtype=torch.float32):
    made = torch.randn(images, WIDTH, rows, cols, generator=torch.Generator().manual_seed(5))
    return made.to(dtype)


def explicit_means(told, kind, grid=None):
    """Each layer's mean over calls and heads, by the softmax written out in float64.

    Returns a list of float64 ``[images, rows, cols, T]``, in running order.
    """
    sums = {}
    last, number = None, 0
    for q, k, mask, skip_reshape, options in told:
        key, number = (options["sigmas"], options["uuids"]), number + 1
        if last is None or key[0] is not last[0] or key[1] != last[1]:
            last, number = key, 0
        shape = options.get("activations_shape")
        rows, cols = grid if shape is None else shape[-2:]
        if kind not in options["cond_or_uncond"] or (shape and q.shape[-2] == k.shape[-2]):
            continue
        q, k = by_head(q, skip_reshape).double(), by_head(k, skip_reshape).double()
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + (mask[:, None] if mask.ndim == 3 else mask).double()
        exp = (scores - scores.amax(-1, keepdim=True)).exp()
        probs = (exp / exp.sum(-1, keepdim=True)).mean(1)
        text = k.shape[-2] if shape else k.shape[-2] - rows * cols
        probs = probs[:, -rows * cols :, :text]
        chunk = options["cond_or_uncond"].index(kind)
        probs = probs.chunk(len(options["cond_or_uncond"]))[chunk].unflatten(1, (rows, cols))
        sums.setdefault(number, []).append(probs)
    return [torch.stack(calls).mean(0) for calls in sums.values()]


class Clip:
    """A CLIP of ComfyUI: its tokenizers cut the words between spaces into chunks of 77."""

    def __init__(self, **tokenizers):
        self.tokenizer = Tokenizers(**tokenizers)

    def tokenize(self, text, return_word_ids=False):
        parts = self.tokenizer.parts.items()
        return {name: part.chunks(text, return_word_ids) for name, part in parts}


class Tokenizers:
    def __init__(self, **tokenizers):
        self.parts = {name: Part(*given) for name, given in tokenizers.items()}
        for name, part in self.parts.items():
            setattr(self, name if name == "t5xxl" else f"clip_{name}", part)


@dataclass
class Part:
    tokenizer: object
    length: int  # columns of a chunk
    pad: str

    def chunks(self, text, return_word_ids):
        tok, end = self.tokenizer, self.tokenizer.eos_token_id
        start = [] if tok.bos_token_id is None else [(tok.bos_token_id, 1.0, 0)]
        pad = (tok.convert_tokens_to_ids(self.pad), 1.0, 0)
        chunks = [[*start]]
        for number, word in enumerate(text.split()):
            ids = tok(word, add_special_tokens=False)["input_ids"]
            if len(chunks[-1]) + len(ids) > self.length - 1:
                chunks.append([*start])
            chunks[-1] += [(one, 1.0, number + 1) for one in ids]
        full = [[*chunk, (end, 1.0, 0)] for chunk in chunks]
        full = [chunk + [pad] * (self.length - len(chunk)) for chunk in full]
        return full if return_word_ids else [[one[:2] for one in chunk] for chunk in full]

    def untokenize(self, tokens):
        spelled = {number: piece for piece, number in self.tokenizer.get_vocab().items()}
        return [(token, spelled[token[0]]) for token in tokens]
