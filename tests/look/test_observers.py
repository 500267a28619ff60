"""One layer of diffusers under an observer: its output is the processor's own tensor, and what is
handed on is the softmax of its query and key, written out in float64."""

import copy
import inspect
import threading

import pytest
import torch
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
    SlicedAttnProcessor,
)
from torch import nn

from sdattn import TorchAttnProcessor
from sdattn.look.observers import ObservingModule, ObservingProcessor, observing
from sdattn.look.sources import see
from sdattn.look.view import View

HEADS, CELLS, KEYS, WIDTH = 2, 6, 5, 8
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(3, CELLS, WIDTH, generator=GENERATOR)
TEXT = torch.randn(3, KEYS, 12, generator=GENERATOR)
MASK = torch.zeros(3, 1, KEYS).index_fill(-1, torch.tensor([1, 4]), -1e4)  # added to the scores


class Sharp:
    """A processor of somebody's own, which squares its probabilities, and a temperature."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, hot=1):
        states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            attn.head_to_batch_dim(x)
            for x in (attn.to_q(hidden_states), attn.to_k(states), attn.to_v(states))
        )
        probs = attn.get_attention_scores(query, key * hot, None) ** 2
        return attn.to_out[0](attn.batch_to_head_dim(torch.bmm(probs, value)))


PROCESSORS = {
    "AttnProcessor": AttnProcessor,
    "AttnProcessor2_0": AttnProcessor2_0,
    "SlicedAttnProcessor": lambda: SlicedAttnProcessor(1),
    "TorchAttnProcessor": TorchAttnProcessor,
}


def make_layer(processor):
    torch.manual_seed(1)
    layer = Attention(WIDTH, 12, heads=HEADS, dim_head=4, processor=processor)
    return layer.requires_grad_(False)


def opened():
    return True


def watched(processor, source=see, is_open=opened):
    """The layer, the calls that its observer hands on, and the observer."""
    layer, seen = make_layer(processor), []
    observer = observing(processor, seen.append, source, is_open)
    layer.processor = observer
    return layer, seen, observer


def softmax(layer, mask=None):
    """Float64 ``[rows, heads, cells, keys]``."""
    split = [
        (x.double() @ to.weight.double().T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for x, to in ((HIDDEN, layer.to_q), (TEXT, layer.to_k))
    ]
    scores = split[0] @ split[1].mT / 4**0.5
    return (scores if mask is None else scores + mask.double()[:, None]).softmax(-1)


def call(layer, **given):
    return layer(HIDDEN, encoder_hidden_states=TEXT, **given)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all keys", "masked"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_what_a_processor_attends_to_is_seen(name, mask):
    layer, seen, _ = watched(PROCESSORS[name]())
    call(layer, attention_mask=mask)
    [made] = seen
    assert made.batch == 3
    attended = View().of(made)
    assert (attended.batch, attended.heads, attended.cells, attended.keys) == (3, 2, 6, 5)
    expected = softmax(layer, mask)
    torch.testing.assert_close(attended.every_head(None).double(), expected, atol=1e-6, rtol=0)
    found = View().of(made, (2, 0)).add_to(None, [3, 0]).double()
    torch.testing.assert_close(found, expected[[2, 0]][..., [3, 0]].sum(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [*PROCESSORS.values(), Sharp], ids=[*PROCESSORS, "Sharp"])
def test_the_output_is_the_very_tensor_of_the_processor(make):
    made = []

    class Noting(make if isinstance(make, type) else SlicedAttnProcessor):
        def __call__(self, *args, **kwargs):
            made.append(super().__call__(*args, **kwargs))
            return made[-1]

    layer, seen, _ = watched(Noting() if isinstance(make, type) else Noting(1))
    assert call(layer) is made[0] and len(seen) == 1


def test_an_observer_looks_like_the_processor_it_watches():
    layer, _, observer = watched(Sharp())
    assert inspect.signature(observer.__call__) == inspect.signature(Sharp().__call__)
    copied = copy.deepcopy(layer)
    assert type(copied.processor) is Sharp and copied.processor is not observer.inner
    # diffusers hands on what the signature names, and warns of the rest
    unlike, like = call(layer), call(layer, hot=3.0)
    assert not torch.equal(unlike, like)


def test_one_with_weights_is_a_module_and_its_weights_move():
    processor = IPAdapterAttnProcessor2_0(WIDTH, 12, num_tokens=(4,), scale=1.0)
    layer, seen, observer = watched(processor)
    assert type(observer) is ObservingModule
    names = [name for name, _ in layer.named_parameters()]
    assert any("to_k_ip" in name for name in names)
    layer.double()
    assert processor.to_k_ip[0].weight.dtype == torch.float64
    images = torch.randn(3, 1, 4, 12, generator=GENERATOR).double()
    layer(HIDDEN.double(), encoder_hidden_states=(TEXT.double(), [images]))
    attended = View().of(seen[0])
    assert attended.keys == KEYS + 4  # image prompts stand behind the text
    text = attended.every_head(None)[..., :KEYS].double()
    torch.testing.assert_close(text, softmax(layer), atol=1e-6, rtol=0)
    assert not isinstance(observing(Sharp(), seen.append, see, opened), nn.Module)


def test_calls_outside_of_a_pass_are_the_processors_alone():
    own, in_pass = threading.get_ident(), [False]
    layer, seen, observer = watched(
        AttnProcessor2_0(), is_open=lambda: in_pass[0] and threading.get_ident() == own
    )
    call(layer)
    assert not seen and not layer.to_q._forward_hooks
    in_pass[0] = True
    call(layer)
    assert len(seen) == 1
    thread = threading.Thread(target=call, args=(layer,))
    thread.start()
    thread.join()
    assert len(seen) == 1  # of the thread in which the pass is open only
    observer.end()
    call(layer)
    assert len(seen) == 1 and not layer.to_q._forward_hooks


@pytest.mark.parametrize("name", [*PROCESSORS, "Sharp"])
def test_observers_in_each_other_see_the_same(name):
    processor = PROCESSORS.get(name, Sharp)()
    layer, inner, observer = watched(processor)
    outer = []
    layer.processor = observing(observer, outer.append, see, opened)
    call(layer)
    assert len(inner) == len(outer) == 1
    found = [View().of(seen[0]).every_head(None) for seen in (inner, outer)]
    assert torch.equal(*found)


def test_one_source_takes_the_place_of_another():
    def nowhere(observer, attn, *args, **kwargs):
        assert isinstance(observer, ObservingProcessor) and attn is layer
        assert type(observer.inner) is AttnProcessor
        return observer.inner(attn, *args, **kwargs), None

    layer, seen, _ = watched(AttnProcessor(), source=nowhere)
    torch.testing.assert_close(call(layer), call(make_layer(AttnProcessor())), atol=0, rtol=0)
    assert not seen  # a source that saw nothing hands on nothing
