"""ComfyUI's side of a sampler's run, as its core calls wrappers and attention functions.

``integrations/comfyui/live`` runs the core itself and compares: the same wrappers are called in
the same order with the same arguments, and the attention functions with the same keys of
``transformer_options``.
"""

import math
import re
import uuid
from dataclasses import dataclass, field

import torch
from torch.nn.functional import interpolate, scaled_dot_product_attention

HEADS = 2
WIDTH = 16
OVERRIDE = "optimized_attention_override"


def attention(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, transformer_options=None
):
    """The function as models call it."""
    options = transformer_options or {}
    told = {"skip_reshape": skip_reshape, "transformer_options": options}
    if override := options.get(OVERRIDE):
        return override(plain, q, k, v, heads, mask=mask, attn_precision=attn_precision, **told)
    return plain(q, k, v, heads, mask, skip_reshape=skip_reshape)


def by_head(x, skip_reshape):
    return x if skip_reshape else x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def plain(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, **_):
    q, k, v = (by_head(x, skip_reshape) for x in (q, k, v))
    mask = mask[:, None] if mask is not None and mask.ndim == 3 else mask
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def weights(seed):
    """A matrix that spreads scores, so that maps are far from flat."""
    made = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return made * 3 / math.sqrt(WIDTH)


class UNetModel:
    """Two levels: self- and cross-attention in each block."""

    blocks = (("input", 1), ("middle", 0), ("output", 0))
    levels = (0, 1, 0)

    def named_modules(self):
        names = [f"{number}.attn2" for number in range(3)]  # and attention to the image alone
        return [(name, self) for name in [*names, *(f"{number}.attn1" for number in range(4))]]

    def __call__(self, x, context, options, **_):
        size = x.shape[-2:]
        for number, (block, level) in enumerate(zip(self.blocks, self.levels, strict=True)):
            grid = [(side + level) // (1 + level) for side in size]
            x = interpolate(x, size=tuple(grid), mode="nearest")
            options["block"] = block
            options["block_index"] = 0
            options["activations_shape"] = list(x.shape)
            tokens = x.flatten(2).mT
            for kind, source in enumerate((tokens, context)):
                given = (tokens, source @ weights(9 * number + kind), source)
                replaced = options.get("patches_replace", {}).get(f"attn{kind + 1}", {}).get(block)
                if replaced:
                    tokens = tokens + replaced(*given, {**options, "n_heads": HEADS})
                else:
                    tokens = tokens + attention(*given, HEADS, transformer_options=options)
            x = tokens.mT.unflatten(2, tuple(grid))
        return interpolate(x, size=size, mode="nearest")


class Flux:
    """A double block and a single one over [text, image], 2x2 cells of the latent a token."""

    patch_size = 2
    double_blocks = single_blocks = (None,)

    def __call__(self, x, context, options, **_):
        size = x.shape[-2:]
        image = torch.nn.functional.avg_pool2d(x, 2, ceil_mode=True)
        tokens = torch.cat([context, image.flatten(2).mT], 1)
        replaced = options.get("patches_replace", {}).get("dit", {})
        for number, kind in enumerate(("double", "single")):
            options["block_type"] = kind
            options["block_index"] = 0
            args = {"img": tokens, "weights": weights(number), "transformer_options": options}
            patch = replaced.get((f"{kind}_block", 0))
            made = patch(args, {"original_block": self.block}) if patch else self.block(args)
            tokens = made["img"]
        image = tokens[:, context.shape[1] :].mT.unflatten(2, image.shape[-2:])
        return interpolate(image, size=size, mode="nearest")

    def block(self, args):
        tokens = args["img"]
        given = (by_head(y, False) for y in (tokens, tokens @ args["weights"], tokens))
        told = {"skip_reshape": True, "transformer_options": args["transformer_options"]}
        return {"img": tokens + attention(*given, HEADS, **told)}


@dataclass
class Base:
    """What holds the diffusion model."""

    diffusion_model: object


class Executor:
    """Calls a wrapper, or the function inside; wrappers may look at ``class_obj``."""

    def __init__(self, inside, class_obj, wrappers):
        self.inside = inside
        self.class_obj = class_obj
        self.wrappers = wrappers

    def __call__(self, *args, **kwargs):
        if not self.wrappers:
            return self.inside(*args, **kwargs)
        inner = Executor(self.inside, self.class_obj, self.wrappers[1:])
        return self.wrappers[0](inner, *args, **kwargs)


@dataclass
class Patcher:
    """A model, its options and its wrappers."""

    model: Base
    model_options: dict = field(default_factory=lambda: {"transformer_options": {}})
    wrappers: dict = field(default_factory=dict)

    def clone(self):
        held = {kind: list(wrappers) for kind, wrappers in self.wrappers.items()}
        options = dict(self.model_options["transformer_options"])
        return type(self)(self.model, {"transformer_options": options}, held)

    def set_model_patch_replace(self, patch, name, *block):
        options = self.model_options["transformer_options"]
        replaced = options.get("patches_replace", {})
        ours = {**replaced.get(name, {}), block: patch}
        options["patches_replace"] = {**replaced, name: ours}

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers.setdefault(kind, []).append(wrapper)

    def run(self, kind, inside, class_obj, *args, **kwargs):
        return Executor(inside, class_obj, self.wrappers.get(kind, []))(*args, **kwargs)


class ChoosingPatcher(Patcher):
    """One of newer versions, whose *Model Attention Backend* sets an override."""

    def set_model_optimized_attention(self, optimized_attention):
        def optimized_attention_override(_, *args, **kwargs):
            return optimized_attention(*args, **kwargs)

        self.model_options["transformer_options"][OVERRIDE] = optimized_attention_override


@dataclass
class State:
    """Text states as the model gets them."""

    cond: torch.Tensor


@dataclass
class Guider:
    """Draws with positive and negative texts, each a CONDITIONING, as KSampler does."""

    patcher: Patcher
    positive: list
    negative: list
    together: bool = True

    def sample(self, latent, steps=3, callback=None):
        self.conds = {
            name: [
                {
                    "cross_attn": text,
                    "uuid": uuid.uuid4(),
                    "model_conds": {"c_crossattn": State(text)},
                }
                | told
                for text, told in texts
            ]
            for name, texts in (("positive", self.positive), ("negative", self.negative))
        }
        sigmas = torch.linspace(8, 0, steps + 1)
        with torch.inference_mode():
            return self.patcher.run(
                "outer_sample",
                self._sample,
                self,
                latent,
                latent,
                None,
                sigmas,
                None,
                callback,
                True,
                0,
            )

    def _sample(self, noise, latent, sampler, sigmas, mask, callback, *_):
        x = noise
        for step, sigma in enumerate(sigmas[:-1]):
            rows = sigma * torch.ones(len(x))
            denoised = self.patcher.run("predict_noise", self._predict, self, x, rows, {}, 0)
            x = x - 0.1 * denoised / denoised.abs().max()
            if callback is not None:
                callback(step, denoised, x, len(sigmas) - 1)
        return x

    def _predict(self, x, timestep, model_options, seed):
        conds = [self.conds["positive"], self.conds["negative"]]
        given = self.patcher.model, conds, x, timestep, model_options
        first, second = self.patcher.run("calc_cond_batch", self._calc, None, *given)
        return second + 4 * (first - second)

    def _calc(self, base, conds, x, timestep, model_options):
        found = [torch.zeros_like(x) for _ in conds]
        todo = [(cond, kind) for kind, texts in enumerate(conds) for cond in texts][::-1]
        for batch in [todo] if self.together else [[one] for one in todo]:
            length = math.lcm(*(cond["cross_attn"].shape[1] for cond, _ in batch))
            texts = [cond["cross_attn"] for cond, _ in batch]
            text = torch.cat([t.repeat(len(x), length // t.shape[1], 1) for t in texts])
            options = dict(self.patcher.model_options["transformer_options"])
            options["cond_or_uncond"] = [kind for _, kind in batch]
            options["uuids"] = [cond["uuid"] for cond, _ in batch]
            options["sigmas"] = timestep
            rows = torch.cat([x] * len(batch))
            times = torch.cat([timestep] * len(batch))
            given = (rows, times, None, text, None, options)
            made = self.patcher.run("apply_model", self._apply, base, *given)
            for part, (_, kind) in zip(made.chunk(len(batch)), batch, strict=True):
                found[kind] += part
        return found

    def _apply(self, x, t, c_concat, c_crossattn, control, transformer_options):
        return self.patcher.model.diffusion_model(x, c_crossattn, transformer_options)


def states(seed, length):
    return torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def latents(rows, cols, images=1):
    return torch.randn(images, WIDTH, rows, cols, generator=torch.Generator().manual_seed(5))


class Clip:
    """A CLIP of ComfyUI: each tokenizer gives chunks of (token, weight, word id)."""

    def __init__(self, **parts):
        self.tokenizer = Tokenizers(**parts)

    def tokenize(self, text, return_word_ids=False):
        return {name: part.chunks(text) for name, part in self.tokenizer.parts.items()}

    def encode_from_tokens(self, tokens):
        """Return states of the first encoder, each its own token's: ``[1, columns, width]``."""
        chunks = next(iter(tokens.values()))
        numbers = torch.tensor([token for chunk in chunks for token, _, _ in chunk])
        return torch.sin(numbers[:, None] * torch.arange(1.0, WIDTH + 1))[None]


class Tokenizers:
    def __init__(self, **parts):
        self.parts = parts
        for name, part in parts.items():
            setattr(self, name if name == "t5xxl" else f"clip_{name}", part)


@dataclass
class Part:
    """One tokenizer: the text between embeddings is one group, whose pieces share a word id."""

    tokenizer: object
    length: int  # columns of a chunk
    embeddings: dict = field(default_factory=dict)  # vectors by name
    template: str = "{}"
    embedding_size: int = WIDTH
    has_weights: bool = False  # reads (cat:1.3), and what has another weight apart

    def __post_init__(self):
        self.start_token = self.tokenizer.bos_token_id
        self.end_token = self.pad_token = self.tokenizer.eos_token_id

    def chunks(self, text):
        inner = [one for group in self.groups(self.template.format(text)) for one in group]
        start = [] if self.start_token is None else [(self.start_token, 1.0, 0)]
        room = self.length - 1 - len(start)
        chunks = []
        for first in range(0, max(len(inner), 1), room):
            row = [*start, *inner[first : first + room]]
            chunks.append(row + [(self.end_token, 1.0, 0)] * (self.length - len(row)))
        return chunks

    def groups(self, text):
        weighted = token_weights(escape_important(text), 1.0) if self.has_weights else [(text, 1.0)]
        word = 0
        for part, weight in weighted:
            part = unescape_important(part)
            for piece in re.split(r"(embedding:\w+)", part) if self.embeddings else [part]:
                word += 1
                vectors = self.embeddings.get(piece.removeprefix("embedding:"))
                if vectors is not None and piece.startswith("embedding:"):
                    yield [(vector, weight, word) for vector in vectors]
                else:
                    ids = self.tokenizer(piece, add_special_tokens=False)["input_ids"]
                    yield [(one, weight, word) for one in ids]

    def untokenize(self, pairs):
        names = {number: piece for piece, number in self.tokenizer.get_vocab().items()}
        return [(pair, names[pair[0]]) for pair in pairs]


def token_weights(text, weight):
    """Return the parts of a text with their weights, as ``comfy.sd1_clip`` does."""
    found = []
    while text:
        before, opened, text = text.partition("(")
        found += [(before, weight)] if before else []
        depth = end = int(bool(opened))
        while opened and depth:
            depth += {"(": 1, ")": -1}.get(text[end - 1], 0)
            end += 1
        inner, text = text[: max(end - 2, 0)], text[max(end - 1, 0) :]
        name, colon, number = inner.rpartition(":")
        if colon and number.replace(".", "", 1).isdigit():
            found += token_weights(name, float(number))
        elif inner:
            found += token_weights(inner, 1.1 * weight)
    return found


def escape_important(text):
    return text.replace("\\(", "\0[").replace("\\)", "\0]")


def unescape_important(text):
    return text.replace("\0[", "(").replace("\0]", ")")
