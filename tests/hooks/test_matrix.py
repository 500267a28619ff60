"""The seven laws, for every row of the support matrix, against matrix_oracle.py."""

import pytest
import torch
from helpers.matrix import CASES, PROCESSORS, is_quick
from helpers.matrix_oracle import expected_maps, recorded

from sdattn import capture
from sdattn.hooks.run_watch import running_call
from sdattn.models.layers import find_denoiser, find_layers


def state(pipe, model):
    """Everything that capture() could leave behind."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    attention = (pair for pair in model.named_modules() if hasattr(pair[1], "processor"))
    processors = {name: module.processor for name, module in attention}
    return processors, hooks, set(vars(pipe)), set(vars(model))


@pytest.mark.parametrize(
    ("row", "processor", "way"),
    [
        pytest.param(
            *case, id="-".join(map(str, case)), marks=[pytest.mark.slow] * (not is_quick(*case))
        )
        for case in CASES
    ],
)
def test_the_seven_laws(row, processor, way, monkeypatch):
    way = row.fitted(way)
    pipe = row.make()
    pipe.to(way.dtype)
    model = find_denoiser(pipe).model
    model_calls = []
    counter = model.register_forward_hook(lambda *_: model_calls.append(running_call(pipe)))
    with recorded(model, monkeypatch) as record:
        plain = row.run(pipe, way)
    counter.remove()
    assert len(set(model_calls)) == 1 and None not in model_calls  # of one call of the pipeline
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
    lengths = None if row.lengths is None else row.lengths(pipe, way)
    for layer in texts:
        found = store.maps[layer].flatten(1, -2).double()
        expected = expected_maps(record[layer], len(model_calls), row, way, lengths)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    known = pipe.scheduler.timesteps.double()
    slack = 1e-4 if way.dtype == torch.float32 else 1e-2  # some pipelines hand them on rounded
    assert all((known - t).abs().min() <= slack * max(t, 1) for t in store.timesteps)

    assert store.nbytes == store.expected_nbytes  # 5: memory is what was said
    assert store.images == way.total * row.each  # 6: nothing assumed of batch and size
    assert store.latent_size == row.grid(way)
