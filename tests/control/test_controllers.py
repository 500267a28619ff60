"""The controllers: what they do to maps, against the formulas written out column by column."""

import pytest
import torch
from helpers.tiny_tokenizers import tiny_tokenizer

from sdattn.edit import AttentionRefine, AttentionReplace, AttentionReweight, EmptyControl
from sdattn.prompts.tokens import read_prompt

T = 12
HEADS = 2


def read(*texts):
    return [read_prompt(tiny_tokenizer(T), text) for text in texts]


def probs(prompts, n_queries=4, n_keys=T, images=1, seed=0):
    """[2 * prompts * images * heads, N, T], the unconditional half first."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2 * prompts * images * HEADS, n_queries, n_keys, generator=generator)
    return scores.softmax(-1)


def run(control, attn, is_cross=True):
    """What the controller makes of one layer's map; (before, after), [prompts, heads, N, T]."""
    control.num_att_layers = 1
    before = attn.clone()
    after = control(attn, is_cross, "up")
    half = len(attn) // 2
    assert torch.equal(after[:half], before[:half])  # the unconditional rows
    split = (len(control.prompts), -1)
    return before[half:].unflatten(0, split), after[half:].unflatten(0, split)


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
def test_replace_moves_each_words_attention(cast):
    prompts = read("a red cat", "a red xyz", "a dog cat")  # sos a red cat eos / x y z are three
    control = AttentionReplace(prompts, 1, 1.0, 0.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        before, after = run(control, probs(3))
    source = before[0]
    assert torch.equal(after[0], source)
    expected = torch.zeros_like(source)
    expected[..., [0, 1, 2]] = source[..., [0, 1, 2]]
    expected[..., [3, 4, 5]] = source[..., 3:4] / 3
    expected[..., 6:11] = source[..., 4:9]  # end, then padding
    expected[..., 11] = source[..., 9:].sum(-1)
    torch.testing.assert_close(after[1], expected)
    torch.testing.assert_close(after[1].sum(-1), torch.ones(HEADS, 4))
    torch.testing.assert_close(after[2], source)  # a dog for a red, column by column


def test_refine_keeps_the_new_words_own_attention():
    prompts = read("a cat", "a red cat")
    before, after = run(AttentionRefine(prompts, 1, 1.0, 0.0), probs(2))
    expected = before[1].clone()
    for column, taken in {0: 0, 1: 1, 3: 2, 4: 3, **{c: c - 1 for c in range(5, T)}}.items():
        expected[..., column] = before[0][..., taken]
    torch.testing.assert_close(after[1], expected)
    assert torch.equal(after[1][..., 2], before[1][..., 2])


@pytest.mark.parametrize(("cat", "red"), [(2.5, -1.0), (0.5, 1.0), (1.0, 0.0)])
def test_reweight_scales_columns_wherever_the_word_is(cat, red):
    prompts = read("cat red cat", "cat red cat")
    control = AttentionReweight(prompts, 1, 1.0, 0.0, {"cat": cat, "red": red})
    before, after = run(control, probs(2))
    factors = torch.ones(T)
    factors[[1, 3]], factors[2] = cat, red
    torch.testing.assert_close(after[1], before[0] * factors)


def test_reweight_goes_on_top_of_another_edit():
    prompts = read("a red cat", "a red dog")
    first = AttentionReplace(prompts, 1, 1.0, 0.0)
    both = AttentionReweight(prompts, 1, 1.0, 0.0, {"dog": 3.0}, controller=first)
    before, after = run(both, probs(2))
    factors = torch.ones(T)
    factors[3] = 3
    torch.testing.assert_close(after[1], before[0] * factors)


def test_self_attention_becomes_the_sources_up_to_a_size_and_for_a_while():
    prompts = read("a cat", "a dog")
    control = AttentionReplace(prompts, 4, 0.0, (0.25, 0.75), max_self_queries=4)
    for step in range(4):
        assert control.cur_step == step
        before, after = run(control, probs(2, n_keys=4, seed=step), is_cross=False)
        inside = step in (1, 2)
        assert torch.equal(after[1], before[0] if inside else before[1])
    control.reset()
    control.cur_step = 1
    before, after = run(control, probs(2, n_queries=5, n_keys=5), is_cross=False)
    assert torch.equal(after, before)


def test_cross_replacement_ends_when_told_and_word_by_word():
    prompts = read("a red cat", "a red dog", "o red cat")
    spans = {"default_": 0.5, "dog": (0.25, 1.0), "red": 0.0}
    control = AttentionReplace(prompts, 4, spans, 0.0)
    for step in range(4):
        before, after = run(control, probs(3, seed=step))
        for target in (1, 2):
            for column in range(T):
                edited = step < 2
                if column == 2:  # red
                    edited = False
                elif column == 3 and target == 1:  # dog
                    edited = step >= 1
                wanted = before[0] if edited else before[target]
                assert torch.equal(after[target][..., column], wanted[..., column]), (step, column)


@pytest.mark.parametrize("images", [1, 3])
def test_rows_are_prompt_by_prompt_however_many_images(images):
    prompts = read("a red cat", "a red dog")
    before, after = run(AttentionReplace(prompts, 1, 1.0, 0.0), probs(2, images=images))
    assert after.shape[1] == images * HEADS
    assert torch.equal(after[1], before[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_to_change_changes_no_bit(dtype):
    twice, pair = read("a red cat", "a red cat"), read("a red cat", "a dog cat")
    same = probs(2).to(dtype)
    rows = len(same) // 4
    same[3 * rows :] = same[2 * rows : 3 * rows]  # one prompt, one map
    for control, attn in (
        (AttentionReplace(pair, 1, 0.0, 0.0), probs(2).to(dtype)),
        (AttentionReplace(twice, 1, 1.0, 1.0), same),
        (AttentionRefine(twice, 1, 1.0, 1.0), same),
        (AttentionReweight(twice, 1, 1.0, 0.0, {"cat": 1.0, "red": 1.0}), same),
    ):
        before, after = run(control, attn.clone())
        assert torch.equal(after, before)


def test_the_store_holds_the_edited_maps():
    prompts = read("a red cat", "a red xyz")
    control = AttentionReplace(prompts, 1, 1.0, 0.0)
    _, after = run(control, probs(2))
    assert torch.equal(control.attention_store["up_cross"][0], after.flatten(0, 1))


def test_empty_control_changes_nothing():
    attn, latents = probs(1), torch.randn(1, 4, 2, 2)
    assert EmptyControl()(attn, True, "up") is attn
    assert EmptyControl().step_callback(latents) is latents


PAIR = read("a red cat", "a red dog")
SAME = read("a red cat", "a red cat")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AttentionReplace(PAIR[:1], 4), ValueError, "1 prompt.*source"),
        (lambda: AttentionReplace(["a cat", "a dog"], 4), TypeError, "read_prompts"),
        (lambda: AttentionReplace(PAIR, 0), ValueError, "num_steps=0"),
        (lambda: AttentionReplace(PAIR, 4, 1.5), ValueError, "n steps.*n / 4"),
        (lambda: AttentionReplace(PAIR, 4, (0.8, 0.2)), ValueError, "part of the run"),
        (lambda: AttentionReplace(PAIR, 4, float("nan")), ValueError, "part of the run"),
        (lambda: AttentionReplace(PAIR, 4, 0.5, -0.1), ValueError, "part of the run"),
        (lambda: AttentionReplace(PAIR, 4, {"bird": 0.5}), KeyError, "'bird'.*prompt"),
        (
            lambda: AttentionReplace(read("a cat", "a red cat"), 4),
            ValueError,
            "2 words, .* has 3. `mode='refine'`",
        ),
        (
            lambda: AttentionReweight(SAME, 4, weights={"cat": float("inf")}),
            ValueError,
            "weight of 'cat' is inf",
        ),
        (lambda: AttentionReweight(SAME, 4, weights={"bird": 2.0}), KeyError, "'bird'.*prompt"),
        (
            lambda: AttentionReweight(PAIR, 4, weights={"dog": 2.0}),
            ValueError,
            "alone changes no words",
        ),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_maps_that_do_not_fit_are_refused():
    control = AttentionReplace(PAIR, 1)
    with pytest.raises(ValueError, match="11 token columns.*12"):
        run(control, probs(2, n_keys=11))
    with pytest.raises(ValueError, match="3 rows.*2 prompts"):
        AttentionReplace(PAIR, 1)(torch.rand(6, 4, T), True, "up")
    control = AttentionReplace(PAIR, 1)
    run(control, probs(2))
    with pytest.raises(ValueError, match="1 passes"):
        run(control, probs(2))
    control.reset()
    run(control, probs(2))
