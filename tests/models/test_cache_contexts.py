"""The branch of a call by the name that the pipeline gives it, and by the tables without it."""

import copy
import pickle
from threading import Thread

import diffusers
import pytest
import torch
from diffusers.hooks import hooks
from diffusers.models.cache_utils import CacheMixin
from helpers.joint_models import inputs
from helpers.matrix import ROWS, WAYS, few_are_quick
from helpers.newer import newer
from helpers.transformer_rows import klein

from sdattn import AttentionStore, capture
from sdattn.follow.pass_reader import PassReader
from sdattn.models.cache_contexts import BRANCHES, CacheContexts
from sdattn.models.denoiser import find_denoiser
from sdattn.models.guidance import GuidanceWatch

IN_TURN = [row for row in ROWS if row.in_turn]
PROMPT, NEGATIVE = ("conditional",), ("unconditional",)


def noted(pipe, orders):
    """Note the order of each call, until what is returned is called."""
    reader = PassReader(find_denoiser(pipe))
    reader.listen()

    def note(model, args, kwargs):
        orders.append(reader.read(model, args, kwargs).order)

    hook = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    return lambda: (hook.remove(), reader.close())


def branches_of(row, pipe):
    """The branch of each call of a run, and the maps of both."""
    orders = []
    stop = noted(pipe, orders)
    with capture(pipe) as prompt, capture(pipe, branch="unconditional") as negative:
        row.run(pipe, WAYS[0])
    stop()
    return orders, prompt.maps, negative.maps


@pytest.mark.parametrize("row", few_are_quick(IN_TURN), ids=str)
def test_names_and_tables_tell_the_same_branches(row, monkeypatch):
    pipe = row.make()
    by_name, *named = branches_of(row, pipe)
    monkeypatch.setattr(CacheContexts, "order", lambda _self: None)
    by_table, *counted = branches_of(row, pipe)
    assert by_name == by_table == [PROMPT, NEGATIVE] * (len(by_name) // 2)
    for one, other in zip(named, counted, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_guidance_that_pauses_in_the_middle_of_a_run():
    """Each branch's calls, against the text states that they had."""
    pipe, texts, orders = klein(), [], []
    options = {"height": 64, "width": 64, "max_sequence_length": 24, "output_type": "latent"}
    options["num_inference_steps"] = 4

    def guide(pipe, step, _timestep, tensors):
        pipe._guidance_scale = 1.0 if step == 0 else 5.0  # no guidance in the second step alone
        return tensors

    pipe.transformer.register_forward_pre_hook(
        lambda _model, _args, given: texts.append(given["encoder_hidden_states"]), with_kwargs=True
    )
    with capture(pipe, steps="all") as store, capture(pipe, branch="unconditional") as negative:
        stop = noted(pipe, orders)
        pipe(prompt="a red cat", guidance_scale=5.0, callback_on_step_end=guide, **options)
        stop()
    of_prompt = [torch.equal(text, texts[0]) for text in texts]
    assert of_prompt == [True, False, True, True, False, True, False]
    assert orders == [PROMPT if one else NEGATIVE for one in of_prompt]
    assert len(store.passes) == 4
    assert len(negative.passes) == 3


def calls_by_name(pipe, names):
    """Call the model by hand under these names, None for none."""
    given = inputs("FLUX.2", pipe.transformer)
    for name in names:
        if name is None:
            pipe.transformer(**given)
        else:
            with pipe.transformer.cache_context(name):
                pipe.transformer(**given)


@torch.no_grad()
def test_a_name_counts_wherever_it_comes():
    pipe = klein()
    names = ["pred_uncond", "pred_cond_skip", "cond", "cond", "uncond_stg"]
    with capture(pipe) as store, capture(pipe, branch="unconditional") as negative:
        calls_by_name(pipe, names)
    assert (len(store.passes), store.skipped) == (2, 3)
    assert (len(negative.passes), negative.skipped) == (1, 4)


@torch.no_grad()
def test_a_name_of_both_or_of_nobody_leaves_it_to_the_tables():
    pipe = klein()
    watch = GuidanceWatch(pipe)
    watch.listen()
    with pipe.transformer.cache_context("cond_uncond"):
        assert [watch.order(None, number) for number in (0, 1)] == [PROMPT, NEGATIVE]
        with pytest.raises(ValueError, match="3 times.*step"):
            watch.order(None, 2)
    watch.close()


def test_the_innermost_name_counts_and_ends_with_its_block():
    pipe = klein()
    contexts = CacheContexts(pipe)
    with pipe.transformer.cache_context("cond"):
        with pytest.raises(RuntimeError, match="boom"), pipe.transformer.cache_context("uncond"):
            assert contexts.order() == NEGATIVE
            raise RuntimeError("boom")
        assert contexts.order() == PROMPT
        others = []
        thread = Thread(target=lambda: others.append(contexts.order()))
        thread.start()
        thread.join()
        assert others == [None]
    assert contexts.order() is None


def test_caches_go_on_getting_their_names(monkeypatch):
    pipe, got = klein(), []
    if not hasattr(hooks, "_set_cache_context"):
        pytest.skip(f"diffusers {diffusers.__version__} sets the context elsewhere")
    monkeypatch.setattr(
        "diffusers.hooks.hooks._set_cache_context",
        lambda module, context: got.append((module is pipe.transformer, context)),
    )
    contexts = CacheContexts(pipe)
    with (
        pytest.raises(RuntimeError, match="boom"),
        pipe.transformer.cache_context("cond", step_index=3),
    ):
        raise RuntimeError("boom")
    contexts.close()
    (ours, context), (again, left) = got
    assert (ours, again, left) == (True, True, None)
    assert (context.name, context.step_index) == ("cond", 3)


@pytest.mark.parametrize("own", [False, True])
def test_the_models_method_comes_back(own):
    pipe = klein()
    model = pipe.transformer
    if own:
        model.cache_context = mine = CacheMixin.cache_context.__get__(model)
    first, second = CacheContexts(pipe), CacheContexts(pipe)
    copied = copy.deepcopy(model)
    assert ("cache_context" in vars(copied)) and copied.cache_context.__self__ is (
        model if own else copied
    )
    saved = pickle.loads(pickle.dumps(model))
    assert saved.cache_context.__self__ is saved
    first.close()
    first.close()
    with model.cache_context("cond"):
        assert second.order() == PROMPT
        assert first.order() is None
    second.close()
    assert vars(model).get("cache_context") is (mine if own else None)


def test_a_method_that_was_set_meanwhile_stays():
    pipe = klein()
    contexts = CacheContexts(pipe)
    pipe.transformer.cache_context = mine = lambda name: None
    contexts.close()
    assert pipe.transformer.cache_context is mine


def test_a_store_lets_go_of_the_model():
    pipe = klein()
    store = AttentionStore(pipeline=pipe)
    assert "cache_context" in vars(pipe.transformer)
    store.detach()
    assert "cache_context" not in vars(pipe.transformer)


def test_the_names_are_those_of_diffusers():
    """Of its guiders; each says the branch, or that it is neither."""
    from diffusers import guiders

    newer("LTX2DFRPipeline")  # the newest guiders came with it
    kinds = [kind for kind in vars(guiders).values() if hasattr(kind, "_input_predictions")]
    names = {name for kind in kinds for name in kind._input_predictions or ()}
    assert {name for name in names if name not in BRANCHES} == set()
    assert {name for name in BRANCHES if name.startswith("pred_")} == names
