"""Rows of a guided batch by branch, against what a pipeline hands to its model."""

import pytest
import torch
from helpers.padded_rows import z_image
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline

from sdattn import CaptureError, CaptureWarning, capture
from sdattn.models.guidance import GuidanceWatch, branch_order, branch_rows, guided_order


def test_rows_are_equal_chunks_in_order():
    assert branch_rows(("unconditional", "conditional"), 6) == {
        "unconditional": slice(0, 3),
        "conditional": slice(3, 6),
    }
    assert branch_rows(("conditional", None), 4) == {"conditional": slice(0, 2)}


@pytest.mark.parametrize("batch", [0, 3])
def test_a_batch_that_does_not_divide_is_refused(batch):
    with pytest.raises(ValueError, match=f"batch of {batch}.*2"):
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


def switched(pipe, branch, guided, **options):
    """Rows of each call, and those kept, of two images of a run with guidance in some steps only,
    switched as diffusers' pages on callbacks do it."""
    rows, scale = [], {True: 5.0, False: 0.0}
    hook = pipe.unet.register_forward_pre_hook(lambda _model, args: rows.append(len(args[0])))
    texts = torch.cat(pipe.encode_prompt("a cat", "cpu", 2, True, "dog")[::-1])

    def switch(pipe, step, _timestep, _given):
        acts = (*guided, True)[step + 1]
        pipe._guidance_scale = scale[acts]
        return {"prompt_embeds": texts if acts else texts[2:]}

    options |= {"callback_on_step_end_tensor_inputs": ["prompt_embeds"], "output_type": "latent"}
    options |= {"num_images_per_prompt": 2, "num_inference_steps": len(guided)}
    given = {"negative_prompt": "dog", "guidance_scale": scale[guided[0]]}
    try:
        with capture(pipe, branch=branch, steps="all") as store:
            pipe("a cat", callback_on_step_end=switch, **given, **options)
    finally:
        hook.remove()
        assert rows == [4 if acts else 2 for acts in guided]
    return [one.rows for one in store.passes]


@pytest.mark.parametrize(
    "guided",
    tiered([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]),
)
@pytest.mark.slow
def test_guidance_may_act_in_any_part_of_a_run(guided):
    """Two images: four rows where it acts, the negative prompt's first, and two where not."""
    pipe, guided = make_pipeline(), tuple(map(bool, guided))
    kept = switched(pipe, "conditional", guided)
    assert kept == [(2, 3) if acts else (0, 1) for acts in guided]
    if not any(guided):
        for branch in ("unconditional", "both"):
            with pytest.raises(CaptureError, match="unconditional"):
                switched(pipe, branch, guided)
        return
    assert switched(pipe, "unconditional", guided) == [(0, 1)] * sum(guided)
    if all(guided):
        assert switched(pipe, "both", guided) == [(0, 1, 2, 3)] * 4
        return
    with pytest.warns(CaptureWarning, match="Guidance.*2 call"):
        assert switched(pipe, "both", guided) == [(0, 1, 2, 3)] * 2


def test_guidance_that_ends_early_ends_by_the_schedule_of_each_run():
    """Two rows where it acts, and one where not, of two runs that one watch follows."""
    pipe, seen = z_image(), []
    watch = GuidanceWatch(pipe)
    pipe.transformer.register_forward_pre_hook(
        lambda _model, args: seen.append((len(watch.order(None, 0)), len(args[0])))
    )
    options = {"height": 64, "width": 80, "output_type": "latent", "guidance_scale": 4.0}
    for steps in (2, 6):
        del seen[:]
        pipe("a cat", num_inference_steps=steps, cfg_truncation=0.6, **options)
        assert len(seen) == steps and all(found == rows for found, rows in seen)
    assert {rows for _, rows in seen} == {1, 2}


def test_a_run_whose_last_steps_have_no_guidance_says_that_both_branches_lack_them():
    pipe = make_pipeline()
    with pytest.warns(CaptureWarning, match=r"Guidance was off in 1 call\(s\).*branch='both'"):
        assert switched(pipe, "both", (True, False)) == [(0, 1, 2, 3)]
