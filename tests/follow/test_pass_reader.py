"""Which call of a model is a pass of the run: all others run untouched and are not counted.

Each case is compared with the same run without the other calls. Where the pipeline's own code makes
the others, maps are refused, and an edit is in all of them.
"""

import functools
import warnings
from contextlib import contextmanager

import pytest
import torch
from diffusers import (
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from helpers.chain_runs import make_pipe
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_small_unet
from helpers.transformer_rows import sd3

import sdattn
from sdattn import AttentionStore, CaptureError, CaptureWarning, TorchAttnProcessor
from sdattn.control.removal import Removal
from sdattn.edit import register_attention_control

PROMPT = "a red cat"
SMALL = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "latent"}


def small_pipe():
    return make_pipe(make_small_unet())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(pipe, prompt=PROMPT, **options):
    return pipe(prompt, generator=seeded(), **{**SMALL, **options}).images


def states(pipe, prompt=PROMPT):
    """The negative and the prompt's text states."""
    positive, negative = pipe.encode_prompt(prompt, "cpu", 1, True, negative_prompt="")
    return negative, positive


def same_maps(found, expected):
    assert list(found.maps) == list(expected.maps)
    for name, maps in expected.maps.items():
        torch.testing.assert_close(found.maps[name], maps, atol=1e-6, rtol=0)


def called_by_hand(pipe, batch=2, t=7):
    sample = torch.randn(batch, 4, 16, 16, generator=seeded(5))
    text = torch.randn(batch, 77, 32, generator=seeded(6))
    with torch.no_grad():
        return pipe.unet(sample, t, encoder_hidden_states=text).sample


def of_a_callback(pipe):
    def callback(pipe, _step, _t, tensors):
        called_by_hand(pipe)
        return tensors

    return lambda: draw(pipe, callback_on_step_end=callback)


class Called:
    """A callback that is an object."""

    def __call__(self, pipe, _step, _t, tensors):
        called_by_hand(pipe)
        return tensors


def of_an_object(pipe):
    return lambda: draw(pipe, callback_on_step_end=Called())


def of_a_partial(pipe):
    def callback(extra, pipe, _step, t, tensors):
        called_by_hand(pipe, extra, t)
        return tensors

    return lambda: draw(pipe, callback_on_step_end=functools.partial(callback, 2))


def of_a_method(pipe):
    """A subclass hands a method of its own to the call that it inherits."""

    class Watching(StableDiffusionPipeline):
        def __call__(self, *args, **options):
            return super().__call__(*args, callback_on_step_end=self.on_step, **options)

        def on_step(self, _pipe, _step, _t, tensors):
            called_by_hand(self)
            return tensors

    pipe.__class__ = Watching
    return lambda: draw(pipe)


def of_several(pipe):
    def callback(pipe, _step, _t, tensors):
        called_by_hand(pipe)
        return tensors

    return lambda: draw(pipe, callback_on_step_end=MultiPipelineCallbacks([Swallow(callback)]))


class Swallow(PipelineCallback):
    """A callback as diffusers has it, around a function."""

    tensor_inputs = ("latents",)

    def __init__(self, function):
        super().__init__(1.0)
        self.function = function

    def callback_fn(self, pipe, step, t, tensors):
        return self.function(pipe, step, t, tensors)


def of_another_batch(pipe):
    def callback(pipe, _step, t, tensors):
        called_by_hand(pipe, 3, t)
        return tensors

    return lambda: draw(pipe, callback_on_step_end=callback)


def of_a_guidance_function(pipe):
    """The scheduler's step is wrapped, as classifiers that guide do it."""
    step = pipe.scheduler.step

    def guided(noise, t, latents, **options):
        found = step(noise, t, latents, **options)
        called_by_hand(pipe, 2, t)
        return found

    def run():
        pipe.scheduler.step = guided
        try:
            return draw(pipe)
        finally:
            del pipe.scheduler.step

    return run


def sharing(pipe):
    other = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    image = torch.rand(1, 3, 64, 64, generator=seeded(3))
    return other, lambda: other(
        "a dog", image=image, strength=0.7, num_inference_steps=4, output_type="latent",
        generator=seeded(4),
    )  # fmt: skip


def before_a_hires_fix(pipe, own_scheduler=True):
    other, again = sharing(pipe)
    if own_scheduler:
        other.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    return lambda: (draw(pipe), again())[0]


def before_one_that_shares_the_scheduler(pipe):
    return before_a_hires_fix(pipe, own_scheduler=False)


