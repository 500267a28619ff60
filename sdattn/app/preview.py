"""Previews of an image while it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from PIL import Image

_MOST = 5  # previews of a run: each is a pass through the autoencoder
_SIDE = 512  # pixels of the longer side


def preview_hook(pipe: Any, show: Callable[[Image.Image], None]) -> Callable[..., None]:
    """Return a forward hook for a UNet that shows a preview every few steps: the image without the
    noise that the model sees in it, through the autoencoder. Other models have no preview, nor have
    autoencoders on another device."""
    calls = 0

    def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal calls
        calls += 1
        number = len(pipe.scheduler.timesteps)
        if calls >= number or calls % -(-number // (_MOST + 1)):
            return
        with suppress(Exception):  # a run does not end for want of a preview
            noisy = args[0] if args else kwargs["sample"]
            timestep = args[1] if len(args) > 1 else kwargs["timestep"]
            if output[0].device == pipe.vae.device:
                show(_image(pipe, noisy, timestep, output[0]))

    return after


@torch.no_grad()
def _image(pipe: Any, noisy: torch.Tensor, timestep: Any, output: torch.Tensor) -> Image.Image:
    kind = pipe.scheduler.config.prediction_type
    signal = pipe.scheduler.alphas_cumprod.to(noisy.device)[timestep.long().flatten()[-1]]
    output = output[-1:]  # with guidance the last row is the prompt's
    noisy = noisy[-1:, : output.shape[1]]
    noise = 1 - signal
    clean = {
        "epsilon": (noisy - noise.sqrt() * output) / signal.sqrt(),
        "v_prediction": signal.sqrt() * noisy - noise.sqrt() * output,
        "sample": output,
    }[kind]
    latents = clean.to(pipe.vae.dtype) / pipe.vae.config.scaling_factor
    [image] = pipe.image_processor.postprocess(pipe.vae.decode(latents)[0])
    image.thumbnail((_SIDE, _SIDE))
    return image
