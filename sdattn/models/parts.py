"""Parts of a family's record: how its pipelines run guidance, its model's inputs, its images as
inputs, its prompt-to-prompt.

Below them are functions that several families share: a VAE's latents of images, their scale, the
packing of 2x2 cells into one patch, and the spans of a text before its image.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..attention.joint_processor import Spans
from .layers import AttentionLayer
from .pipeline import Given, Model, Options, Pipeline

NoiseKind = Literal["diffusion", "flow"]
Branch = Literal["conditional", "unconditional"]
Order = tuple[Branch | None, ...]
Part = tuple[float, float]  # part of a run or of a model's depth, in [0, 1]


@dataclass(frozen=True)
class Guidance:
    """Layout of classifier-free guidance (Ho and Salimans 2022) in a class of pipelines.

    Attributes:
        order: branches of a guided batch, chunk by chunk; None is neither branch.
        known_by: what tells the branches of a model call if the pipeline does not name it:
            ``"property"`` or ``"variable"``, ``do_classifier_free_guidance`` of the pipeline or of
            its running call; ``"truncation"``, that property and the part of the run after which
            guidance ends; ``"calls"``, the count of calls in a step, the prompt's first, if
            branches run in turn; ``"guider"``, a modular pipeline's guider, whose branches also run
            in turn.
        further: variable of the running call that counts further chunks of a guided batch that
            belong to neither branch; "" for none.
        once: True if only the first call of a step has these branches, and later calls have none.
    """

    order: Order
    known_by: Literal["property", "truncation", "variable", "calls", "guider"] = "property"
    further: str = ""
    once: bool = False


NEGATIVE_FIRST = Guidance(("unconditional", "conditional"))
# Pipelines that keep whether they are guided to their call
NEGATIVE_FIRST_IN_CALL = Guidance(("unconditional", "conditional"), known_by="variable")
IN_TURN = Guidance(("conditional",), known_by="calls")
GUIDED = Guidance(("conditional",), known_by="guider")


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


@dataclass(frozen=True, kw_only=True)
class Edits:
    """Best settings of prompt-to-prompt for images of a family, as measured.

    Attributes:
        pipelines: class names of pipelines whose images can be edited.
        depth: part of the layers, in running order, that takes the source's attention: 0 is before
            the first layer, 1 after the last.
        cross, self_: default part of the run that takes the source's attention to the text, and its
            attention from image to image.
    """

    pipelines: tuple[str, ...]
    depth: Part = (0.0, 1.0)
    cross: float = 0.8
    self_: float = 0.4

    def layers(self, found: Sequence[AttentionLayer]) -> list[str]:
        """Return the names of layers whose middle lies in :attr:`depth`."""
        first, last = self.depth
        middles = [(i + 0.5) / len(found) for i in range(len(found))]
        return [la.name for la, at in zip(found, middles, strict=True) if first <= at <= last]


@dataclass(frozen=True, kw_only=True)
class ImageLatents:
    """Facts about pipelines that make an image from noise and prompts alone.

    Attributes:
        pipelines: class names, and the options with which each runs without guidance. A scale that
            the model itself takes as an input (FLUX) is not among them.
        encode: function from the pipeline and RGB pixels, float32 ``[B, 3, height, width]`` from -1
            to 1, to latents as the pipeline's call takes them, float32 ``[B, C, rows, cols]`` or
            packed ``[B, patches, C]``. The VAE is in float32 meanwhile.
        noise: how training mixed noise into latents: ``"diffusion"``, by the scheduler's betas (Ho
            et al. 2020), or ``"flow"``, along a straight line (Esser et al. 2024, eq. 13).
        invertible: True if :func:`sdattn.edit.invert` knows the way back to the noise.
    """

    pipelines: Mapping[str, Options] = field(default_factory=dict)
    encode: Callable[[Pipeline, Tensor], Tensor]
    noise: NoiseKind
    invertible: bool = False


def vae_latents(vae: Model, pixels: Tensor) -> Tensor:
    """Return a VAE's latents of pixels without randomness: the mode of its distribution."""
    encoded = vae.encode(pixels)
    if not hasattr(encoded, "latent_dist"):  # AutoencoderTiny's
        return encoded.latents
    return encoded.latent_dist.mode()


def shifted_latents(pipe: Pipeline, pixels: Tensor) -> Tensor:
    """Return ``(z - shift) * scale``, ``[B, C, rows, cols]``. Source: ``prepare_latents`` of
    pipeline_stable_diffusion_3_img2img.py, ``_encode_vae_image`` of pipeline_flux_img2img.py."""
    config = pipe.vae.config
    return (vae_latents(pipe.vae, pixels) - config.shift_factor) * config.scaling_factor


def standardised(pipe: Pipeline, latents: Tensor) -> Tensor:
    """Return ``(z - mean) / std`` of latents ``[B, C, rows, cols]``, by the VAE's own mean and
    deviation of each channel."""
    config = pipe.vae.config
    mean = latents.new_tensor(config.latents_mean)[:, None, None]
    std = latents.new_tensor(config.latents_std)[:, None, None]
    return (latents - mean) / std


def packed(pipe: Pipeline, latents: Tensor) -> Tensor:
    """Return ``[B, C, rows, cols]`` as patches of 2x2 cells, ``[B, rows / 2 * cols / 2, 4 C]``, by
    the pipeline's own method, which FLUX.1 and Qwen-Image have."""
    return pipe._pack_latents(latents, *latents.shape)


def text_then_image(_model: Model, given: Given, cells: int, before: int = 0) -> Sequence[Spans]:
    """Return the spans of a stream with ``before`` further tokens, the text and the image in each
    row, as :attr:`Family.spans` does."""
    states = given["encoder_hidden_states"]  # [B, T, width]
    length = before + states.shape[1]
    return [(slice(length, length + cells), slice(0, length))] * len(states)