def around_another_pipeline(pipe):
    """ADetailer and the like, called from a callback."""
    other, again = sharing(pipe)
    other.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)

    def callback(_pipe, step, _t, tensors):
        if step == 1:
            again()
        return tensors

    return lambda: draw(pipe, callback_on_step_end=callback)


def after_a_warm_up(pipe):
    return lambda: (called_by_hand(pipe), draw(pipe))[1]


# Calls beside a run, and who is named as their caller.
BESIDE = {
    of_a_callback: "`callback_on_step_end`",
    of_an_object: "`callback_on_step_end`",
    of_a_partial: "`callback_on_step_end`",
    of_a_method: "`callback_on_step_end`",
    of_several: "`callback_on_step_end`",
    of_another_batch: "`callback_on_step_end`",
    of_a_guidance_function: "`scheduler.step`",
    before_a_hires_fix: "StableDiffusionImg2ImgPipeline.__call__",
    before_one_that_shares_the_scheduler: "StableDiffusionImg2ImgPipeline.__call__",
    around_another_pipeline: "`callback_on_step_end`",
    after_a_warm_up: "called_by_hand",
}
TOLD = r"call\(s\) of the UNet2DConditionModel were not part of this run: from "


@contextmanager
def captured(pipe):
    with sdattn.capture(pipe) as store:
        yield lambda: [*store.maps.values(), len(store.passes)]


@contextmanager
def attached(pipe):
    store = AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    yield lambda: [*store.get_average_attention().values(), store.cur_step]


@contextmanager
def registered(pipe):
    controller = Recording()
    with register_attention_control(pipe, controller):
        yield lambda: controller.rows


FOLLOWERS = (captured, attached, registered)
CASES = [
    (beside, follower)
    for beside in BESIDE
    for follower in FOLLOWERS
    # whoever registers a controller sees the loops of their own
    if beside is not after_a_warm_up or follower is captured
]


def followed(follower, pipe, run):
    """The image of a run and what a follower kept of it."""
    with follower(pipe) as kept:
        image = run()
    return [image, *kept()]


@pytest.mark.parametrize(
    ("beside", "follower"), tiered(CASES, quick=4), ids=lambda one: one.__name__
)
def test_the_passes_of_the_run_alone_count_and_who_called_besides_is_named(beside, follower):
    pipe, other = small_pipe(), small_pipe()
    expected = followed(follower, pipe, lambda: draw(pipe))
    run = beside(other)
    with pytest.warns(CaptureWarning, match=TOLD + ".*" + BESIDE[beside]):
        found = followed(follower, other, run)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class Recording:
    """A controller of a user's own that keeps how many rows each call has."""

    num_att_layers = 0

    def __init__(self):
        self.rows = []

    def __call__(self, attn, is_cross, place):
        self.rows.append(len(attn))
        return attn


class Zero(Recording):
    """A controller that leaves no attention."""

    def __call__(self, attn, is_cross, place):
        super().__call__(attn, is_cross, place)
        return attn * 0


@pytest.mark.slow
def test_what_a_callback_calls_keeps_its_values():
    """The calls that are not counted run untouched, under an edit too."""

    pipe, found = small_pipe(), []

    def callback(pipe, _step, _t, tensors):
        found.append(called_by_hand(pipe))
        return tensors

    draw(pipe, callback_on_step_end=callback)
    expected = list(found)
    found.clear()
    with pytest.warns(CaptureWarning):
        with register_attention_control(pipe, Zero()):
            draw(pipe, callback_on_step_end=callback)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


class Reference(StableDiffusionPipeline):
    """A reference pass before each pass, as the community's reference pipelines run it; its result
    is not used."""

    again = 1
    before = True

    def __call__(self, prompt, steps=3, guided=True):
        positive, negative = self.encode_prompt(prompt, "cpu", 1, guided, negative_prompt="")
        text = torch.cat([negative, positive]) if guided else positive
        self._guidance_scale = 4.0 if guided else 1.0
        latents = torch.randn(1, 4, 8, 8, generator=seeded())
        self.scheduler.set_timesteps(steps)
        for t in self.scheduler.timesteps:
            reference = torch.randn(len(text), 4, 8, 8, generator=seeded(9))
            if self.before:
                self.unet(reference, t, encoder_hidden_states=text, return_dict=False)[0]
            for _ in range(self.again):
                both = torch.cat([latents] * (1 + guided))
                noise = self.unet(both, t, encoder_hidden_states=text).sample
            if guided:
                without, noise = noise.chunk(2)
                noise = without + 4 * (noise - without)
            latents = self.scheduler.step(noise, t, latents).prev_sample
        return latents


