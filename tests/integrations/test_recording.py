"""The recorder of integrations/comfyui, on a double of a sampler's run."""

import math

import pytest
import torch
from helpers import comfy_double as comfy

from integrations.comfyui import NODE_CLASS_MAPPINGS
from integrations.comfyui.recording import Recorder
from integrations.comfyui.runs import Settings

SIZE = (7, 10)  # odd sides in the lower level
ALL = Settings(second_half=False)
MODELS = {"unet": comfy.UNetModel, "flux": comfy.Flux}


def texts(*lengths):
    return [[comfy.states(seed, length), {}] for seed, length in enumerate(lengths, 1)]


def patcher(kind):
    return comfy.Patcher(comfy.Base(MODELS[kind]()))


def watched(model, settings=ALL):
    recorder = Recorder(settings)
    patched = model.clone()
    recorder.install(patched)
    return patched, recorder


def sampled(model, positive, negative, images=1, together=True, **options):
    guider = comfy.Guider(model, positive, negative, together)
    return guider.sample(comfy.latents(*SIZE, images), **options)


def kept(recorder, name="positive"):
    (run,) = recorder.runs.values()
    assert not run.problem, run.problem
    return [one for one in run.conditionings.values() if one.name == name]


class Spy:
    """An override that keeps queries and keys, with what it was told."""

    def __init__(self):
        self.calls = []

    def __deepcopy__(self, memo):
        return self

    def __call__(self, func, q, k, v, heads, mask=None, **told):
        split = told["skip_reshape"]
        options = dict(told["transformer_options"])
        self.calls.append((comfy.by_head(q, split), comfy.by_head(k, split), options))
        return func(q, k, v, heads, mask=mask, **told)


def explicit(calls, kind, text, is_joint):
    """Return the mean of the float64 softmax over calls and heads, by block."""
    found = {}
    for q, k, options in calls:
        kinds = options["cond_or_uncond"]
        if kind not in kinds or (not is_joint and q.shape[2] == k.shape[2]):
            continue
        probs = (q.double() @ k.double().mT / math.sqrt(q.shape[-1])).softmax(-1)
        probs = probs.chunk(len(kinds))[kinds.index(kind)].mean(1)
        probs = probs[:, text:, :text] if is_joint else probs.unflatten(2, (-1, text)).sum(2)
        block = options.get("block", (options.get("block_type"),))[0]
        found.setdefault(block, []).append(probs)
    return {block: torch.stack(maps).mean(0) for block, maps in found.items()}


def explicit_by_head(calls, text):
    """Return the mean of the positive text's float64 softmax over calls, by block."""
    found = {}
    for q, k, options in calls:
        if q.shape[2] == k.shape[2]:
            continue
        probs = (q.double() @ k.double().mT / math.sqrt(q.shape[-1])).softmax(-1)
        probs = probs.chunk(2)[options["cond_or_uncond"].index(0)][..., :text]
        found.setdefault(options["block"][0], []).append(probs)
    return {block: torch.stack(maps).mean(0) for block, maps in found.items()}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("kind", "lengths"), [("unet", (6, 9)), ("flux", (8, 8))])
def test_latents_are_equal_and_maps_are_the_softmax(kind, lengths, together):
    positive, negative = texts(*lengths)
    spy = Spy()
    model = patcher(kind)
    model.model_options["transformer_options"][comfy.OVERRIDE] = spy
    plain = sampled(model, [positive], [negative], images=2, together=together)
    spy.calls.clear()
    patched, recorder = watched(model)
    seen = sampled(patched, [positive], [negative], images=2, together=together)
    assert torch.equal(plain, seen)
    places = {"down": "input", "mid": "middle", "up": "output"}
    for number, name in enumerate(("positive", "negative")):
        (one,) = kept(recorder, name)
        expected = explicit(spy.calls, number, lengths[number], kind == "flux")
        means = one.sums.means()
        assert len(means) == len(expected)
        for (place, grid), maps in means.items():
            assert maps.shape == (2, math.prod(grid), lengths[number])
            assert (maps - expected[places.get(place, place)]).abs().max() < 1e-5


def test_the_override_is_there_only_while_the_model_runs():
    model = patcher("unet")
    patched, _ = watched(model)
    assert comfy.OVERRIDE not in patched.model_options["transformer_options"]
    assert not model.wrappers and len(patched.wrappers) == 4


def test_an_override_that_another_node_sets_later_is_chained():
    positive, negative = texts(6, 6)
    patched, recorder = watched(patcher("unet"))
    halved = patched.clone()
    halved.model_options["transformer_options"][comfy.OVERRIDE] = lambda func, *args, **told: (
        func(*args, **told) / 2
    )
    assert not torch.equal(
        sampled(halved, [positive], [negative]), sampled(patcher("unet"), [positive], [negative])
    )
    assert kept(recorder)[0].sums.totals


def test_several_texts_are_kept_apart_and_the_first_half_is_left_out():
    first, second, negative = texts(6, 6, 6)
    patched, recorder = watched(patcher("unet"), Settings())
    sampled(patched, [first, second], [negative], steps=4)
    other, one = kept(recorder)  # ComfyUI runs the last first
    assert torch.equal(one.text, first[0]) and torch.equal(other.text, second[0])
    assert one.steps == {0, 1, 2, 3} and set(one.sums.calls.values()) == {2}


