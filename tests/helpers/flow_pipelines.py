"""Tiny text-to-image pipelines of flow matching that make 128x128 images. Their VAEs have a
scale, a shift and statistics that are not those of doing nothing."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from helpers.transformer_rows import flux, flux2, klein, qwen_image, sd3

# By name: how it is made, and the further options of its calls.
FLOWS = {
    "SD3": (sd3, {"max_sequence_length": 24}),
    "FLUX.1": (flux, {"max_sequence_length": 24}),
    "FLUX.2": (flux2, {"max_sequence_length": 160}),
    "FLUX.2 klein": (klein, {"max_sequence_length": 24}),
    "Qwen-Image": (qwen_image, {}),
}


def flow_pipeline(name, **schedule):
    """A pipeline and the options of its calls."""
    make, options = FLOWS[name]
    pipe = make()
    pipe.default_sample_size = 16
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(**schedule)
    generator = torch.Generator().manual_seed(5)
    if name == "Qwen-Image":
        mean, std = torch.rand(2, 4, generator=generator).add(0.5).tolist()
        pipe.vae.register_to_config(latents_mean=mean, latents_std=std)
    elif name.startswith("FLUX.2"):
        pipe.vae.bn.running_mean.copy_(torch.rand(16, generator=generator))
        pipe.vae.bn.running_var.copy_(torch.rand(16, generator=generator) + 0.5)
    return pipe, options


class Seen(list):
    """The arguments of each call of a pipeline's transformer, by name, inside ``with``."""

    def __init__(self, pipe):
        super().__init__()
        self.model = pipe.transformer

    def __enter__(self):
        self.hook = self.model.register_forward_hook(self.note, with_kwargs=True)
        return self

    def note(self, model, args, kwargs, output):
        self.append(kwargs)

    def __exit__(self, *_):
        self.hook.remove()