class Alone(Reference):
    before = False


class Recurrent(Alone):
    """Self-recurrence: each step's pass is run several times."""

    again = 3


def of_kind(kind):
    pipe = small_pipe()
    return kind(**pipe.components, requires_safety_checker=False)


MORE = [(Reference, 1), (Recurrent, 0)]  # with the call that makes the image


@torch.no_grad()
@pytest.mark.parametrize("guided", tiered([True, False]))
@pytest.mark.parametrize(("kind", "step_call"), tiered(MORE))
@pytest.mark.slow
def test_a_subclass_that_calls_the_model_more_often_than_once_a_step(kind, step_call, guided):
    plain, pipe = of_kind(Alone), of_kind(kind)
    with sdattn.capture(plain) as expected:
        plain(PROMPT, guided=guided)
    with sdattn.capture(pipe) as store:
        pipe(PROMPT, guided=guided)
    for read in (lambda: store.maps, lambda: sdattn.heatmaps(store, pipe, PROMPT)):
        with pytest.raises(CaptureError, match=f"{kind.__name__} called its .*step_call=0"):
            read()
    with sdattn.capture(pipe, step_call=step_call) as store:
        pipe(PROMPT, guided=guided)
    assert len(store.passes) == 3
    same_maps(store, expected)


@torch.no_grad()
def test_a_step_without_the_call_that_counts_is_missed():
    pipe = of_kind(Recurrent)
    with sdattn.capture(pipe, step_call=2) as store:
        pipe(PROMPT)
    assert len(store.passes) == 3
    assert store.maps
    pipe.again = 2
    with pytest.raises(CaptureError, match=r"3 step\(s\) had too few calls"):
        with sdattn.capture(pipe, step_call=2):
            pipe(PROMPT)
    with pytest.raises(ValueError, match="step_call"):
        sdattn.capture(pipe, step_call=-1).__enter__()


@torch.no_grad()
@pytest.mark.parametrize("way", ["store", "registered"])
@pytest.mark.parametrize("kind", tiered([Recurrent, Reference]), ids=lambda kind: kind.__name__)
def test_an_edit_is_in_every_call_of_a_step(kind, way):
    """The steps of the store are then refused, and the image is as if each layer were edited."""

    class Half(AttentionStore):
        def forward(self, attn, is_cross, place_in_unet):
            super().forward(attn, is_cross, place_in_unet)
            return attn * 0.5

    class Halved:
        num_att_layers = 0

        def __call__(self, attn, is_cross, place):
            return attn * 0.5

    pipe, other = of_kind(kind), of_kind(kind)
    other.unet.set_attn_processor(TorchAttnProcessor(Halved()))
    expected = other(PROMPT)
    if way == "store":
        store = Half(pipeline=pipe, guidance=None)
        pipe.unet.set_attn_processor(TorchAttnProcessor(store))
        found = pipe(PROMPT)
    else:
        store = Half(guidance=None)
        with pytest.warns(CaptureWarning, match=f"{kind.__name__} called its"):
            with register_attention_control(pipe, store):
                found = pipe(PROMPT)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    with pytest.raises(CaptureError, match=f"{kind.__name__} called its"):
        store.get_average_attention()


@torch.no_grad()
def test_a_knockout_is_in_every_call_of_a_step():
    found = []
    for kind in (Alone, Recurrent):
        pipe = of_kind(kind)
        with Removal(pipe, [(3,)], 77, steps=(0.0, 0.7)):
            found.append(pipe(PROMPT))
    plain, recurrent = found
    assert not torch.allclose(plain, of_kind(Alone)(PROMPT), atol=1e-4)
    torch.testing.assert_close(recurrent, plain, atol=1e-5, rtol=0)


def decorated(function):
    def wrapper(*args, **options):
        return function(*args, **options)

    return wrapper


