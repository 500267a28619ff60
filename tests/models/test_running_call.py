"""Where a run of a pipeline begins: two runs are never taken for one."""

import functools

import pytest
import torch
from diffusers import DDIMScheduler, HeunDiscreteScheduler, StableDiffusionPipeline
from helpers.chain_runs import make_pipe, run
from helpers.tiny_pipelines import make_pipeline, make_scheduler

import sdattn
from sdattn import AttentionStore, CaptureError, TorchAttnProcessor
from sdattn.models.running_call import RunningCall, caller_of, running_call

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
    assert store.cur_step == expected.cur_step == steps
    for key, maps in expected.attention_store.items():
        for ours, theirs in zip(store.attention_store[key], maps, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_capture_refuses_a_second_run_of_the_same_timesteps(steps):
    pipe = with_same_timesteps()
    run(pipe, ["a cat"], steps=steps)  # of which the capture knows nothing
    with pytest.raises(CaptureError, match="A second run of the pipeline"):
        with sdattn.capture(pipe):
            run(pipe, ["a cat"], steps=steps)
            run(pipe, ["a cat"], steps=steps)


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
def test_what_stands_for_a_call_is_the_same_in_all_of_it_and_in_no_other():
    pipe = make_pipeline()
    every = [called(pipe) for _ in range(20)]  # frames come to lie where others lay
    assert all(first is second is not None for first, second in every)
    assert len({id(first) for first, _ in every}) == 20
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
    assert inner[0] is inner[1]
    assert first is last is not inner[0]


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
    assert first is second is not None


def test_nothing_of_a_call_outlives_it():
    """What stands for it is alone, and holds no frame."""
    import gc

    [mark, _] = called(make_pipeline())
    assert type(mark) is RunningCall
    assert not {RunningCall, False}.symmetric_difference(gc.get_referents(mark))


class Asks(torch.nn.Module):
    """A model that asks who called it."""

    def forward(self, pipeline):
        return caller_of(pipeline)


class Small:
    """A pipeline as far as the callers of its model go."""

    scheduler = None

    def __init__(self, predict=None):
        self.model = Asks()
        self.predict = predict or self.model

    def __call__(self, callback_on_step_end):
        return self.predict(self), callback_on_step_end(self)


class Through(torch.nn.Module):
    def forward(self, pipeline):
        return pipeline.model(pipeline)

    def method(self, pipeline):
        return pipeline.model(pipeline)


def made_by_one_factory(number):
    def function(pipeline):
        return pipeline.model(pipeline) if number else None

    return function


def wraps_by_a_class(function):
    class Wrapped:
        def __call__(self, pipeline):
            return function(pipeline)

    return Wrapped()


@pytest.mark.parametrize(
    ("predict", "callback"),
    [
        (None, Through()),  # both are modules, which share the code of their calls
        (Through(), Through()),
        (Through().method, Through().method),
        (made_by_one_factory(1), made_by_one_factory(2)),
        (hiding(made_by_one_factory(1)), hiding(made_by_one_factory(2))),
        (wrapping(made_by_one_factory(1)), wrapping(made_by_one_factory(2))),
        (None, functools.partial(hiding(made_by_one_factory(1)))),
        (None, functools.cache(made_by_one_factory(1))),
        (None, wraps_by_a_class(made_by_one_factory(1))),
    ],
)
def test_a_callback_is_known_by_its_own_function(predict, callback):
    """Never by code that it shares with what the pipeline calls itself."""
    pipeline = Small(predict)
    own, of_callback = pipeline(callback)
    assert (own.kind, own.is_decorated) == ("pipeline", False)
    assert (of_callback.kind, of_callback.name) == ("stray", "`callback_on_step_end`")


def test_a_function_in_place_of_the_schedulers_step_is_no_pass():
    class Scheduler:
        def step(self, pipeline):
            return pipeline.model(pipeline)

    pipeline = Small()
    pipeline.scheduler = Scheduler()
    assert pipeline(pipeline.scheduler.step)[1].name == "`callback_on_step_end`"
    step = pipeline.scheduler.step
    pipeline.scheduler.step = hiding(step)
    pipeline.predict = lambda pipeline: pipeline.scheduler.step(pipeline)
    assert pipeline(lambda _: None)[0].name == "`scheduler.step`"


def test_a_pipeline_that_runs_without_gradients_is_told():
    class Decorated(Small):
        @torch.no_grad()
        def __call__(self, callback_on_step_end):
            return self.model(self)

    assert Decorated()(None).is_decorated
    assert caller_of(Small()).kind == "loop"
