"""Small checkpoints in the layout of CompVis' latent diffusion: the names and shapes of their
tensors, written out from the structure of its models (``openaimodel.UNetModel``, ``model.Encoder``
and ``Decoder``, CLIP and OpenCLIP), whose published configurations are larger."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MULT = (1, 1, 2, 2)  # how wide the levels are, times the first
WORDS = 520  # of the tests' tokenizer
Entry = tuple[str, tuple[int, ...]]


def layer(name: str, *shape: int, bias: bool = True) -> Iterator[Entry]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def conv(name: str, out: int, given: int, side: int = 3) -> Iterator[Entry]:
    yield from layer(name, out, given, side, side)


@dataclass(frozen=True)
class Unet:
    """Arguments of ``UNetModel``: a level is ``width * mult`` wide, and its transformers have
    ``depth`` blocks; there are none where that is 0."""

    channels: int
    width: int
    mult: Sequence[int]
    depth: Sequence[int]
    middle: int
    text: int
    linear: bool
    adm: int | None = None
    blocks: int = 2

    def entries(self) -> Iterator[Entry]:
        width, time = self.width, 4 * self.width
        yield from layer("time_embed.0", time, width)
        yield from layer("time_embed.2", time, time)
        if self.adm:
            yield from layer("label_emb.0.0", time, self.adm)
            yield from layer("label_emb.0.2", time, time)
        yield from conv("input_blocks.0.0", width, self.channels)
        skips, now, number = [width], width, 1
        for level, (mult, depth) in enumerate(zip(self.mult, self.depth, strict=True)):
            for _ in range(self.blocks):
                yield from self.block(f"input_blocks.{number}", now, width * mult, depth)
                now, number = width * mult, number + 1
                skips.append(now)
            if level + 1 < len(self.mult):
                yield from conv(f"input_blocks.{number}.0.op", now, now)
                number += 1
                skips.append(now)
        yield from self.residual("middle_block.0", now, now)
        yield from self.transformer("middle_block.1", now, self.middle)
        yield from self.residual("middle_block.2", now, now)
        number = 0
        for level in reversed(range(len(self.mult))):
            out, depth = width * self.mult[level], self.depth[level]
            for i in range(self.blocks + 1):
                name = f"output_blocks.{number}"
                yield from self.block(name, now + skips.pop(), out, depth)
                if level and i == self.blocks:
                    yield from conv(f"{name}.{2 if depth else 1}.conv", out, out)
                now, number = out, number + 1
        yield from layer("out.0", width)
        yield from conv("out.2", 4, width)

    def block(self, name: str, given: int, out: int, depth: int) -> Iterator[Entry]:
        yield from self.residual(f"{name}.0", given, out)
        if depth:
            yield from self.transformer(f"{name}.1", out, depth)

    def residual(self, name: str, given: int, out: int) -> Iterator[Entry]:
        yield from layer(f"{name}.in_layers.0", given)
        yield from conv(f"{name}.in_layers.2", out, given)
        yield from layer(f"{name}.emb_layers.1", out, 4 * self.width)
        yield from layer(f"{name}.out_layers.0", out)
        yield from conv(f"{name}.out_layers.3", out, out)
        if given != out:
            yield from conv(f"{name}.skip_connection", out, given, 1)

    def transformer(self, name: str, width: int, depth: int) -> Iterator[Entry]:
        square = (width, width) if self.linear else (width, width, 1, 1)
        yield from layer(f"{name}.norm", width)
        yield from layer(f"{name}.proj_in", *square)
        for i in range(depth):
            block = f"{name}.transformer_blocks.{i}"
            for attn, keys in (("attn1", width), ("attn2", self.text)):
                yield from layer(f"{block}.{attn}.to_q", width, width, bias=False)
                yield from layer(f"{block}.{attn}.to_k", width, keys, bias=False)
                yield from layer(f"{block}.{attn}.to_v", width, keys, bias=False)
                yield from layer(f"{block}.{attn}.to_out.0", width, width)
            yield from layer(f"{block}.ff.net.0.proj", 8 * width, width)
            yield from layer(f"{block}.ff.net.2", width, 4 * width)
            for norm in ("norm1", "norm2", "norm3"):
                yield from layer(f"{block}.{norm}", width)
        yield from layer(f"{name}.proj_out", *square)


def vae(width: int = 32, levels: int = 4, blocks: int = 2) -> Iterator[Entry]:
    """An autoencoder of a few levels, all equally wide."""
    yield from conv("encoder.conv_in", width, 3)
    for level in range(levels):
        for i in range(blocks):
            yield from vae_residual(f"encoder.down.{level}.block.{i}", width)
        if level + 1 < levels:
            yield from conv(f"encoder.down.{level}.downsample.conv", width, width)
        for i in range(blocks + 1):
            yield from vae_residual(f"decoder.up.{level}.block.{i}", width)
        if level:
            yield from conv(f"decoder.up.{level}.upsample.conv", width, width)
    for part, out in (("encoder", 8), ("decoder", 3)):
        yield from vae_residual(f"{part}.mid.block_1", width)
        yield from layer(f"{part}.mid.attn_1.norm", width)
        for name in ("q", "k", "v", "proj_out"):
            yield from conv(f"{part}.mid.attn_1.{name}", width, width, 1)
        yield from vae_residual(f"{part}.mid.block_2", width)
        yield from layer(f"{part}.norm_out", width)
        yield from conv(f"{part}.conv_out", out, width)
    yield from conv("decoder.conv_in", width, 4)
    yield from conv("quant_conv", 8, 8, 1)
    yield from conv("post_quant_conv", 4, 4, 1)


def vae_residual(name: str, width: int) -> Iterator[Entry]:
    for number in (1, 2):
        yield from layer(f"{name}.norm{number}", width)
        yield from conv(f"{name}.conv{number}", width, width)


def clip(width: int, layers: int) -> Iterator[Entry]:
    yield "embeddings.token_embedding.weight", (WORDS, width)
    yield "embeddings.position_embedding.weight", (77, width)
    for i in range(layers):
        name = f"encoder.layers.{i}"
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from layer(f"{name}.self_attn.{part}", width, width)
        yield from layer(f"{name}.layer_norm1", width)
        yield from layer(f"{name}.mlp.fc1", 4 * width, width)
        yield from layer(f"{name}.mlp.fc2", width, 4 * width)
        yield from layer(f"{name}.layer_norm2", width)
    yield from layer("final_layer_norm", width)


def open_clip(width: int, layers: int) -> Iterator[Entry]:
    yield "positional_embedding", (77, width)
    yield "text_projection", (width, width)
    yield "logit_scale", ()
    for i in range(layers):
        name = f"transformer.resblocks.{i}"
        yield from layer(f"{name}.ln_1", width)
        yield f"{name}.attn.in_proj_weight", (3 * width, width)
        yield f"{name}.attn.in_proj_bias", (3 * width,)
        yield from layer(f"{name}.attn.out_proj", width, width)
        yield from layer(f"{name}.ln_2", width)
        yield from layer(f"{name}.mlp.c_fc", 4 * width, width)
        yield from layer(f"{name}.mlp.c_proj", width, 4 * width)
    yield "token_embedding.weight", (WORDS, width)
    yield from layer("ln_final", width)


def checkpoint(unet: Unet, **encoders: Iterator[Entry]) -> dict[str, tuple]:
    """Shapes by name; encoders by the beginnings of their names, dots as ``__``."""
    parts = {"model.diffusion_model": unet.entries(), "first_stage_model": vae()}
    parts |= {name.replace("__", "."): entries for name, entries in encoders.items()}
    return {f"{part}.{name}": shape for part, held in parts.items() for name, shape in held}


def sd1(channels: int = 4, tiny: bool = True) -> dict[str, tuple]:
    """As of v1-inference.yaml. Scripts outside the repository ask for a ``tiny`` one; all are."""
    assert tiny
    unet = Unet(channels, 32, MULT, (1, 1, 1, 0), 1, 64, linear=False)
    return checkpoint(unet, cond_stage_model__transformer__text_model=clip(64, 2))


def sd2() -> dict[str, tuple]:
    """As of v2-inference.yaml and v2-inference-v.yaml."""
    unet = Unet(4, 64, MULT, (1, 1, 1, 0), 1, 64, linear=True)
    return checkpoint(unet, cond_stage_model__model=open_clip(64, 24))


def sdxl() -> dict[str, tuple]:
    """As of sd_xl_base.yaml; ``adm``: the pooled text and six numbers of 256 each."""
    unet = Unet(4, 64, MULT[:3], (0, 1, 2), 2, 192, linear=True, adm=128 + 6 * 256)
    first, second = clip(64, 2), open_clip(128, 2)
    return checkpoint(
        unet,
        conditioner__embedders__0__transformer__text_model=first,
        conditioner__embedders__1__model=second,
    )


def refiner() -> dict[str, tuple]:
    """As of sd_xl_refiner.yaml; ``adm``: the pooled text and five numbers of 256 each."""
    unet = Unet(4, 64, MULT, (0, 1, 1, 0), 1, 128, linear=True, adm=128 + 5 * 256)
    return checkpoint(unet, conditioner__embedders__0__model=open_clip(128, 2))


def filled(shapes: dict[str, tuple]) -> dict[str, torch.Tensor]:
    """Random weights, small enough that images stay finite."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        is_norm = name.endswith(".weight") and len(shape) == 1
        found[name] = 1 + 0.1 * values if is_norm else 0.05 * values
    return found