@pytest.mark.parametrize("decorator", tiered([torch.no_grad(), decorated]), ids=["torch's", "own"])
def test_a_callback_is_not_known_by_its_decorator(decorator):
    """The pipeline's own method has the same one, and with it the same code."""

    class Predicting(Alone):
        @decorator
        def predict(self, *args, **options):
            return self.unet(*args, **options)

        def __call__(self, prompt, callback_on_step_end):
            text = torch.cat(states(self, prompt))
            self._guidance_scale = 4.0
            self.scheduler.set_timesteps(2)
            latents = torch.randn(1, 4, 8, 8, generator=seeded())
            for t in self.scheduler.timesteps:
                both = torch.cat([latents] * 2)
                noise = self.predict(both, t, encoder_hidden_states=text).sample
                latents = self.scheduler.step(noise[1:], t, latents).prev_sample
                callback_on_step_end(self)
            return latents

    @decorator
    def nothing(pipe):
        pass

    @decorator
    def calls(pipe):
        pipe.predict(torch.randn(2, 4, 16, 16), 7, torch.randn(2, 77, 32))

    pipe = of_kind(Predicting)
    with sdattn.capture(pipe) as expected:  # each step of it with the graph of those before
        image = pipe(PROMPT, nothing)
    assert len(expected.passes) == 2
    with pytest.warns(CaptureWarning, match="2 " + TOLD + "`callback_on_step_end`"):
        with sdattn.capture(pipe) as store:
            found = pipe(PROMPT, calls)
    same_maps(store, expected)
    torch.testing.assert_close(found, image, atol=1e-5, rtol=0)
    images = []
    for callback in (nothing, None):
        controller = Zero()
        with register_attention_control(pipe, controller):
            images.append(pipe(PROMPT, callback or (lambda pipe: None)))
        assert len(controller.rows) == 2 * controller.num_att_layers
    torch.testing.assert_close(*images, atol=1e-5, rtol=0)
    assert not torch.allclose(images[0], image, atol=1e-4)


def test_calls_for_a_gradient_are_seen_by_an_attached_store():
    """Attend-and-Excite in a pipeline: first the prompt alone, for a gradient."""

    class Excited(StableDiffusionPipeline):
        def __call__(self, prompt, store):
            self._guidance_scale = 1.0
            text = self.encode_prompt(prompt, "cpu", 1, False)[0]
            latents, found = torch.randn(1, 4, 8, 8, generator=seeded()), []
            self.scheduler.set_timesteps(2)
            for t in self.scheduler.timesteps:
                latents = latents.detach().requires_grad_()
                self.unet(latents, t, encoder_hidden_states=text)
                loss = store.last_step["up_cross"][0][..., 2].sum()
                found.append(torch.autograd.grad(loss, latents)[0])
                with torch.no_grad():
                    noise = self.unet(latents, t, encoder_hidden_states=text).sample
                    latents = self.scheduler.step(noise, t, latents).prev_sample
            return found

    pipe = of_kind(Excited)
    store = AttentionStore(pipeline=pipe, guidance=None, save_global_store=True)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    assert all(gradient.abs().max() > 0 for gradient in pipe(PROMPT, store))


def test_a_second_order_scheduler_has_all_its_passes():
    pipe = small_pipe()
    pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        with sdattn.capture(pipe, steps="all") as store:
            draw(pipe)
    assert len(store.passes) == 5


def own_loop(pipe, rows, steps=2):
    """A loop around the UNet, with text states in these rows, and what each pass had."""
    pipe.scheduler.set_timesteps(steps)
    text = torch.cat(rows)
    with torch.no_grad():
        for t in pipe.scheduler.timesteps:
            sample = torch.randn(1, 4, 8, 8, generator=seeded(int(t))).expand(len(text), -1, -1, -1)
            pipe.unet(sample, t, encoder_hidden_states=text)


