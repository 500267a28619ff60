"""Other nodes that attend in their own way, or ask what watches: the image stays theirs, and what
the maps lack is said."""

import functools
import inspect
import logging
import sys
import types

import pytest
import torch
from helpers import comfy_double as comfy
from helpers.tiny_tokenizers import tiny_t5

from integrations.comfyui.reading import Asked, heatmaps
from integrations.comfyui.recording import Recorder
from integrations.comfyui.runs import Settings
from integrations.comfyui.stand_in import StandIn

SIZE = (7, 10)
TEXTS = [[comfy.states(seed, 77), {}] for seed in (1, 2)]


def sampled(patcher):
    return comfy.Guider(patcher, TEXTS[:1], TEXTS[1:]).sample(comfy.latents(*SIZE))


def compared(patcher):
    """Sample without the recorder and with it, to the same bits; return its run."""
    recorder = Recorder(Settings(second_half=False))
    watched = patcher.clone()
    recorder.install(watched)
    assert torch.equal(sampled(patcher), sampled(watched))
    (run,) = recorder.runs.values()
    assert not run.problem, run.problem
    return recorder, run


def flux(patch=None, block=("double_block", 0), kind=comfy.Patcher):
    patcher = kind(comfy.Base(comfy.Flux()))
    if patch is not None:
        patcher.set_model_patch_replace(patch, "dit", *block)
    return patcher


def attends_itself(args, extra):
    tokens = args["img"]
    given = (comfy.by_head(y, False) for y in (tokens, tokens @ args["weights"], tokens))
    return {"img": tokens + comfy.plain(*given, comfy.HEADS, skip_reshape=True)}


def sets_an_override(args, extra):
    """As FreeFuse does around a block, without calling the override that it found."""
    options = args["transformer_options"]
    found = options.get(comfy.OVERRIDE)
    options[comfy.OVERRIDE] = lambda func, *given, **told: func(*given, **told)
    try:
        return extra["original_block"](args)
    finally:
        options.pop(comfy.OVERRIDE)
        if found is not None:
            options[comfy.OVERRIDE] = found


def leaves_it_out(args, extra):
    return args


@pytest.mark.parametrize("patch", [attends_itself, sets_an_override, leaves_it_out])
@pytest.mark.parametrize("kind", ["double", "single"])
def test_a_block_that_shows_no_attention_is_named(patch, kind, caplog):
    recorder, run = compared(flux(patch, (f"{kind}_block", 0)))
    named, fewer = run.notes
    assert f"{__name__}.{patch.__name__}" in named and "At most 1 of 2 layers" in fewer
    (other,) = {"double", "single"} - {kind}
    positive = next(text for text in run.conditionings.values() if text.name == "positive")
    assert [place for place, _ in positive.sums.means()] == [other]
    clip = comfy.Clip(t5xxl=comfy.Part(tiny_t5(), 77))
    with caplog.at_level(logging.WARNING):
        heatmaps(recorder, Asked(clip, "a cat", torch.rand(1, 56, 80, 3)))
    assert named in caplog.text and fewer in caplog.text


def test_a_block_that_is_replaced_and_shows_its_attention_is_as_any_other():
    _, run = compared(flux(lambda args, extra: extra["original_block"](args)))
    assert not run.notes and (run.most, run.layers) == (2, 2)


def test_a_layer_whose_forward_is_replaced_is_counted():
    class Patched(comfy.Flux):
        def block(self, args):
            is_first = args["transformer_options"]["block_type"] == "double"
            return attends_itself(args, {}) if is_first else super().block(args)

    Patched.__name__ = "Flux"
    _, run = compared(comfy.Patcher(comfy.Base(Patched())))
    (note,) = run.notes
    assert "At most 1 of 2 layers" in note


def test_a_cache_that_leaves_layers_out_in_some_calls_is_no_lack():
    calls = iter(range(99))

    def cached(args, extra):
        return extra["original_block"](args) if next(calls) == 0 else args

    patcher = flux(cached)
    recorder = Recorder(Settings(second_half=False))
    recorder.install(patcher)
    sampled(patcher)
    (run,) = recorder.runs.values()
    assert not any("At most" in note for note in run.notes)


@pytest.mark.parametrize("shows", ["nothing", "an image", "all"])
def test_replaced_attention_that_does_not_show_the_text_is_taken_from_what_it_was_given(shows):
    def adapter(query, key, value, options):
        image = torch.ones_like(key)[:, :4]
        told = [options if shows == "all" else None, None if shows == "nothing" else options]
        of_text, more = (
            comfy.attention(query, source, source, comfy.HEADS, transformer_options=option)
            for source, option in zip((key, image), told, strict=True)
        )
        return of_text + more

    plain = comfy.Patcher(comfy.Base(comfy.UNetModel()))
    patcher = plain.clone()
    patcher.set_model_patch_replace(adapter, "attn2", "middle", 0)
    _, run = compared(patcher)
    assert (run.most, run.layers) == (3, 3)
    assert any("does not show it" in note for note in run.notes) == (shows != "all")
    positive = next(text for text in run.conditionings.values() if text.name == "positive")
    assert {place for place, _ in positive.sums.means()} == {"down", "mid", "up"}


