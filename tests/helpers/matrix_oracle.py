"""What a pipeline's maps must be: each attention recomputed in float64.

From what reached torch's ``scaled_dot_product_attention``, written out as a softmax over all keys.
"""

import math
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import pad

from sdattn.models.denoiser import find_denoiser
from sdattn.models.layers import TEXT_KINDS
from sdattn.models.running_call import running_call


def softmax_in_float64(query, key, mask, scale):
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.einsum("bhnd,bhtd->bhnt", query.double(), key.double()) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.double()
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def probabilities(query, key, _value, mask, scale):
    return softmax_in_float64(query, key, mask, scale)


@contextmanager
def recorded(model, kinds=TEXT_KINDS, what=probabilities):
    """name -> [probabilities of each call of each pass], float64 ``[B, heads, N, keys]``, of layers
    of these kinds; or ``what`` else is made of their calls. Of several models, in a list, those of
    one name together."""
    record, running = defaultdict(list), []
    real = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, attn_mask=None, *args, scale=None, **kwargs):
        if running:  # such a layer of the denoiser
            record[running[-1]].append(what(query, key, value, attn_mask, scale))
        return real(query, key, value, attn_mask, *args, scale=scale, **kwargs)

    hooks = []
    models = model if isinstance(model, list) else [model]
    layers = [layer for one in models for layer in find_denoiser(one).layers]
    for layer in (one for one in layers if one.kind in kinds):
        module = layer.module
        hooks.append(module.register_forward_pre_hook(lambda *_, n=layer.name: running.append(n)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        yield record
    for hook in hooks:
        hook.remove()


def processors(model):
    """Of each module that has one."""
    return {one: one.processor for one in model.modules() if hasattr(one, "processor")}


def run_recorded(row, pipe, way, **more):
    """Latents (see ``Row.run``), what torch's attention did, and how often the model was called."""
    denoiser, calls = find_denoiser(pipe), []
    models = [one.model for one in (denoiser, denoiser.stands_in) if one is not None]
    counters = [
        one.register_forward_hook(lambda *_: calls.append(running_call(pipe))) for one in models
    ]
    with recorded(models, (*TEXT_KINDS, "self")) as record:
        plain = row.run(pipe, way, **more)
    for counter in counters:
        counter.remove()
    assert len(set(calls)) == 1 and None not in calls  # of one call of the pipeline
    return plain, record, len(calls)


def in_one(calls):
    """Those of a row each as one of the batch, 0 for the tokens that a row has not."""
    length = max(probs.shape[-1] for probs in calls)
    found = torch.zeros(len(calls), calls[0].shape[1], length, length, dtype=torch.float64)
    for whole, probs in zip(found, calls, strict=True):
        whole[:, : probs.shape[2], : probs.shape[3]] = probs[0]
    return found


def joint_part(probs, cells, row, lengths, sides):
    """What queries pay to keys, ``[rows, queries, keys]``; after each row's own text nothing."""
    width = probs.shape[-1]
    columns = row.n_text or (max(lengths) if lengths else width - cells - row.references)
    size = {"image": cells, "text": columns}
    found = torch.zeros(len(probs), *map(size.get, sides), dtype=probs.dtype)
    for image, n_text in enumerate(lengths or [columns] * len(probs)):
        first = n_text if row.joint == "text first" else 0
        start = 0 if first else width - n_text
        if lengths and not first:
            start = -(-cells // row.filled) * row.filled
        if row.image_last:
            first = width - cells
            start = first - row.between - n_text
        place = {"image": slice(first, first + cells), "text": slice(start, start + n_text)}
        part = probs[image, place[sides[0]], place[sides[1]]]
        found[image, : part.shape[0], : part.shape[1]] = part
    return found


def expected_maps(
    calls, model_calls, row, way, lengths=None, sides=("image", "text"), queries=None
):
    """The mean over passes and heads of the prompt's rows.

    Attention that is computed in parts (text and image prompts) has its columns side by side. Of
    joint attention the image's rows and the text's columns are taken, or those of other ``sides``;
    if the keys are the image's, they are the rows, and the ``queries`` the columns.
    """
    if row.in_parts:  # of all tokens' queries the image's, the last
        own = [probs for probs in calls if probs.shape[2] < probs.shape[3]]
        calls = [pad(probs, (0, 0, probs.shape[3] - probs.shape[2], 0)) for probs in own]
    parts = len(calls) // model_calls
    means = []
    for i in range(model_calls):
        if i % 2 and (row.twice or (row.in_turn and way.guided)):
            continue  # the negative prompt's, or neither's
        of_call = calls[i * parts : (i + 1) * parts]
        if row.text_last:
            of_call = of_call[::-1]
        probs = in_one(of_call) if row.row_by_row else torch.cat(of_call, dim=-1)
        probs = probs[list(row.rows(way, len(probs)))].mean(1)
        if row.joint:
            probs = joint_part(probs, math.prod(row.grid(way)), row, lengths, sides)
        if sides[1] == "image":
            probs = (probs if queries is None else probs[:, queries]).mT
        means.append(probs)
    # of a video whose frames are rows: those of each, its cells frame by frame
    return torch.stack(means).mean(0).unflatten(0, (-1, row.frame_rows)).flatten(1, 2)
