"""The seven laws, for every row of the support matrix.

The oracle recomputes each attention in float64 from what reached torch's
``scaled_dot_product_attention``, written out as a softmax over all keys.
"""

import math
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from matrix import CASES, PROCESSORS

from sdattn import capture
from sdattn.models.layers import find_denoiser, find_layers


def softmax_in_float64(query, key, mask, scale):
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.einsum("bhnd,bhtd->bhnt", query.double(), key.double()) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.double()
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


@contextmanager
def recorded(model, monkeypatch):
    """name -> [probabilities of each call of each pass], float64 ``[B, heads, N, keys]``."""
    record, running = defaultdict(list), []
    real = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, attn_mask=None, *args, scale=None, **kwargs):
        if running:  # a layer of the denoiser, not of a text encoder
            record[running[-1]].append(softmax_in_float64(query, key, attn_mask, scale))
        return real(query, key, value, attn_mask, *args, scale=scale, **kwargs)

    hooks = []
    for layer in find_layers(model):
        module = layer.module
        hooks.append(module.register_forward_pre_hook(lambda *_, n=layer.name: running.append(n)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        yield record
    for hook in hooks:
        hook.remove()


def state(pipe, model):
    """Everything that capture() could leave behind."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return dict(model.attn_processors), hooks, set(vars(pipe))


@pytest.mark.parametrize(
    ("row", "processor", "way"),
    [pytest.param(*case, id="-".join(map(str, case))) for case in CASES],
)
def test_the_seven_laws(row, processor, way, monkeypatch):
    way = row.fitted(way)
    pipe = row.make()
    pipe.to(way.dtype)
    model = find_denoiser(pipe).model
    model_calls = []
    counter = model.register_forward_hook(lambda *_: model_calls.append(1))
    with recorded(model, monkeypatch) as record:
        plain = row.run(pipe, way)
    counter.remove()
    if processor != "own":  # the record is of torch's own attention, the picture of this one
        PROCESSORS[processor](model)
        plain = row.run(pipe, way)
    before = state(pipe, model)
    with capture(pipe) as store:
        watched = row.run(pipe, way)

    assert (plain == watched).all()  # 1: looking changes nothing
    after = state(pipe, model)  # 3 and 7: leaving restores
    assert all(after[0][name] is before[0][name] for name in before[0])
    assert after[1:] == before[1:]

    # 2: what is shown is what was used, also of attention that is nearly even: tiny random weights
    # give maps whose spread is a few thousandths
    texts = {layer.name for layer in find_layers(model) if layer.kind in ("cross", "joint")}
    assert set(store.maps) == texts  # 4: never silently empty
    assert len(texts) == row.layers
    for layer in texts:
        found = store.maps[layer].flatten(1, 2).double()
        expected = expected_maps(record[layer], len(model_calls), row, way)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    known = pipe.scheduler.timesteps.double()
    slack = 1e-4 if way.dtype == torch.float32 else 1e-2  # some pipelines hand them on rounded
    assert all((known - t).abs().min() <= slack * max(t, 1) for t in store.timesteps)

    assert store.nbytes == store.expected_nbytes  # 5: memory is what was said
    assert store.images == way.total * row.each  # 6: nothing assumed of batch and size
    assert store.latent_size == tuple(side // row.cell for side in way.size)


def expected_maps(calls, model_calls, row, way):
    """The mean over passes and heads of the prompt's rows.

    Attention that is computed in parts (text and image prompts) has its columns side by side. Of
    joint attention the picture's rows and the text's columns are taken.
    """
    parts = len(calls) // model_calls
    means = []
    for i in range(model_calls):
        if row.in_turn and way.guided and i % 2:
            continue  # the negative prompt's
        probs = torch.cat(calls[i * parts : (i + 1) * parts], dim=-1)
        probs = probs[list(row.rows(way, len(probs)))].mean(1)
        if row.joint:
            cells = math.prod(side // row.cell for side in way.size)
            n_text = row.n_text or probs.shape[-1] - cells
            if row.joint == "text first":
                probs = probs[:, n_text : n_text + cells, :n_text]
            else:
                probs = probs[:, :cells, cells:]
        means.append(probs)
    return torch.stack(means).mean(0)
