"""Refuse images and maps with NaN or infinity: say where they began, and what to try.

    with watch_finite(pipe, options):    one run; raises NotFiniteError at its end
        pipe(...)
    check_maps(maps, pipe, options)      the same check for captured maps
    check_latents(latents, 3, pipe, options)    for latents between two steps

A pipeline saves NaN as black pixels without an error. Hooks that do not wait look at the numbers
where they are made; the device is asked once, after the run. A compiled VAE is not watched, since a
hook would compile it again.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import NotFiniteError as NotFiniteError
from .denoiser_call import is_compiled
from .pipeline import Options, Pipeline

TEXT = "text states"
LATENTS = "latents"
IMAGE = "image"
_NAMES = {
    TEXT: "The text states that the text encoder made are",
    LATENTS: "The latents of the image are",
    IMAGE: "The latents are finite (up to {:.3g}), but the image that the VAE makes of them is",
}
Largest = dict[str, list[Tensor]]  # on the device, for each call
_MUCH = 20  # a guidance scale above this is the likely cause


@contextmanager
def watch_finite(pipe: Pipeline, options: Options) -> Iterator[None]:
    """Watch one run of a pipeline inside the block.

    Args:
        pipe: diffusers pipeline. Its text encoders and its VAE's decoder are watched, if it has
            them; the decoder of a video's sound is not.
        options: options of the run, for the advice.

    Raises:
        NotFiniteError: at the end, if an image is not finite; the message names where that began.
    """
    largest: Largest = {TEXT: [], LATENTS: [], IMAGE: []}
    with ExitStack() as undo:
        for module, made in _watched(pipe):
            undo.callback(module.register_forward_hook(partial(_note_call, largest, made)).remove)
        yield
    found = _read(largest)
    if math.isfinite(found[LATENTS]) and math.isfinite(found[IMAGE]):
        return
    # In the order in which they are made: the first that is not finite spoiled the rest.
    first = next(what for what, number in found.items() if not math.isfinite(number))
    raise NotFiniteError(
        f"{_NAMES[first].format(found[LATENTS])} not finite, so there is no image. "
        f"{_advice(pipe, options, first)}"
    )


def check_maps(maps: Mapping[str, Tensor], pipe: Pipeline, options: Options) -> None:
    """Refuse (NotFiniteError) captured maps that are not finite; each is named by its key."""
    for name, values in maps.items():
        if not bool(values.detach().isfinite().all()):
            raise NotFiniteError(
                f"The maps of {name} are not finite. {_advice(pipe, options, 'maps')}"
            )


def check_latents(latents: Tensor, step: int, pipe: Pipeline, options: Options) -> None:
    """Refuse (NotFiniteError) a run whose latents are not finite before a step, counted from 0."""
    if not bool(latents.detach().isfinite().all()):
        raise NotFiniteError(
            f"The latents of the image are not finite after step {step}, so there will be no "
            f"image. {_advice(pipe, options, LATENTS)}"
        )


def _watched(pipe: Pipeline) -> Iterator[tuple[nn.Module, str]]:
    """Yield each module of a pipeline to watch, and the kind of what it makes."""
    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module) or name.startswith("audio_"):
            continue
        decoder = getattr(part, "decoder", None)
        decode = getattr(part, "decode", None)
        if isinstance(decoder, nn.Module) and decode is not None:
            if not (hasattr(decode, "_torchdynamo_orig_callable") or is_compiled(part)):
                yield decoder, IMAGE
        elif name.startswith("text_encoder") and not is_compiled(part):
            yield part, TEXT


def _note_call(largest: Largest, kind: str, _: object, args: object, made: object) -> None:
    if kind == IMAGE:
        _note(largest[LATENTS], args)
    _note(largest[kind], made)


def _note(largest: list[Tensor], made: object) -> None:
    """Keep the largest magnitude on its device; NaN if there is one."""
    if isinstance(made, Mapping):  # a model's output, whose first field is what it is for
        made = tuple(made.values())
    if isinstance(made, (tuple, list)):
        made = made[0] if made else None
    if isinstance(made, Tensor) and made.is_floating_point() and made.numel():
        largest.append(made.detach().abs().amax().float())


def _read(largest: Largest) -> dict[str, float]:
    """Return the largest number of each kind, 0 if none was seen; wait for the device once."""
    zero = torch.zeros(())  # amax keeps NaN, where there is one
    device = next((seen[-1].device for seen in reversed(largest.values()) if seen), zero.device)
    tops = []
    for seen in largest.values():
        numbers = [number.to(device) for number in (zero, *seen)]
        tops.append(torch.stack(numbers).amax())
    return dict(zip(largest, torch.stack(tops).tolist(), strict=True))


def _advice(pipe: Pipeline, options: Options, where: str) -> str:
    tries = []
    guidance = options.get("guidance_scale")
    if isinstance(guidance, (int, float)) and abs(guidance) > _MUCH and where != TEXT:
        tries.append(f"a guidance scale below {_MUCH} in place of {guidance:g}")
    dtype = pipe.vae.dtype if where == IMAGE and hasattr(pipe, "vae") else pipe.dtype
    if dtype == torch.float16:
        tries.append("bfloat16 or float32 in place of float16, which ends at 65,504")
    if where == IMAGE and dtype == torch.float16:
        tries.append("a VAE that was made for float16")
    tries.append("the model's files anew, should other prompts fail too")
    return f"Try {'; or '.join(tries)}."