class Kernel:
    """A node's own kernel of one block, off if it meets an override that it does not know."""

    def __init__(self, is_known):
        self.is_known = is_known
        self.answers = []

    def __call__(self, args, extra):
        override = args["transformer_options"].get(comfy.OVERRIDE)
        self.answers.append(override is None or bool(self.is_known(override)))
        made = extra["original_block"](args)
        return {"img": 2 * made["img"]} if self.answers[-1] else made


def marked(func, *args, **kwargs):
    return func(*args, **kwargs)


marked.kernel = "sparse"


def closing_over(previous):
    def override(func, *args, **kwargs):
        return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)

    return override


class Dispatcher:
    def __call__(self, func, *args, **kwargs):
        return func(*args, **kwargs)


def previous_of(override):
    code = getattr(override, "__code__", None)
    names = getattr(code, "co_freevars", ())
    cells = dict(zip(names, getattr(override, "__closure__", None) or (), strict=True))
    return cells["previous"].cell_contents if "previous" in cells else None


@pytest.mark.parametrize(
    ("override", "is_known"),
    [
        (marked, lambda found: getattr(found, "kernel", None) == "sparse"),
        (marked, lambda found: hasattr(found, "kernel")),
        (marked, lambda found: found.__qualname__ == "marked" and found.__module__ == __name__),
        (marked, lambda found: found.__code__ is marked.__code__),
        (marked, lambda found: found in {marked}),
        (marked, lambda found: found == marked),
        (marked, inspect.isfunction),
        (closing_over(marked), lambda found: previous_of(found) is marked),
        (closing_over(marked), lambda found: inspect.getclosurevars(found).nonlocals),
        (closing_over(marked), lambda found: inspect.signature(found).parameters["func"]),
        (Dispatcher(), lambda found: isinstance(found, Dispatcher)),
        (functools.partial(marked), lambda found: found.func is marked),
    ],
)
def test_a_kernel_that_knows_the_override_stays_on_when_it_is_watched(override, is_known):
    kernel = Kernel(is_known)
    patcher = flux(kernel)
    patcher.model_options["transformer_options"][comfy.OVERRIDE] = override
    _, run = compared(patcher)
    assert kernel.answers == [True] * 6 and not run.notes and run.most == 2


def test_where_no_override_was_the_core_s_own_choice_is_known(monkeypatch):
    """A kernel that knows ComfyUI's Model Attention Backend by its code and what it chose."""
    module = types.ModuleType("comfy.ldm.modules.attention")
    module.optimized_attention = comfy.attention
    for name in ("comfy", "comfy.ldm", "comfy.ldm.modules"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    choose = comfy.ChoosingPatcher.set_model_optimized_attention

    def is_known(found):
        (cell,) = found.__closure__
        return found.__code__ in choose.__code__.co_consts and cell.cell_contents is comfy.attention

    kernel = Kernel(is_known)
    _, run = compared(flux(kernel, kind=comfy.ChoosingPatcher))
    assert kernel.answers == [True] * 6 and not run.notes and run.most == 2


def test_who_asks_where_nothing_can_be_known_is_named():
    kernel = Kernel(lambda found: getattr(found, "kernel", None) == "sparse")
    patcher = flux(kernel)
    recorder = Recorder(Settings(second_half=False))
    recorder.install(patcher)
    sampled(patcher)
    (run,) = recorder.runs.values()
    (note,) = run.notes
    assert kernel.answers == [False] * 3
    assert __name__ in note and "`kernel`" in note and "without" in note


def test_a_stand_in_is_itself_where_nothing_is_behind():
    alone = StandIn(len, None)
    assert alone("four") == 4 and alone == alone and alone != StandIn(len, None)
    assert isinstance(alone, StandIn) and hash(alone) == hash(alone)
    assert not hasattr(alone, "__code__")


def test_a_question_of_the_core_or_torch_is_no_other_node_s():
    told = []
    alone = StandIn(len, None, lambda *one: told.append(one))
    for module in ("comfy.ldm.modules.attention", "torch._dynamo", "custom_nodes.sparse"):
        assert not eval("hasattr(alone, 'mark')", {"__name__": module, "alone": alone})
    assert told == [("custom_nodes.sparse", "mark")]
