"""Columns taken out of attention: exactly those, for those rows."""

from contextlib import contextmanager

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline
from helpers.denoiser_outputs import outputs_recorded
from helpers.matrix import ROWS
from helpers.rows import Way
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline

from sdattn import TorchAttnProcessor
from sdattn.control import knockouts as causes
from sdattn.control.removal import Removal, without_columns
from sdattn.models.denoiser import find_denoiser

PROMPT = "a red cat and a dog"
FAST = {"num_inference_steps": 2, "height": 64, "width": 96}
# Equal rows of a batch may round apart: outputs of 1.8 in float32, found 1.6e-6 after two passes.
ROUNDING, REMOVED = 1e-5, 5e-3
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
    "SanaSprint",
    "Kolors",
)


CASES = [(row, True) for row in ROWS if row.name in GUIDED]
CASES += [(row, False) for row in ROWS if row.name in UNGUIDED]
CASES.sort(key=lambda case: case[0].name != "PAG")  # whose rows are three kinds, each day


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
    for layer in filter(chosen, find_denoiser(model).layers):
        of_row = lambda batch: columns_of_row(batch) if passes - 1 in during else {}  # noqa: E731
        layer.module.set_processor(Masked(layer.module.processor, of_row))
    yield
    hook.remove()


def shared(value):
    """Two images made two of the first."""
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
    with context(pipe), outputs_recorded(find_denoiser(pipe).model) as outputs:
        pipe(**options, generator=generators, output_type="latent")
    return outputs


def rows_that_read(row, way, batch):
    """Those of the prompt and, in PAG, those of their perturbed copy."""
    perturbed = range(batch - 2, batch) if row.name == "PAG" else ()
    return [*row.rows(way, batch), *perturbed]


def late(layer):
    return layer.kind == "cross" and layer.place in ("up", "block")


@pytest.mark.parametrize(("row", "guided"), tiered(CASES, quick=2), ids=str)
@pytest.mark.slow
def test_removing_is_masking_the_keys(row, guided):
    """In the chosen layers and passes, for the rows that read the prompt, and nowhere else."""
    way = row.fitted(Way(prompts=2, guided=guided, size=(64, 96)))
    seen = 24 if row.name.startswith(("PixArt", "Sana")) else 256 if row.name == "Kolors" else 77
    columns = tuple(range(2, seen - 1))  # enough to tell
    passes = {"Heun scheduler (second order)": 3, "image to image": 1}.get(row.name, 2)

    def columns_of_row(batch):  # the second of each two
        return dict.fromkeys(rows_that_read(row, way, batch)[1::2], columns)

    ours = outputs_of(row, way, lambda pipe: Removal(pipe, [(), columns], seen, late, (0.5, 1.0)))
    during = range(passes // 2, passes)  # those whose middle lies in the second half
    theirs = outputs_of(row, way, lambda pipe: masked(pipe, late, columns_of_row, during))
    assert len(ours) == len(theirs) == passes
    whole, changed = ours[-1][rows_that_read(row, way, len(ours[-1]))[:2]]
    effect = (whole - changed).abs().max()
    assert effect > (1e-4 if row.name == "Kolors" else 1e-2)  # whose tiny encoder says little
    torch.testing.assert_close(ours, theirs, atol=min(1e-4, float(effect) / 50), rtol=0)


@torch.no_grad()
def run(pipe, removal, **options):
    """The model's outputs ``[passes, B, C, rows, cols]``, two rows of one prompt and noise."""
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    options = {"output_type": "latent", **(options or FAST)}
    with removal, outputs_recorded(find_denoiser(pipe).model) as outputs:
        pipe(prompt=[PROMPT] * 2, generator=generators, **options)
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("steps", "changed"), [(0.5, [True, True]), ((0.5, 1), [False, True]), ((0, 1), [True, True])]
)
@pytest.mark.slow
def test_the_part_of_the_run_that_an_image_leaves(steps, changed):
    """Of four steps, image to image at half strength runs two."""
    pipe = make_pipeline(StableDiffusionImg2ImgPipeline)
    image = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1)).repeat(2, 1, 1, 1)
    options = {"image": image, "strength": 0.5, "num_inference_steps": 4}
    outputs = run(pipe, Removal(pipe, [(), (2, 3)], 77, None, steps), **options)
    apart = [(one[2] - one[3]).abs().max() for one in outputs]
    assert [one > REMOVED for one in apart] == changed
    assert all(one < ROUNDING for one in apart if one < REMOVED)


@pytest.mark.slow
def test_other_layers_keep_their_processors():
    pipe = make_pipeline()
    before = dict(pipe.unet.attn_processors)
    during = []
    hook = pipe.unet.register_forward_hook(lambda *_: during.append(pipe.unet.attn_processors))
    causes.knockout(pipe, PROMPT, "cat", layers=(4, 6), **FAST)  # of 8 x 12, 4 x 6 and 2 x 3
    hook.remove()
    chosen = {
        f"{layer.name}.processor"
        for layer in find_denoiser(pipe.unet).layers
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
