"""What is held of a layer after some calls, against means of the same probabilities in float64."""

from dataclasses import replace

import pytest
import torch
from helpers.sums import probabilities, running_pass, running_sum

from sdattn import CaptureError
from sdattn.attention.calls import AttentionCall
from sdattn.keep.map_store import MapsByLayer

CALLS = [probabilities(seed) for seed in range(3)]


def told(held, calls=CALLS):
    for call in calls:
        held.running = replace(held.running)  # each in a pass of its own
        held.take(AttentionCall(probs=call))
    return held.map().double()


def on_grid(maps):
    return maps.unflatten(-2, (2, 2))


@pytest.mark.parametrize("moved", [{}, {"device": "cpu"}, {"dtype": torch.float64}], ids=str)
@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({}, torch.stack(CALLS).mean((0, 2))),
        ({"steps": "last"}, CALLS[-1].mean(1)),
        ({"steps": "all"}, torch.stack([call.mean(1) for call in CALLS], 1)),
        ({"heads": "all"}, torch.stack(CALLS).mean(0)),
        ({"heads": [2, 0]}, torch.stack(CALLS).mean(0)[:, [2, 0]]),
        ({"steps": "all", "heads": [1]}, torch.stack(CALLS, 1)[:, :, [1]]),
        ({"steps": "last", "heads": "all"}, CALLS[-1]),
        ({"tokens": [4, 0]}, torch.stack(CALLS).mean((0, 2))[..., [4, 0]]),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_what_is_held_is_what_was_asked_for(keep, expected, moved):
    held = running_sum(**keep, **moved)
    torch.testing.assert_close(told(held), on_grid(expected), atol=1e-6, rtol=0)
    assert held.calls == 3 and held.part.keys == 5 and held.part.grid == (2, 2)
    per_step = keep.get("steps") == "all"
    assert sum(t.numel() for t in held.tensors()) == expected.numel()
    assert len(held.tensors()) == (3 if per_step else 1)
    assert {t.dtype for t in held.tensors()} == {moved.get("dtype", torch.float32)}


def test_sums_of_half_precision_are_held_in_float32():
    """In float16 the thousandth call would be lost beside the sum of the others."""
    held = running_sum(dtype=torch.float16)
    calls = [probabilities(seed) for seed in range(40)]
    found = told(held, calls)
    assert held.map().dtype == torch.float16
    assert all(t.dtype == torch.float32 for t in held.tensors())
    expected = on_grid(torch.stack(calls).mean((0, 2)))
    torch.testing.assert_close(found, expected, atol=2**-12, rtol=2**-11)


@pytest.mark.parametrize("rows", [(2, 3), (3, 1), (0,)])
def test_of_a_pass_the_rows_that_are_kept(rows):
    held = running_sum(running=running_pass(4, rows))
    calls = [probabilities(seed, rows=4) for seed in range(2)]
    expected = on_grid(torch.stack(calls).mean((0, 2))[list(rows)])
    torch.testing.assert_close(told(held, calls), expected, atol=1e-6, rtol=0)


def test_rows_that_no_pass_has_are_refused():
    held = running_sum(running=running_pass(4))
    with pytest.raises(CaptureError, match="layer.*2.*4"):
        told(held)
    assert not held.calls


@pytest.mark.parametrize(
    ("keep", "problem"),
    [
        ({"tokens": [1, 5]}, "column 5.*0 to 4"),
        ({"heads": [3]}, "head 3.*0 to 2"),
        ({"among": [[0, 5]]}, "1 list.*2 image"),
        ({"among": [[0], [1], [2]]}, "3 list.*2"),
    ],
)
def test_what_the_layer_has_not_is_refused(keep, problem):
    with pytest.raises(CaptureError, match=problem):
        told(running_sum(**keep))


def test_the_softmax_among_some_keys_leaves_image_prompts_as_they_are():
    held = running_sum(running=running_pass(n_text=4), among=[[1, 2], [0, 3]])
    expected = torch.stack(CALLS).clone()
    for image, columns in enumerate(([1, 2], [0, 3])):
        text = torch.zeros_like(expected[:, image, ..., :4])
        text[..., columns] = expected[:, image][..., columns]
        expected[:, image, ..., :4] = text / text.sum(-1, keepdim=True)
    torch.testing.assert_close(told(held), on_grid(expected.mean((0, 2))), atol=1e-6, rtol=0)


def test_columns_and_keys_among_are_of_the_text_only():
    held = running_sum(kind="self", tokens=[0], among=[[0]])
    torch.testing.assert_close(
        told(held), on_grid(torch.stack(CALLS).mean((0, 2))), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("grad", [False, True])
def test_the_graph_is_kept_where_it_is_asked_for(grad):
    calls = [call.float().requires_grad_() for call in CALLS]
    held = running_sum(grad=grad)
    for call in calls:
        held.take(AttentionCall(probs=call))
    found = held.map()
    assert found.requires_grad == grad
    if grad:
        found[..., 3].sum().backward()
        for call in calls:  # of each of 3 heads and 3 calls a ninth
            expected = torch.zeros(call.shape).index_fill(-1, torch.tensor([3]), 1 / 9)
            torch.testing.assert_close(call.grad, expected)


def test_no_call_is_wanted_between_passes():
    held = running_sum()
    assert held.is_needed()
    held.running = None
    assert not held.is_needed()


def test_of_a_model_without_a_grid_the_queries_are_one_row():
    held = running_sum(running=running_pass(size=None))
    expected = torch.stack(CALLS).mean((0, 2))[:, None]
    torch.testing.assert_close(told(held), expected, atol=1e-6, rtol=0)


class Untouched:
    """A layer that must not be asked."""

    @property
    def calls(self):
        raise AssertionError("another layer was asked")


def test_the_maps_of_a_layer_are_looked_up_without_asking_the_others():
    held = running_sum()
    told(held)
    maps = MapsByLayer({"first": Untouched(), "a": held, "last": Untouched()})
    assert "a" in maps and "b" not in maps and 3 not in maps
    assert torch.equal(maps["a"], held.map())
    with pytest.raises(KeyError, match="'none'.*has: a"):
        MapsByLayer({"a": held, "idle": running_sum()})["none"]
    assert "idle" not in MapsByLayer({"idle": running_sum()})
