"""A word's attention taken away: exactly that, nowhere else, and everything put back."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from diffusers import (
    PixArtAlphaPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
)
from matrix import ROWS
from PIL import Image
from rows import Way
from scene_checker import find_objects
from tiny_pipelines import make_pipeline, make_sdxl_pipeline
from transformer_rows import pixart, sd3

import sdattn
from sdattn import CaptureError, TorchAttnProcessor
from sdattn.control import knockouts as causes
from sdattn.control.removal import Removal, without_columns
from sdattn.models.layers import find_denoiser, find_layers

PROMPT = "a red cat and a dog"
FAST = {"num_inference_steps": 2, "height": 64, "width": 96}
UNGUIDED = ("Stable Diffusion 1.x", "PAG", "PixArt Alpha")
GUIDED = (
    *UNGUIDED,
    "SDXL",
    "SDXL refiner",
    "LCM",
    "image to image",
    "inpainting (9 channels)",
    "InstructPix2Pix",
    "ControlNet",
    "T2I-Adapter",
    "LoRA, scaled",
    "Heun scheduler (second order)",
    "PixArt Sigma",
    "Sana (normed across heads)",
)
CASES = [(row, True) for row in ROWS if row.name in GUIDED]
CASES += [(row, False) for row in ROWS if row.name in UNGUIDED]


class Masked:
    """Another processor, and some keys masked out of its softmax by -inf for some rows."""

    def __init__(self, inner, columns_of_row):
        self.inner, self.columns_of_row = inner, columns_of_row

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, **options):
        batch, columns, _ = encoder_hidden_states.shape
        mask = torch.zeros(batch, 1, columns)
        for row, removed in self.columns_of_row(batch).items():
            mask[row, :, removed] = -torch.inf
        mask = mask if attention_mask is None else mask + attention_mask
        return self.inner(attn, hidden_states, encoder_hidden_states, mask, **options)


@contextmanager
def masked(pipe, chosen, columns_of_row, during):
    """The independent answer: diffusers' own attention, with a mask in some layers and passes."""
    passes = 0

    def count(*_):
        nonlocal passes
        passes += 1

    model = find_denoiser(pipe).model
    hook = model.register_forward_pre_hook(count)
    for layer in filter(chosen, find_layers(model)):
        of_row = lambda batch: columns_of_row(batch) if passes - 1 in during else {}  # noqa: E731
        layer.module.set_processor(Masked(layer.module.processor, of_row))
    yield
    hook.remove()


@contextmanager
def recorded(model):
    """What the model returned in each pass."""
    outputs = []
    hook = model.register_forward_hook(lambda *args: outputs.append(args[-1][0]))
    yield outputs
    hook.remove()


def shared(value):
    """Two pictures made two of the first."""
    if isinstance(value, list):
        return [shared(one) for one in value]
    is_batch = isinstance(value, torch.Tensor) and len(value) == 2
    return value[:1].repeat(2, 1, 1, 1) if is_batch else value


def outputs_of(row, way, context):
    """The model's outputs in a run of two equal prompts with equal noise."""
    pipe = row.make()
    options = {"num_inference_steps": 2, **row.options(pipe, way), "prompt": [PROMPT] * 2}
    options = {name: shared(one) for name, one in options.items() if one is not None}
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    with context(pipe), recorded(find_denoiser(pipe).model) as outputs:
        pipe(**options, generator=generators, output_type="latent")
    return outputs


def rows_that_read(row, way, batch):
    """Those of the prompt and, in PAG, those of their perturbed copy."""
    perturbed = range(batch - 2, batch) if row.name == "PAG" else ()
    return [*row.rows(way, batch), *perturbed]


def late(layer):
    return layer.kind == "cross" and layer.place in ("up", "block")


