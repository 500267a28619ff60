"""Tiny models of joint attention, sharp enough that a fault is far above rounding."""

import torch

from helpers.joint_models import MODELS, inputs
from helpers.transformer_rows import own_norms, sd3
from sdattn import TorchJointProcessor
from sdattn.models.denoiser import find_denoiser

NAMES = (*MODELS, "SD3.5")


def sharp_model(kind, dtype=torch.float32):
    """A transformer whose queries and keys, also of the text, spread over their keys unevenly."""
    if kind == "SD3.5":
        model = sd3(dual_attention_layers=(0, 1), qk_norm="rms_norm").transformer
    else:
        model = own_norms(MODELS[kind]().transformer)
    if kind == "SD3":
        for layer in find_denoiser(model).layers:
            for name in ("to_q", "to_k", "add_q_proj", "add_k_proj"):
                getattr(layer.module, name).weight.data *= 4
    return model.to(dtype)


def sharp_inputs(kind, model, dtype=torch.float32, batch=1):
    given = inputs("SD3" if kind == "SD3.5" else kind, model, dtype)
    shared = ("img_ids", "txt_ids", "guidance")

    def rows(name, value):
        if isinstance(value, list):
            return value * batch
        if name in shared or not isinstance(value, torch.Tensor):
            return value
        turns = [value.roll(i, -1) if value.ndim > 1 else value for i in range(batch)]
        return torch.cat(turns)

    return {name: rows(name, value) for name, value in given.items()}


def spans_of(kind, cells=15, n_text=7):
    """(image, text), as diffusers' processors join them."""
    if kind.startswith("SD3"):
        return slice(0, cells), slice(cells, cells + n_text)
    return slice(n_text, n_text + cells), slice(0, n_text)


def controlled(kind, controller, batch=2, **options):
    """(model, inputs) with a controller in each layer, SD3.5's self-attention included."""
    model = sharp_model(kind)
    for layer in find_denoiser(model).layers:
        spans = spans_of(kind)
        if layer.kind == "self":
            spans = spans[0], slice(0, 0)
        made = TorchJointProcessor(controller, layer.place, spans=lambda s=spans: s, **options)
        layer.module.set_processor(made)
    return model, sharp_inputs(kind, model, batch=batch)


def shown(model):
    """layer name -> the probabilities that its processor shows; ours, if it has another."""
    found = {}
    for layer in find_denoiser(model).layers:
        if not isinstance(layer.module.processor, TorchJointProcessor):
            layer.module.set_processor(TorchJointProcessor())
        watchers = layer.module.processor.watchers
        watchers.append(lambda call, name=layer.name: found.update({name: call.probs}))
    return found
