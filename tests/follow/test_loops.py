"""Pipelines that call their model more than once a step, and loops of users' own.

What such a run keeps is compared with that of the calls that make the image alone.
"""

import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers.followers import FOLLOWERS, PROMPT, captured, draw, followed, seeded, small_pipe
from helpers.tiers import tiered

import sdattn
from sdattn import AttentionStore, CaptureError, CaptureWarning, TorchAttnProcessor
from sdattn.control.removal import Removal
from sdattn.edit import register_attention_control


def states(pipe, prompt=PROMPT):
    """The negative and the prompt's text states."""
    positive, negative = pipe.encode_prompt(prompt, "cpu", 1, True, negative_prompt="")
    return negative, positive


def same_maps(store, expected):
    assert list(store.maps) == list(expected.maps)
    for name, maps in expected.maps.items():
        torch.testing.assert_close(store.maps[name], maps, atol=1e-6, rtol=0)


# -- several calls in a step -----------------------------------------------------------------------


class Alone(StableDiffusionPipeline):
    """A loop of a few lines: the pass of each step ``again`` times, after one of a reference, whose
    result is not used, if ``before``."""

    again = 1
    before = False

    def __call__(self, prompt, steps=3, guided=True):
        text = torch.cat(states(self, prompt)[0 if guided else 1 :])
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


class Reference(Alone):
    """As the community's reference pipelines run it."""

    before = True


class Recurrent(Alone):
    """Self-recurrence: each step's pass is run several times."""

    again = 3


def of_kind(kind):
    pipe = small_pipe()
    return kind(**pipe.components, requires_safety_checker=False)


@torch.no_grad()
@pytest.mark.parametrize("kind", tiered([Recurrent, Reference]))
@pytest.mark.parametrize("follower", FOLLOWERS)
@pytest.mark.filterwarnings("ignore::sdattn.CaptureWarning")
def test_steps_of_several_calls_are_refused_when_they_are_read(follower, kind):
    pipe = of_kind(kind)
    with pytest.raises(CaptureError, match=f"{kind.__name__} called its .*step_call=0"):
        followed(follower, pipe, lambda: pipe(PROMPT))


@torch.no_grad()
@pytest.mark.parametrize("guided", tiered([True, False]))
@pytest.mark.parametrize(("kind", "step_call"), tiered([(Reference, 1), (Recurrent, 0)]))
@pytest.mark.slow
def test_a_subclass_that_calls_the_model_more_often_than_once_a_step(kind, step_call, guided):
    alone, pipe = of_kind(Alone), of_kind(kind)
    with sdattn.capture(alone) as expected:
        alone(PROMPT, guided=guided)
    with sdattn.capture(pipe, step_call=step_call) as store:
        pipe(PROMPT, guided=guided)
    assert len(store.passes) == 3
    same_maps(store, expected)


@torch.no_grad()
def test_a_step_without_the_call_that_counts_is_missed():
    pipe = of_kind(Recurrent)
    with sdattn.capture(pipe, step_call=2) as store:
        pipe(PROMPT)
    assert len(store.passes) == 3 and store.maps
    pipe.again = 2
    with pytest.raises(CaptureError, match=r"3 step\(s\) had too few calls"):
        with sdattn.capture(pipe, step_call=2):
            pipe(PROMPT)
    with pytest.raises(ValueError, match="step_call"):
        sdattn.capture(pipe, step_call=-1).__enter__()


class Half(AttentionStore):
    def forward(self, attn, is_cross, place_in_unet):
        super().forward(attn, is_cross, place_in_unet)
        return attn * 0.5