def test_steps_are_kept_within_a_budget():
    positive, negative = texts(6, 6)
    mean = watched(patcher("unet"))
    sampled(mean[0], [positive], [negative])
    each = watched(patcher("unet"), Settings(second_half=False, every_step=True))
    sampled(each[0], [positive], [negative])
    (run,) = each[1].runs.values()
    assert {step for one in run.conditionings.values() for step in one.by_step} == {0, 1, 2}
    few = Settings(second_half=False, every_step=True, max_bytes=run.kept_apart // 2)
    less = watched(patcher("unet"), few)
    sampled(less[0], [positive], [negative])
    (run,) = less[1].runs.values()
    assert run.over_budget and run.kept_apart <= few.max_bytes
    for key, maps in kept(mean[1])[0].sums.means().items():
        whole = kept(less[1])[0].sums
        for sums in kept(less[1])[0].by_step.values():
            whole = whole + sums
        assert (whole.means()[key] - maps).abs().max() < 1e-6


def watched_by_head(**settings):
    positive, negative = texts(6, 6)
    spy = Spy()
    model = patcher("unet")
    model.model_options["transformer_options"][comfy.OVERRIDE] = spy
    patched, recorder = watched(model, Settings(second_half=False, every_head=True, **settings))
    sampled(patched, [positive], [negative], images=2)
    return recorder, spy.calls


def test_maps_of_each_head_are_its_softmax():
    recorder, calls = watched_by_head()
    by_head = kept(recorder)[0].sums.by_head()
    expected = explicit_by_head(calls, 6)
    places = {"down": "input", "mid": "middle", "up": "output"}
    assert len(by_head) == len(expected)
    for (place, grid), maps in by_head.items():
        assert maps.shape == (2, comfy.HEADS, math.prod(grid), 6)
        assert (maps - expected[places[place]]).abs().max() < 1e-5


@pytest.mark.parametrize("every_step", [False, True])
def test_heads_are_kept_within_a_budget_and_their_mean_beyond_it(every_step):
    whole, _ = watched_by_head(every_step=every_step)
    (run,) = whole.runs.values()
    cells = 7 * 10 + 4 * 5 + 7 * 10  # of the three layers
    steps = 3 if every_step else 1
    assert run.kept_apart == 2 * 2 * steps * comfy.HEADS * cells * 6 * 4  # texts, images, bytes
    limit = run.kept_apart // 2
    less, _ = watched_by_head(every_step=every_step, max_bytes=limit)
    (run,) = less.runs.values()
    assert run.kept_apart <= limit and (run.over_budget or run.notes)
    means = [
        sum(text.by_step.values(), start=text.sums).means() for text in (*kept(whole), *kept(less))
    ]
    for key, maps in means[0].items():
        assert (maps - means[1][key]).abs().max() < 1e-6


def test_the_image_s_self_attention_is_kept_on_request():
    positive, negative = texts(6, 6)
    patched, recorder = watched(patcher("unet"), Settings(second_half=False, spread=True))
    sampled(patched, [positive], [negative])
    (((_, grid), affinity),) = kept(recorder)[0].affinity.means().items()
    assert grid == SIZE and torch.allclose(affinity.sum(-1), torch.ones(1, 70), atol=1e-5)


def test_a_callback_is_called_and_a_stopped_run_is_told_from_a_whole_one():
    positive, negative = texts(6, 6)
    patched, recorder = watched(patcher("unet"))
    steps = []
    sampled(patched, [positive], [negative], callback=lambda step, *_: steps.append(step))
    (run,) = recorder.runs.values()
    assert steps == [0, 1, 2] and run.is_whole and run.step == 3

    def stop(step, *_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampled(patched, [positive], [negative], callback=stop)
    (run,) = recorder.runs.values()
    assert not run.is_whole and run.step == 1


def test_nothing_raises_while_the_sampler_runs(monkeypatch):
    from integrations.comfyui import summing

    def broken(*_, **__):
        raise torch.OutOfMemoryError("no memory left")

    positive, negative = texts(6, 6)
    plain = sampled(patcher("unet"), [positive], [negative])
    monkeypatch.setattr(summing, "add_attention", broken)
    patched, recorder = watched(patcher("unet"))
    assert torch.equal(sampled(patched, [positive], [negative]), plain)
    (run,) = recorder.runs.values()
    assert "no memory left" in run.problem


def test_a_model_whose_order_is_not_known_is_named():
    class Another(comfy.UNetModel):
        pass

    positive, negative = texts(6, 6)
    patched, recorder = watched(comfy.Patcher(comfy.Base(Another())))
    sampled(patched, [positive], [negative])
    (run,) = recorder.runs.values()
    assert "Another" in run.problem and "UNetModel" in run.problem


def test_nodes_tell_what_comfyui_asks_of_them():
    for node in NODE_CLASS_MAPPINGS.values():
        assert node.DESCRIPTION and node.CATEGORY == "sdattn" and node.SEARCH_ALIASES
        assert len(node.OUTPUT_TOOLTIPS) == len(node.RETURN_TYPES)
        told = node.INPUT_TYPES()
        for name, one in {**told["required"], **told["optional"]}.items():
            assert one[1]["tooltip"].endswith("."), (node, name)
        assert callable(getattr(node, node.FUNCTION))