@pytest.mark.parametrize(("row", "guided"), CASES, ids=str)
def test_removing_is_masking_the_keys(row, guided):
    """In the chosen layers and passes, for the rows that read the prompt, and nowhere else."""
    way = row.fitted(Way(prompts=2, guided=guided, size=(64, 96)))
    seen = 24 if row.name.startswith(("PixArt", "Sana")) else 77
    columns = tuple(range(2, seen - 1))  # enough to tell
    passes = {"Heun scheduler (second order)": 3, "image to image": 1}.get(row.name, 2)

    def columns_of_row(batch):  # the second of each two
        return dict.fromkeys(rows_that_read(row, way, batch)[1::2], columns)

    ours = outputs_of(row, way, lambda pipe: Removal(pipe, [(), columns], seen, late, (0.5, 1.0)))
    during = range(passes // 2, passes)  # those whose middle lies in the second half
    theirs = outputs_of(row, way, lambda pipe: masked(pipe, late, columns_of_row, during))
    assert len(ours) == len(theirs) == passes
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    whole, changed = ours[-1][rows_that_read(row, way, len(ours[-1]))[:2]]
    assert not torch.allclose(whole, changed, atol=1e-2)


@torch.no_grad()
def run(pipe, removal, **options):
    """The model's outputs ``[passes, B, C, rows, cols]``, two rows of one prompt and noise."""
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    options = {"output_type": "latent", **(options or FAST)}
    with removal, recorded(find_denoiser(pipe).model) as outputs:
        pipe(prompt=[PROMPT] * 2, generator=generators, **options)
    return torch.stack(outputs)


def test_rows_of_the_negative_prompt_are_not_touched():
    pipe = make_pipeline()
    [nothing, nothing_later], [removed, later] = (
        run(pipe, Removal(pipe, [(), columns], 77)) for columns in ((), (2, 3))
    )
    assert torch.equal(removed[:3], nothing[:3])  # [negative, negative, prompt, prompt]
    assert not torch.equal(removed[3], nothing[3])
    assert torch.equal(nothing[2], nothing[3])
    assert torch.equal(later[:3:2], nothing_later[:3:2])  # the row of which nothing was removed


@pytest.mark.parametrize(
    ("steps", "changed"), [(0.5, [True, True]), ((0.5, 1), [False, True]), ((0, 1), [True, True])]
)
def test_the_part_of_the_run_that_a_picture_leaves(steps, changed):
    """Of four steps, image to image at half strength runs two."""
    pipe = make_pipeline(StableDiffusionImg2ImgPipeline)
    image = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1)).repeat(2, 1, 1, 1)
    options = {"image": image, "strength": 0.5, "num_inference_steps": 4}
    outputs = run(pipe, Removal(pipe, [(), (2, 3)], 77, None, steps), **options)
    assert [not torch.equal(one[2], one[3]) for one in outputs] == changed


def test_other_layers_keep_their_processors():
    pipe = make_pipeline()
    before = dict(pipe.unet.attn_processors)
    during = []
    hook = pipe.unet.register_forward_hook(lambda *_: during.append(pipe.unet.attn_processors))
    causes.knockout(pipe, PROMPT, "cat", layers=(4, 6), **FAST)  # of 8 x 12, 4 x 6 and 2 x 3
    hook.remove()
    chosen = {
        f"{layer.name}.processor"
        for layer in find_layers(pipe.unet)
        if layer.kind == "cross" and layer.level == 1
    }
    assert len(chosen) == 5
    for held in during:
        ours = {name for name, one in held.items() if isinstance(one, TorchAttnProcessor)}
        assert ours == chosen
        assert all(held[name] is before[name] for name in set(before) - ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_rest_is_renormalised(dtype):
    scores = 3 * torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).double()
    columns = (1, 4)
    expected = scores.index_fill(-1, torch.tensor(columns), -torch.inf).softmax(-1)
    found = without_columns(scores.softmax(-1).to(dtype), columns)
    assert found.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)
    assert torch.equal(without_columns(found, tuple(range(7))), torch.zeros_like(found))