@torch.no_grad()
@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("kind", tiered([Recurrent, Reference]))
def test_an_edit_is_in_every_call_of_a_step(kind, is_registered):
    """The image is as if each layer were edited, whoever reads the store."""
    pipe, other, store = of_kind(kind), of_kind(kind), Half(guidance=None)
    other.unet.set_attn_processor(TorchAttnProcessor(lambda attn, *_: attn * 0.5))
    expected = other(PROMPT)
    if is_registered:
        with pytest.warns(CaptureWarning, match=f"{kind.__name__} called its"):
            with register_attention_control(pipe, store):
                latents = pipe(PROMPT)
    else:
        with store.attached(pipe):
            pipe.unet.set_attn_processor(TorchAttnProcessor(store))
            latents = pipe(PROMPT)
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_knockout_is_in_every_call_of_a_step():
    latents = []
    for kind in (Alone, Recurrent):
        pipe = of_kind(kind)
        with Removal(pipe, [(3,)], 77, steps=(0.0, 0.7)):
            latents.append(pipe(PROMPT))
    alone, recurrent = latents
    assert not torch.allclose(alone, of_kind(Alone)(PROMPT), atol=1e-4)
    torch.testing.assert_close(recurrent, alone, atol=1e-5, rtol=0)


TWICE = "called its .* 2 times in a step"


def decorated(function):
    def wrapper(*args, **options):
        return function(*args, **options)

    return wrapper


@pytest.mark.parametrize("decorator", tiered([torch.no_grad(), decorated]), ids=["torch's", "own"])
def test_a_callback_of_the_same_decorator_as_the_pipelines_own_method(decorator):
    """The two share their code: what the pipeline calls itself is in the maps and edited."""

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
    expected = followed(captured, pipe, lambda: pipe(PROMPT, nothing))
    plain = followed(captured, pipe, lambda: pipe(PROMPT, lambda pipe: None))
    torch.testing.assert_close(plain, expected, atol=1e-5, rtol=0)
    with pytest.warns(CaptureWarning, match=TWICE), pytest.raises(CaptureError, match=TWICE):
        followed(captured, pipe, lambda: pipe(PROMPT, calls))
    edits = []
    for callback in (nothing, lambda pipe: None):
        with register_attention_control(pipe, lambda attn, *_: attn * 0):
            edits.append(pipe(PROMPT, callback))
    torch.testing.assert_close(*edits, atol=1e-5, rtol=0)
    assert not torch.allclose(edits[0], expected[0], atol=1e-4)


def test_calls_for_a_gradient_are_seen_by_an_attached_store():
    """Attend-and-Excite in a pipeline: first the prompt alone, for a gradient."""

    class Excited(StableDiffusionPipeline):
        def __call__(self, prompt, store):
            self._guidance_scale = 1.0
            text = self.encode_prompt(prompt, "cpu", 1, False)[0]
            latents, gradients = torch.randn(1, 4, 8, 8, generator=seeded()), []
            self.scheduler.set_timesteps(2)
            for t in self.scheduler.timesteps:
                latents = latents.detach().requires_grad_()
                self.unet(latents, t, encoder_hidden_states=text)
                loss = store.last_step["up_cross"][0][..., 2].sum()
                gradients.append(torch.autograd.grad(loss, latents)[0])
                with torch.no_grad():
                    noise = self.unet(latents, t, encoder_hidden_states=text).sample
                    latents = self.scheduler.step(noise, t, latents).prev_sample
            return gradients

    pipe = of_kind(Excited)
    store = AttentionStore(pipeline=pipe, guidance=None, save_global_store=True)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    assert all(gradient.abs().max() > 0 for gradient in pipe(PROMPT, store))


# -- loops of users' own ---------------------------------------------------------------------------


@torch.no_grad()
def own_loop(pipe, *passes, steps=2):
    """A loop around the UNet: each step has these passes, of text states in a list of rows."""
    pipe.scheduler.set_timesteps(steps)
    for t in pipe.scheduler.timesteps:
        for rows in passes:
            sample = torch.randn(1, 4, 8, 8, generator=seeded(int(t)))
            pipe.unet(sample.expand(len(rows), -1, -1, -1), t, torch.cat(rows))


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
    for target in (pipe, pipe.unet):
        for branch, text in (("conditional", positive), ("unconditional", negative)):
            with sdattn.capture(pipe.unet) as alone:
                own_loop(pipe, [text])
            with sdattn.capture(target, guidance="passes", branch=branch) as store:
                own_loop(pipe, [negative], [positive])
            assert (len(store.passes), store.skipped) == (2, 2)
            same_maps(store, alone)
    with pytest.raises(ValueError, match="in turn"):
        with sdattn.capture(pipe, guidance="passes", branch="both"):
            pass


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
