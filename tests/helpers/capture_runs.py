"""Small runs to be captured, and what their layers were given."""

import math

import torch

from sdattn.models.denoiser import find_denoiser

PROMPT = "a red cat"


def run(pipe, prompt=PROMPT, **options):
    settings = {"num_inference_steps": 2, "output_type": "np", "height": 128, "width": 128}
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt, generator=generator, **{**settings, **options}).images


def record_inputs(unet):
    """(hooks, record): what each cross-attention layer was called with, pass by pass."""
    record = {layer.name: [] for layer in find_denoiser(unet).layers if layer.kind == "cross"}

    def keep(name):
        def hook(_module, args, kwargs):
            text = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
            record[name].append((args[0].detach(), text, kwargs.get("attention_mask")))

        return hook

    hooks = [
        unet.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True)
        for name in record
    ]
    return hooks, record


def oracle(layer, hidden, text, mask=None):
    """softmax(q k^T / sqrt(d)) in float64, ``[batch, heads, N, T]``."""
    text = text[0] if isinstance(text, tuple) else text
    q = hidden.double() @ layer.to_q.weight.double().T
    k = text.double() @ layer.to_k.weight.double().T
    d = q.shape[-1] // layer.heads
    scores = torch.stack(
        [
            q[..., h * d : (h + 1) * d] @ k[..., h * d : (h + 1) * d].mT / math.sqrt(d)
            for h in range(layer.heads)
        ],
        dim=1,
    )
    return (scores if mask is None else scores + mask.double()[:, None]).softmax(-1)


def assert_untouched(unet, before):
    after = unet.attn_processors
    assert all(after[name] is before[name] for name in before)
    assert not unet._forward_pre_hooks
    for layer in find_denoiser(unet).layers:
        assert not layer.module.to_q._forward_hooks
        assert not layer.module.to_k._forward_hooks