def test_where_pictures_differ():
    noise = torch.randint(0, 256, (2, 24, 40, 3), generator=torch.Generator().manual_seed(0))
    one, other = noise.numpy().astype(np.uint8)
    found = causes.change(Image.fromarray(one), Image.fromarray(other), (3, 5))
    difference = abs(one.astype(float) - other.astype(float)) / 255
    expected = difference.reshape(3, 8, 5, 8, 3).mean(axis=(1, 3, 4))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    black, white = Image.new("RGB", (41, 25)), Image.new("L", (41, 25), 255)
    whole = causes.change(black, white, (3, 5))
    torch.testing.assert_close(whole, torch.ones(3, 5))


@pytest.mark.parametrize("make", [make_pipeline, make_sdxl_pipeline])
def test_words_in_batches_are_what_they_are_alone(make):
    pipe = make()
    words = ["cat", "a", "red cat", "<eos>"]
    together = causes.knockouts(pipe, PROMPT, words, 3, batch_size=3, **FAST)
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
        (make_pipeline, {}),
        (make_pipeline, {"guidance_scale": 1.0}),
        (lambda: make_pipeline().to(torch.bfloat16), {}),
        (lambda: pixart(PixArtAlphaPipeline), {"max_sequence_length": 24}),
        (
            lambda: make_pipeline(StableDiffusionInpaintPipeline),
            {"image": Image.new("RGB", (96, 64), "red"), "mask_image": Image.new("L", (96, 64))},
        ),
        (make_pipeline, {"latents": torch.randn(1, 4, 8, 12)}),
        (make_sdxl_pipeline, {"prompt_2": PROMPT, "negative_prompt": ["dog"], "eta": 1.0}),
    ],
)
def test_where_nothing_is_removed_nothing_changes(make, options):
    """Rows of a batch differ in nothing else, and share the noise that is drawn on the way."""
    plan = causes.prepare(make(), PROMPT, 0, None, 1.0, {**FAST, **options})
    (first, *others), grid = causes.draw(plan, [(), (), ()])
    for other in others:
        assert not causes.change(first, other, grid).any()


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails):
    pipe = pixart(PixArtAlphaPipeline)
    model, attributes = pipe.transformer, set(vars(pipe))
    before = dict(model.attn_processors)
    options = {**FAST, "max_sequence_length": 24}

    def stop(*_):
        raise RuntimeError("boom")

    if fails:
        hook = model.transformer_blocks[1].attn2.register_forward_pre_hook(stop)
        with pytest.raises(RuntimeError, match="boom"):
            causes.knockout(pipe, PROMPT, "cat", **options)
        hook.remove()
    else:
        causes.knockout(pipe, PROMPT, "cat", **options)
    assert all(model.attn_processors[name] is before[name] for name in before)
    assert not model._forward_pre_hooks
    assert "encode_prompt" not in vars(pipe)
    assert set(vars(pipe)) - attributes <= {"_num_timesteps", "_interrupt"}


def with_adapter():
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    pipe = make_pipeline()
    layer = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2
    layer.set_processor(IPAdapterAttnProcessor2_0(16, cross_attention_dim=32))
    return pipe


