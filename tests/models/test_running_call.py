"""Where a run of a pipeline begins: two runs are never taken for one."""

import functools
import warnings

import pytest
import torch
from diffusers import DDIMScheduler, HeunDiscreteScheduler, StableDiffusionPipeline
from helpers.chain_runs import make_pipe, run
from helpers.tiny_pipelines import make_pipeline, make_scheduler

import sdattn
from sdattn import AttentionStore, CaptureError, CaptureWarning, TorchAttnProcessor
from sdattn.models.running_call import caller_of, running_call

SMALL = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}


class SameTimesteps(DDIMScheduler):
    """It hands out one object for every run of the same length."""

    def set_timesteps(self, num_inference_steps, device=None):
        kept = vars(self).setdefault("kept", {})
        super().set_timesteps(num_inference_steps, device)
        self.timesteps = kept.setdefault(num_inference_steps, self.timesteps)


def with_same_timesteps():
    pipe = make_pipe()
    pipe.scheduler = SameTimesteps.from_config(make_scheduler().config)
    return pipe


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_a_store_begins_anew_though_the_timesteps_are_those_of_the_run_before(steps):
    def attached(pipe):
        store = AttentionStore(pipeline=pipe)
        pipe.unet.set_attn_processor(TorchAttnProcessor(store))
        return store

    pipe, fresh = with_same_timesteps(), make_pipe()
    store, expected = attached(pipe), attached(fresh)
    run(pipe, ["a red cat"], steps=steps)
    before = pipe.scheduler.timesteps
    run(pipe, ["a dog"], steps=steps)
    assert pipe.scheduler.timesteps is before
    run(fresh, ["a dog"], steps=steps)
    if store._problem:  # the second call's frame lies where the first's lay
        with pytest.raises(CaptureError, match="2 times in a step"):
            store.get_average_attention()
        return
    assert store.cur_step == expected.cur_step == steps
    for key, maps in expected.attention_store.items():
        for ours, theirs in zip(store.attention_store[key], maps, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_capture_refuses_a_second_run_of_the_same_timesteps(steps):
    """As a second run, or as second calls of its steps where the call's frame lies the same."""
    pipe = with_same_timesteps()
    run(pipe, ["a cat"], steps=steps)  # of which the capture knows nothing
    said = "A second run of the pipeline|2 times in a step"
    with pytest.raises(CaptureError, match=said), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        with sdattn.capture(pipe) as store:
            run(pipe, ["a cat"], steps=steps)
            run(pipe, ["a cat"], steps=steps)
        store.heatmaps()


def test_a_loop_of_ones_own_is_one_run_for_as_long_as_its_schedule():
    pipe = make_pipe()
    store = AttentionStore(pipeline=pipe, guidance=None)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    for _ in range(2):
        pipe.scheduler.set_timesteps(3)
        for t in pipe.scheduler.timesteps:
            with torch.no_grad():
                pipe.unet(torch.randn(1, 4, 16, 16), t, torch.randn(1, 77, 32))
        assert store.cur_step == 3


@pytest.mark.slow
def test_a_second_order_scheduler_makes_one_run():
    pipe = make_pipe()
    pipe.scheduler = HeunDiscreteScheduler.from_config(make_scheduler().config)
    store = AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    for _ in range(2):
        run(pipe, ["a cat"], steps=3)
        assert store.cur_step == 5


def called(pipe, **options):
    """What stands for the call of a pipeline at each of its passes."""
    seen = []
    hook = pipe.unet.register_forward_pre_hook(lambda *_: seen.append(running_call(pipe)))
    pipe("a cat", **{**SMALL, **options})
    hook.remove()
    return seen


@pytest.mark.slow
def test_what_stands_for_a_call_is_the_same_in_all_of_it():
    pipe = make_pipeline()
    every = [called(pipe) for _ in range(3)]
    assert all(first == second is not None for first, second in every)
    assert running_call(pipe) is running_call(None) is None


@pytest.mark.slow
def test_of_calls_within_each_other_the_innermost_counts():
    pipe, inner = make_pipeline(), []

    def draw_another(_pipe, step, _timestep, tensors):
        if not step:
            inner.extend(called(pipe))
        return tensors

    first, *of_the_inner, last = called(pipe, callback_on_step_end=draw_another)
    assert of_the_inner == inner
    assert inner[0] == inner[1]
    assert first == last != inner[0]


def test_another_pipeline_of_the_same_model_is_another():
    pipe = make_pipeline()
    other = type(pipe)(**pipe.components, requires_safety_checker=False)
    seen = []
    pipe.unet.register_forward_pre_hook(
        lambda *_: seen.append((running_call(pipe), running_call(other)))
    )
    other("a cat", **SMALL)
    assert all(ours is None and theirs is not None for ours, theirs in seen)


def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def hiding(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


class Extended(StableDiffusionPipeline):
    def __call__(self, prompt, **options):
        return super().__call__(prompt, **options)


class Decorated(StableDiffusionPipeline):
    @wrapping
    def __call__(this, prompt, **options):  # noqa: N805
        return StableDiffusionPipeline.__call__(this, prompt, **options)


class Hidden(StableDiffusionPipeline):
    __call__ = hiding(StableDiffusionPipeline.__call__)


@pytest.mark.parametrize("kind", [Extended, Decorated, Hidden])
def test_calls_of_pipelines_of_ones_own_are_seen(kind):
    first, second = called(make_pipeline(kind))
    assert first == second is not None


class Asks(torch.nn.Module):
    """A model that asks who called it."""

    def forward(self, pipeline):
        return caller_of(pipeline)


class Small:
    """A pipeline as far as the callers of its model go."""

    scheduler = None

    def __init__(self):
        self.model = Asks()

    def __call__(self, callback):
        return self.model(self), callback(self)


def test_the_caller_is_the_innermost_call_of_a_pipeline():
    pipeline = Small()
    own, of_callback = pipeline(lambda pipeline: pipeline.model(pipeline))
    assert own.pipeline is of_callback.pipeline is pipeline
    assert own.call == of_callback.call is not None
    assert own.variables["self"] is pipeline
    by_hand = pipeline.model(pipeline)
    assert by_hand.pipeline is None and "Asks.forward" in by_hand.name


def test_another_pipeline_that_calls_the_model_is_named():
    class DiffusionPipeline(Small):
        def __call__(self, other):
            return self.model(other)

    caller = DiffusionPipeline()(Small())
    assert (type(caller.pipeline), caller.name) == (DiffusionPipeline, "DiffusionPipeline.__call__")