@pytest.mark.parametrize("before", tiered(["fresh", "unguided", "guided"], quick=2))
@pytest.mark.slow
def test_a_loop_of_ones_own_says_where_the_unconditional_rows_are(before):
    """What a call of the pipeline left behind is never asked."""
    pipe = small_pipe()
    negative, positive = states(pipe)
    with sdattn.capture(pipe.unet) as alone:
        own_loop(pipe, [positive])
    if before != "fresh":
        draw(pipe, guidance_scale=1.0 if before == "unguided" else 4.0)
    with pytest.raises(CaptureError, match=r"No pass.*own_loop.*guidance='batch'"):
        with sdattn.capture(pipe):
            own_loop(pipe, [negative, positive])
    with sdattn.capture(pipe, guidance="batch") as store:
        own_loop(pipe, [negative, positive])
    assert store.branches == ("conditional",)
    same_maps(store, alone)
    with sdattn.capture(pipe, guidance="batch", branch="unconditional") as store:
        own_loop(pipe, [positive, negative])  # the other way round
    same_maps(store, alone)
    with sdattn.capture(pipe, guidance=None) as store:
        own_loop(pipe, [positive, positive])
    assert store.images == 2
    [first, second] = sdattn.heatmaps(store, pipe, [PROMPT] * 2)
    torch.testing.assert_close(first.maps, second.maps, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_loop_with_two_passes_a_step():
    pipe = small_pipe()
    negative, positive = states(pipe)

    def in_turn():
        pipe.scheduler.set_timesteps(2)
        with torch.no_grad():
            for t in pipe.scheduler.timesteps:
                sample = torch.randn(1, 4, 8, 8, generator=seeded(int(t)))
                for text in (negative, positive):
                    pipe.unet(sample, t, encoder_hidden_states=text)

    for target in (pipe, pipe.unet):
        for branch, text in (("conditional", positive), ("unconditional", negative)):
            with sdattn.capture(pipe.unet) as alone:
                own_loop(pipe, [text])
            with sdattn.capture(target, guidance="passes", branch=branch) as store:
                in_turn()
            assert (len(store.passes), store.skipped) == (2, 2)
            same_maps(store, alone)
    with pytest.raises(ValueError, match="in turn"):
        with sdattn.capture(pipe, guidance="passes", branch="both"):
            pass


def test_an_attached_store_asks_nothing_of_a_call_that_is_over():
    pipe = small_pipe()
    negative, positive = states(pipe)
    draw(pipe, guidance_scale=1.0)
    store = AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    own_loop(pipe, [negative, positive])
    with pytest.raises(CaptureError, match="first half is unconditional is not known"):
        store.heatmaps(pipe, PROMPT)


@pytest.mark.slow
def test_two_captures_of_two_stages_on_one_model():
    pipe, (first, second) = small_pipe(), (None, None)
    other, again = sharing(pipe)
    other.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    with sdattn.capture(pipe) as of_first:
        draw(pipe)
    with sdattn.capture(other) as of_second:
        again()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        with sdattn.capture(pipe) as first, sdattn.capture(other) as second:
            draw(pipe)
            again()
    same_maps(first, of_first)
    same_maps(second, of_second)
    assert first.heatmaps()[0].words == ("a", "red", "cat")
    assert second.heatmaps()[0].words == ("a", "dog")


def test_a_capture_of_the_wrong_pipeline_names_the_one_that_ran():
    pipe = small_pipe()
    _, again = sharing(pipe)
    with pytest.raises(CaptureError, match=r"from StableDiffusionImg2ImgPipeline.__call__"):
        with sdattn.capture(pipe):
            again()


def test_a_direct_call_of_forward_is_seen():
    pipe = small_pipe()
    _, positive = states(pipe)
    sample = torch.randn(1, 4, 8, 8, generator=seeded())
    with torch.no_grad(), sdattn.capture(pipe.unet) as expected:
        pipe.unet(sample, 5, encoder_hidden_states=positive)
    with torch.no_grad(), sdattn.capture(pipe.unet) as store:
        pipe.unet.forward(sample, 5, encoder_hidden_states=positive)
    same_maps(store, expected)


@pytest.mark.parametrize("way", tiered(["store", "capture", "registered"]))
def test_joint_attention_too(way):
    pipe = sd3()
    options = {**SMALL, "guidance_scale": 4.0, "max_sequence_length": 8}

    def callback(pipe, _step, _t, tensors):
        with torch.no_grad():
            other = torch.randn_like(given["hidden_states"])
            pipe.transformer(**{**given, "hidden_states": other[..., :-2]})  # of another grid
        return tensors

    def watched(**more):
        """The maps of a run, and the rows that a controller was called with."""
        store, rows = AttentionStore(), Recording()
        if way == "capture":
            with sdattn.capture(pipe) as store:
                pipe(PROMPT, generator=seeded(), **options, **more)
            return list(store.maps.values())
        with register_attention_control(pipe, store if way == "store" else rows):
            pipe(PROMPT, generator=seeded(), **options, **more)
        maps = store.get_average_attention() if way == "store" else {}
        return [one for kept in maps.values() for one in kept] or rows.rows

    given = {}
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _m, _a, kwargs: given.update(kwargs), with_kwargs=True
    )
    expected = watched()
    with pytest.warns(CaptureWarning, match="callback_on_step_end"):
        found = watched(callback_on_step_end=callback)
    hook.remove()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"guidance": "half"}, "guidance"),
        ({"guidance": ["batch"]}, "guidance"),
        ({"guidance": None, "branch": "unconditional"}, "branch"),
        ({"branch": "both"}, "branch"),
    ],
)
def test_options_that_fit_nothing(options, told):
    with pytest.raises(ValueError, match=told):
        with sdattn.capture(small_pipe().unet, **options):
            pass
