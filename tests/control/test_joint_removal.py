"""Columns taken out of joint attention: exactly those, for those rows and queries."""

from contextlib import contextmanager

import pytest
import torch
from helpers.denoiser_outputs import outputs_recorded
from helpers.matrix import ROWS
from helpers.rows import Way
from helpers.tiers import tiered
from helpers.transformer_rows import flux, sd3
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from sdattn import capture, knockout
from sdattn.control.removal import Removal
from sdattn.follow.passes import CaptureWarning
from sdattn.models.denoiser import find_denoiser

PROMPT = "a red cat and a dog"
NAMES = ("Stable Diffusion 3", "FLUX.1", "FLUX.2", "FLUX.2 klein", "Qwen-Image")
NAMES += ("Chroma", "Bria", "Ovis-Image", "LongCat-Image")
CASES = [row for row in ROWS if row.name in NAMES]
COLUMNS = (1, 2, 3, 4)
TOLERANCE = 5e-5  # of outputs of about 2, after two passes in float32


class Masking(TorchFunctionMode):
    """The independent answer: torch's own attention, some keys at -inf for some rows, in those
    passes of the model that read the prompt and are late enough."""

    def __init__(self, row, removed_rows, queries):
        super().__init__()
        self.row, self.removed_rows, self.queries = row, removed_rows, queries
        self.passes, self.n_text, self.active = 0, 0, False

    def before_pass(self, _module, _args, given):
        self.n_text = given["encoder_hidden_states"].shape[1]
        negative = self.row.in_turn and self.guided and self.passes % 2 == 1
        step = self.passes // (2 if self.row.in_turn and self.guided else 1)
        self.active = step == 1 and not negative
        self.passes += 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is scaled_dot_product_attention and self.active:
            query, key = args[:2] if args else (kwargs["query"], kwargs["key"])
            first = self.row.joint == "text first"
            length, n_text = key.shape[2], self.n_text
            text = torch.arange(n_text) + (0 if first else length - n_text)
            image = torch.arange(length - n_text) + (n_text if first else 0)
            mask = torch.zeros(len(query), 1, length, length)
            rows = image if self.queries == "image" else torch.arange(length)
            for row in self.removed_rows(len(query)):
                mask[row, 0, rows[:, None], text[list(COLUMNS)]] = -torch.inf
            given = kwargs.get("attn_mask")
            if given is not None:
                given = torch.where(given, 0.0, -torch.inf) if given.dtype == torch.bool else given
                mask = mask + given
            kwargs["attn_mask"] = mask
        return func(*args, **kwargs)


@contextmanager
def masked(pipe, row, way, removed_rows, queries):
    mode = Masking(row, removed_rows, queries)
    mode.guided = way.guided
    hook = find_denoiser(pipe).model.register_forward_pre_hook(mode.before_pass, with_kwargs=True)
    with mode:
        yield
    hook.remove()


def outputs_of(pipe, row, way, context):
    options = {"num_inference_steps": 2, **row.options(pipe, way), "prompt": [PROMPT] * 2}
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    options = {name: option for name, option in options.items() if option is not None}
    with context, outputs_recorded(find_denoiser(pipe).model) as outputs:
        pipe(**options, generator=generators, output_type="latent")
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("queries", tiered(["all", "image"], quick=0))
@pytest.mark.parametrize("guided", tiered([True, False], quick=0))
@pytest.mark.parametrize("row", CASES, ids=str)
def test_removing_is_masking_the_keys(row, guided, queries):
    way = row.fitted(Way(prompts=2, guided=guided, size=(64, 96)))

    def removed_rows(batch):  # the second of the two that read the prompt
        return [row.rows(way, batch)[-1]]

    pipe = row.make()
    widths = []

    def note(_module, _args, given):
        widths.append(given["encoder_hidden_states"].shape[1])

    watch = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    with_all = outputs_of(pipe, row, way, masked(pipe, row, way, lambda _: [], queries))
    watch.remove()
    removal = Removal(pipe, [(), COLUMNS], widths[0], None, (0.5, 1.0), queries)
    ours = outputs_of(pipe, row, way, removal)
    theirs = outputs_of(pipe, row, way, masked(pipe, row, way, removed_rows, queries))
    assert len(ours) == len(theirs) == len(with_all)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    changed = [(one - whole).abs().max() for one, whole in zip(theirs, with_all, strict=True)]
    assert max(changed) > 20 * TOLERANCE  # what a fault would be confused with


@pytest.mark.slow
def test_the_text_s_own_queries_make_a_difference():
    options = {"num_inference_steps": 2, "height": 64, "width": 96, "max_sequence_length": 16}
    ways = ("image", "all", None)
    found = [knockout(sd3(), PROMPT, "cat", queries=one, **options) for one in ways]
    assert found[1].without.tobytes() == found[2].without.tobytes()
    assert found[0].image.tobytes() == found[1].image.tobytes()
    assert found[0].without.tobytes() != found[1].without.tobytes()


def test_captures_inside_show_a_row_without_the_word():
    pipe = flux()
    options = {"num_inference_steps": 1, "height": 64, "width": 96, "max_sequence_length": 16}
    swapped = pytest.warns(CaptureWarning, match="4.*processors")
    with swapped, Removal(pipe, [(), (1,)], 16), capture(pipe) as store:
        pipe([PROMPT] * 2, generator=torch.Generator().manual_seed(0), output_type="latent",
             latents=torch.randn(1, 24, 16).repeat(2, 1, 1), **options)  # fmt: skip
    for maps in store.maps.values():
        assert bool((maps[1, ..., 1] == 0).all()) and bool((maps[0, ..., 1] > 0).all())
        assert bool((maps[1, ..., 2] > 0).all())


def test_skip_layer_guidance_would_bring_the_word_back():
    with pytest.raises(ValueError, match="skip_guidance_layers=True.*guidance"):
        knockout(
            sd3(),
            PROMPT,
            "cat",
            num_inference_steps=4,
            height=64,
            width=96,
            max_sequence_length=16,
            guidance_scale=3.0,
            skip_guidance_layers=[0],
            skip_layer_guidance_start=0.0,
            skip_layer_guidance_stop=1.0,
        )