@pytest.mark.parametrize(
    ("make", "word", "options", "error", "message"),
    [
        (make_pipeline, "bird", {}, KeyError, "'bird' is not in the prompt"),
        (make_pipeline, " ", {}, KeyError, "no word in it"),
        (make_pipeline, "cat", {"steps": 1.5}, ValueError, "from 0 to 1"),
        (make_pipeline, "cat", {"steps": (0.5, 0.6)}, ValueError, "less than one of the 2 passes"),
        (make_pipeline, "cat", {"layers": 5}, ValueError, "No attention layer fits 5"),
        (make_pipeline, "cat", {"layers": "attn1"}, ValueError, "No attention layer fits 'attn1'"),
        (make_pipeline, "cat", {"num_images_per_prompt": 2}, ValueError, "makes 2 pictures"),
        (make_pipeline, "cat", {"output_type": "np"}, ValueError, "output_type cannot be chosen"),
        (
            make_pipeline,
            "cat",
            {"latents": torch.randn(2, 4, 8, 12)},
            CaptureError,
            "start from different noise",
        ),
        (with_adapter, "cat", {"layers": "mid"}, ValueError, "IPAdapterAttnProcessor2_0, whose"),
        (sd3, "cat", {}, TypeError, "joint attention.*cross-attention is needed"),
        (lambda: make_pipeline().unet, "cat", {}, TypeError, "Pass a pipeline"),
    ],
)
def test_what_is_refused(make, word, options, error, message):
    pipe = make()
    model = find_denoiser(pipe).model
    before = dict(model.attn_processors)
    with recorded(model) as outputs, pytest.raises(error, match=message):
        causes.knockout(pipe, PROMPT, word, **{**FAST, **options})
    assert not outputs
    assert all(model.attn_processors[name] is before[name] for name in before)


@pytest.mark.parametrize(
    ("words", "options"), [([], {}), ("cat", {}), (["cat"], {"batch_size": 0})]
)
def test_lists_of_words_that_are_none(words, options):
    with pytest.raises(ValueError, match="pass a list of one word or more"):
        causes.knockouts(make_pipeline(), PROMPT, words, **options)


def test_a_run_that_did_not_do_as_asked():
    pipe = make_pipeline()

    def stop(_pipe, _step, _timestep, tensors):
        pipe._interrupt = True
        return tensors

    def replace(_pipe, _step, _timestep, tensors):
        pipe.unet.set_attn_processor(TorchAttnProcessor())
        return tensors

    with pytest.raises(CaptureError, match="call its model 2 times and called it 1 times"):
        causes.knockout(pipe, PROMPT, "cat", callback_on_step_end=stop, **FAST)
    with pytest.raises(CaptureError, match="was replaced by a TorchAttnProcessor"):
        causes.knockout(pipe, PROMPT, "cat", callback_on_step_end=replace, **FAST)
    pipe.run_safety_checker = lambda images, *_: (images, [False, True])
    with pytest.raises(RuntimeError, match="safety checker blanked"):
        causes.knockout(pipe, PROMPT, "cat", **FAST)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_runs_eagerly_and_stays_compiled():
    pipe = make_pipeline()
    pipe.unet.compile(backend="aot_eager")
    compiled = pipe.unet._compiled_call_impl
    torch._dynamo.utils.counters.clear()
    causes.knockout(pipe, PROMPT, "cat", **FAST)
    assert not torch._dynamo.utils.counters["frames"]
    assert pipe.unet._compiled_call_impl is compiled is not None


@pytest.mark.parametrize("seed", range(3))
def test_the_demo_loses_the_object_whose_shape_it_may_not_see(seed):
    """In the second half of the steps, where the layout stands; of 60 objects in held-out scenes
    59 changed more than the other one did."""
    pipe = sdattn.load_pipeline("demo", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    words = {"circle": "red", "square": "blue"}
    prompt = "a red circle left of a blue square"
    shapes = causes.knockouts(pipe, prompt, list(words), seed, steps=(0.5, 1.0))
    masks = {one.shape: torch.from_numpy(one.mask) for one in find_objects(shapes[0].image)}
    ground = ~(masks["circle"] | masks["square"])
    for found in shapes:
        [other] = set(words) - {found.word}
        values = found.heatmap.resize((64, 64))
        own = values[masks[found.word]].mean()
        assert own > 0.1
        assert own > 3 * values[masks[other]].mean()
        assert own > 3 * values[ground].mean()
        left = {(one.shape, one.colour) for one in find_objects(found.without)}
        assert (found.word, words[found.word]) not in left
