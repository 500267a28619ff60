"""One model in two threads: a capture sees the calls of its own thread, and runs take turns.

The second thread runs where it could do most harm, in the middle of a layer or of a run, so that
nothing here hangs on chance.
"""

import threading
from contextlib import nullcontext

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from helpers.explicit_processors import Returns
from helpers.joint_models import inputs
from helpers.tiers import tiered
from helpers.tiny_pipelines import small_pipeline
from helpers.transformer_rows import flux
from helpers.unet_rows import ip_adapter
from PIL import Image

import sdattn
from sdattn import TorchAttnProcessor, capture
from sdattn.models.denoiser import find_denoiser
from sdattn.models.pipeline_call import turn

PROMPT = "a red cat"
SMALL = {"num_inference_steps": 2, "height": 64, "width": 64}


def in_another_thread(work, wait=None):
    """What ``work`` gives in a thread of its own, which has ended, if it could, on return."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(wait)
    return thread, found


def meanwhile(layers, work):
    """Have another thread run ``work`` once, before the projections of each of some layers."""
    main, done, hooks = threading.get_ident(), [], []

    def before(*_):
        if threading.get_ident() == main:
            hooks.pop(0).remove()
            done.extend(in_another_thread(work)[1])

    for layer in layers:
        hooks.append(layer.to_k.register_forward_pre_hook(before))
    return done


PROCESSORS = {
    "default": AttnProcessor2_0,
    "AttnProcessor": AttnProcessor,
    "own": Returns,
    "TorchAttnProcessor": TorchAttnProcessor,
    "joint": None,
}


def model_and_inputs(kind):
    """A model, and what two runs call it with."""
    if kind == "joint":
        model = flux().transformer
        given = inputs("FLUX.1", model)
        return model, given, {**given, "hidden_states": given["hidden_states"].flip(1)}
    unet = small_pipeline().unet
    unet.set_attn_processor(PROCESSORS[kind]())
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 1, 4, 16, 16, generator=generator)
    text, other = torch.randn(2, 1, 77, 32, generator=generator)
    return (
        unet,
        {"sample": first, "timestep": 5, "encoder_hidden_states": text},
        {"sample": second, "timestep": 3, "encoder_hidden_states": other},
    )


@pytest.mark.parametrize("watched", tiered(["both", "one"]))
@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_capture_sees_the_calls_of_its_own_thread(kind, watched):
    model, own, other = model_and_inputs(kind)
    before = model.attn_processors

    @torch.no_grad()
    def call(given, captured):
        if not captured:
            return model(**given).sample, {}
        with capture(model) as store:
            image = model(**given).sample
        assert len(store.passes) == 1
        return image, dict(store.maps)

    expected, beside = call(own, True), call(other, watched == "both")
    layers = [layer.module for layer in find_denoiser(model).layers][:4]
    layers = layers[:1] if watched == "both" else layers
    found = meanwhile(layers, lambda: call(other, watched == "both"))
    during = call(own, True)
    assert len(found) == len(layers)
    for one, wanted in [(during, expected), *((one, beside) for one in found)]:
        assert torch.equal(one[0], wanted[0])
        assert one[1].keys() == wanted[1].keys()
        assert all(torch.equal(one[1][name], maps) for name, maps in wanted[1].items())
    assert all(model.attn_processors[name] is one for name, one in before.items())


def test_image_prompts_of_another_thread_are_not_taken_for_those_of_this():
    unet = ip_adapter(1)().unet
    own, other = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def maps(image, captured=True):
        given = torch.ones(1, 4, 16, 16), 5, torch.ones(1, 77, 32)
        with capture(unet) if captured else nullcontext() as store:
            unet(*given, added_cond_kwargs={"image_embeds": [image]})
        return dict(store.maps) if captured else {}

    expected = maps(own)
    layers = [layer.module for layer in find_denoiser(unet).layers if layer.kind == "cross"][:2]
    meanwhile(layers, lambda: maps(other, captured=False))
    found = maps(own)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_a_model_that_only_ran_in_another_thread_did_not_run():
    model, own, _ = model_and_inputs("default")
    with pytest.raises(sdattn.CaptureError, match="thread"):
        with capture(model):
            in_another_thread(lambda: model(**own))


def runs(pipe, options):
    """What the first word has in a run of each kind, by its name."""
    image = Image.new("RGB", (64, 64), (200, 30, 60))
    return {
        "generate": lambda: sdattn.generate(pipe, PROMPT, **options).heatmaps[0]["cat"].values,
        "explain": lambda: sdattn.explain(pipe, image, PROMPT).heatmaps[0]["cat"].values,
        "knockout": lambda: sdattn.knockout(pipe, PROMPT, "cat", **options).heatmap.values,
        "edit": lambda: (
            sdattn.edit.edit(pipe, PROMPT, "a red dog", **options).heatmaps[0]["cat"].values
        ),
    }


@pytest.mark.parametrize("kind", tiered(["generate", "explain", "knockout", "edit"]))
@pytest.mark.slow
def test_runs_of_one_pipeline_take_turns(kind):
    pipe = small_pipeline()
    expected = [runs(pipe, SMALL)[one]() for one in ("generate", kind)]
    started, found = [], []

    def start(pipeline, step, _timestep, tensors):
        if not started:
            started.append(threading.Thread(target=lambda: found.append(runs(pipe, SMALL)[kind]())))
            started[0].start()
            started[0].join(1)  # it could run to its end here
            assert started[0].is_alive()
        return tensors

    during = runs(pipe, {**SMALL, "callback_on_step_end": start})["generate"]()
    started[0].join()
    assert torch.equal(torch.as_tensor(during), torch.as_tensor(expected[0]))
    assert torch.equal(torch.as_tensor(found[0]), torch.as_tensor(expected[1]))


def test_pipelines_of_one_model_take_turns_and_those_of_two_do_not():
    one, other = small_pipeline(), small_pipeline()
    same = type(one)(**one.components, requires_safety_checker=False)

    def waits(pipe):
        lock = turn(pipe)
        got = lock.acquire(blocking=False)
        if got:
            lock.release()
        return not got

    with turn(one), turn(one):
        assert in_another_thread(lambda: waits(same))[1] == [True]
        assert in_another_thread(lambda: waits(other))[1] == [False]
    assert not waits(same)
