"""A word's attention taken away: exactly that, nowhere else, and everything put back."""

import numpy as np
import pytest
import torch
from diffusers import PixArtAlphaPipeline, StableDiffusionInpaintPipeline, UNet2DConditionModel
from helpers.demo_words import needs_sprites
from helpers.denoiser_outputs import outputs_recorded
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_sdxl_pipeline, small_pipeline
from helpers.transformer_rows import pixart, sd3
from PIL import Image

import sdattn
from demos.scenes.grounds import PLAIN
from demos.scenes.sprites import colour_of
from sdattn import CaptureError, TorchAttnProcessor
from sdattn.control import knockouts as causes
from sdattn.models.denoiser import find_denoiser

PROMPT = "a red cat and a dog"
FAST = {"num_inference_steps": 2, "height": 64, "width": 96}


def test_where_images_differ():
    noise = torch.randint(0, 256, (2, 24, 40, 3), generator=torch.Generator().manual_seed(0))
    one, other = noise.numpy().astype(np.uint8)
    found = causes.change(Image.fromarray(one), Image.fromarray(other), (3, 5))
    difference = abs(one.astype(float) - other.astype(float)) / 255
    expected = difference.reshape(3, 8, 5, 8, 3).mean(axis=(1, 3, 4))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    black, white = Image.new("RGB", (41, 25)), Image.new("L", (41, 25), 255)
    whole = causes.change(black, white, (3, 5))
    torch.testing.assert_close(whole, torch.ones(3, 5))


@pytest.mark.slow
@pytest.mark.parametrize("make", [small_pipeline, make_sdxl_pipeline])
def test_words_in_batches_are_what_they_are_alone(make):
    pipe = make()
    words = ["cat", "a", "red cat", "<eos>"]
    plan = causes.prepare(pipe, PROMPT, 3, steps=1.0, options=FAST)
    together = causes.draw_without(plan, words, batch_size=3)
    plain = sdattn.generate(pipe, PROMPT, seed=3, **FAST)
    for word, one in zip(words, together, strict=True):
        alone = sdattn.knockout(pipe, PROMPT, word, 3, **FAST)
        assert (one.prompt, one.word, one.seed) == (PROMPT, word, 3)
        assert one.columns == one.heatmap.columns == plain.heatmaps[0][word].columns
        assert one.heatmap.values.shape == (8, 12)
        assert pixels(one.image).shape == (64, 96, 3)
        np.testing.assert_allclose(pixels(one.image), pixels(plain.images[0]), atol=1)
        np.testing.assert_allclose(pixels(one.without), pixels(alone.without), atol=1)
    assert len(together[1].columns) == 2  # both of them


def pixels(image):
    return np.asarray(image, dtype=int)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (small_pipeline, {}),
        (small_pipeline, {"guidance_scale": 1.0}),
        (lambda: small_pipeline().to(torch.bfloat16), {}),
        (lambda: pixart(PixArtAlphaPipeline), {"max_sequence_length": 24}),
        (
            lambda: small_pipeline(StableDiffusionInpaintPipeline),
            {
                "image": Image.new("RGB", (96, 64), "red"),
                "mask_image": Image.new("L", (96, 64), 255),
            },
        ),
        (small_pipeline, {"latents": torch.randn(1, 4, 8, 12)}),
        (make_sdxl_pipeline, {"prompt_2": PROMPT, "negative_prompt": ["dog"], "eta": 1.0}),
    ],
)
@pytest.mark.slow
def test_where_nothing_is_removed_nothing_changes(make, options):
    """Rows of a batch differ in nothing else, and share the noise that is drawn on the way.

    Where a row stands may change how its sums round. In float32 a pixel may fall to the next of 255
    values, which is 2e-5 of its cell's 8x8x3. In bfloat16, whose steps below 1 are as wide as those
    values, the mean pixel may be off by half a step (7e-4 was measured, with torch held to AVX2).
    """
    plan = causes.prepare(make(), PROMPT, 0, steps=1.0, options={**FAST, **options})
    (first, *others), grid = causes.draw(plan, [(), (), ()])
    [removed], _ = causes.draw(plan, [(2, 3, 4)])
    if plan.pipe.dtype == torch.bfloat16:
        step = torch.finfo(torch.bfloat16).eps / 2
        assert max(causes.change(first, other, grid).mean() for other in others) < step / 2
        assert causes.change(first, removed, grid).mean() > step
    else:
        assert max(causes.change(first, other, grid).max() for other in others) < 2e-4
        assert causes.change(first, removed, grid).max() > 1e-3


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("make", [lambda: pixart(PixArtAlphaPipeline), sd3])
def test_everything_is_put_back(make, fails):
    pipe = make()
    model, attributes = pipe.transformer, set(vars(pipe))
    before = dict(model.attn_processors)
    options = {**FAST, "max_sequence_length": 24}

    def stop(*_):
        raise RuntimeError("boom")

    if fails:
        hook = model.transformer_blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(RuntimeError, match="boom"):
            causes.knockout(pipe, PROMPT, "cat", **options)
        hook.remove()
    else:
        causes.knockout(pipe, PROMPT, "cat", **options)
    assert all(model.attn_processors[name] is before[name] for name in before)
    assert not model._forward_pre_hooks
    assert "encode_prompt" not in vars(pipe)
    own = {name for name in vars(pipe) if name.startswith("_")}  # of the pipeline's call
    assert set(vars(pipe)) - attributes <= own


def with_adapter():
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    pipe = small_pipeline()
    layer = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2
    layer.set_processor(IPAdapterAttnProcessor2_0(16, cross_attention_dim=32))
    return pipe


