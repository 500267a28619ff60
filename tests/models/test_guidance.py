"""Rows of a guided batch by branch, against what a pipeline hands to its model."""

import pytest
import torch
from helpers.tiny_pipelines import make_pipeline

from sdattn.models.guidance import branch_order, branch_rows, guided_order


def test_rows_are_equal_chunks_in_order():
    assert branch_rows(("unconditional", "conditional"), 6) == {
        "unconditional": slice(0, 3),
        "conditional": slice(3, 6),
    }
    assert branch_rows(("conditional", None), 4) == {"conditional": slice(0, 2)}


@pytest.mark.parametrize("batch", [0, 3])
def test_a_batch_that_does_not_divide_is_refused(batch):
    with pytest.raises(ValueError, match=f"a batch of {batch}, which does not divide into 2"):
        branch_rows(("unconditional", "conditional"), batch)


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_prompts_rows_hold_the_states_of_the_prompt(scale):
    pipe, seen = make_pipeline(), []

    def watch(_unet, _args, kwargs):
        text = kwargs["encoder_hidden_states"]
        rows = branch_rows(branch_order(pipe), len(text))
        seen.append({branch: text[of] for branch, of in rows.items()})

    pipe.unet.register_forward_pre_hook(watch, with_kwargs=True)
    pipe(["a cat", "a dog"], guidance_scale=scale, num_inference_steps=1, output_type="latent")
    prompt, negative = pipe.encode_prompt(["a cat", "a dog"], "cpu", 1, True)
    expected = {"conditional": prompt} | ({"unconditional": negative} if scale > 1 else {})
    [found] = seen
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[branch], expected[branch]) for branch in expected)
    assert guided_order(pipe) == ("unconditional", "conditional")