@pytest.mark.parametrize(
    ("make", "word", "options", "error", "message"),
    [
        (small_pipeline, "bird", {}, KeyError, "'bird'.*prompt"),
        (small_pipeline, " ", {}, KeyError, "no word"),
        (small_pipeline, "cat", {"steps": 1.5}, ValueError, "from 0 to 1"),
        (small_pipeline, "cat", {"steps": (0.5, 0.6)}, ValueError, "one of the 2 passes"),
        (small_pipeline, "cat", {"layers": 5}, ValueError, "No attention layer fits 5"),
        (small_pipeline, "cat", {"layers": "attn1"}, ValueError, "No attention layer fits 'attn1'"),
        (small_pipeline, "cat", {"num_images_per_prompt": 2}, ValueError, "makes 2 images"),
        (small_pipeline, "cat", {"output_type": "np"}, ValueError, "output_type"),
        (
            small_pipeline,
            "cat",
            {"latents": torch.randn(2, 4, 8, 12)},
            CaptureError,
            "start from different noise",
        ),
        (with_adapter, "cat", {"layers": "mid"}, ValueError, "IPAdapterAttnProcessor2_0, whose"),
        (small_pipeline, "cat", {"queries": "all"}, ValueError, "joint attention only"),
        (sd3, "cat", {"queries": "text"}, ValueError, "queries='text'"),
        (lambda: small_pipeline().unet, "cat", {}, TypeError, "Pass a pipeline"),
    ],
)
def test_what_is_refused(make, word, options, error, message):
    pipe = make()
    model = find_denoiser(pipe).model
    before = dict(model.attn_processors)
    with outputs_recorded(model) as outputs, pytest.raises(error, match=message):
        causes.knockout(pipe, PROMPT, word, **{**FAST, **options})
    assert not outputs
    assert all(model.attn_processors[name] is before[name] for name in before)


@pytest.mark.slow
def test_a_run_that_did_not_do_as_asked():
    pipe = small_pipeline()

    def stop(_pipe, _step, _timestep, tensors):
        pipe._interrupt = True
        return tensors

    def replace(_pipe, _step, _timestep, tensors):
        pipe.unet.set_attn_processor(TorchAttnProcessor())
        return tensors

    with pytest.raises(CaptureError, match="2 times.*1 times"):
        causes.knockout(pipe, PROMPT, "cat", callback_on_step_end=stop, **FAST)
    with pytest.raises(CaptureError, match="was replaced by a TorchAttnProcessor"):
        causes.knockout(pipe, PROMPT, "cat", callback_on_step_end=replace, **FAST)
    pipe.run_safety_checker = lambda images, *_: (images, [False, True])
    with pytest.raises(RuntimeError, match="safety checker blanked"):
        causes.knockout(pipe, PROMPT, "cat", **FAST)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_runs_eagerly_and_stays_compiled():
    pipe = small_pipeline()
    pipe.unet.compile(backend="aot_eager")
    compiled = pipe.unet._compiled_call_impl
    torch._dynamo.utils.counters.clear()
    causes.knockout(pipe, PROMPT, "cat", **FAST)
    assert not torch._dynamo.utils.counters["frames"]
    assert pipe.unet._compiled_call_impl is compiled is not None


class Direct(UNet2DConditionModel):
    """A UNet that is run as a pipeline runs it which calls ``unet.forward(...)``: without hooks."""

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


def test_a_unet_that_is_called_by_forward_loses_the_word_too():
    usual, direct = small_pipeline(), small_pipeline()
    direct.unet.__class__ = Direct
    expected, found = (causes.knockout(pipe, PROMPT, "cat", **FAST) for pipe in (usual, direct))
    assert found.image.tobytes() == expected.image.tobytes()
    assert found.without.tobytes() == expected.without.tobytes() != found.image.tobytes()


def test_a_controller_that_is_registered_inside_is_refused():
    pipe = small_pipeline()
    before = dict(pipe.unet.attn_processors)

    def register(_pipe, _step, _timestep, tensors):
        sdattn.edit.register_attention_control(pipe, None)
        return tensors

    with pytest.raises(RuntimeError, match="Removal is registered in this model already"):
        causes.knockout(pipe, PROMPT, "cat", callback_on_step_end=register, **FAST)
    assert all(pipe.unet.attn_processors[name] is one for name, one in before.items())


@pytest.mark.slow
@needs_sprites
@pytest.mark.parametrize("seed", tiered(range(3), quick=0))
def test_the_demo_loses_the_object_whose_words_it_may_not_see(demo, seed):
    """In all steps: without them in the second half alone it keeps what the first half drew."""
    things = {"green balloon": ("balloon", "green"), "blue car": ("car", "blue")}
    prompt = "a green balloon left of a blue car on a gray background"
    plan = causes.prepare(demo, prompt, seed, steps=1.0, options={})
    without = causes.draw_without(plan, list(things))
    before = np.asarray(without[0].image)
    ground = abs(before - np.array(PLAIN["gray"])).max(-1) < 40
    left = np.arange(before.shape[1]) < before.shape[1] / 2
    for found, own, other in zip(without, (left, ~left), (~left, left), strict=True):
        noun, colour = things[found.word]
        own = ~ground & own
        assert colour_of(noun, before[own]) == colour
        values = found.heatmap.resize(before.shape[:2]).numpy()
        assert values[own].mean() > 0.1
        assert values[own].mean() > values[~ground & other].mean()  # which is drawn anew too
        assert values[own].mean() > 3 * values[ground].mean()
        after = np.asarray(found.without)
        assert colour_of(noun, after[own]) != colour
        [(kept, its_colour)] = (one for name, one in things.items() if name != found.word)
        assert colour_of(kept, after[~ground & other]) == its_colour
