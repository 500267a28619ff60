"""What is brought to a device is brought there once, and is what the host has."""

import pytest
import torch

from sdattn.attention.device_copies import DeviceCopies, chosen, index_on

META = torch.device("meta")


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("numbers", [(1,), (2, 0), (1, 1)], ids=str)
def test_some_places_of_an_axis(dim, numbers):
    tensor = torch.arange(27.0).view(3, 3, 3)
    found = chosen(tensor, dim, numbers)
    expected = torch.stack([tensor.select(dim, number) for number in numbers], dim)
    assert torch.equal(found, expected)
    assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_numbers_are_put_on_a_device_once():
    assert index_on(META, (3, 1)) is index_on(META, (3, 1))
    assert index_on(META, (3, 1)) is not index_on(META, (1, 3))
    assert index_on(META, (3, 1), torch.int32).dtype == torch.int32


def test_what_an_inference_put_there_serves_a_gradient():
    tensor = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        index_on(tensor.device, (2, 1, 2, 1))
    chosen(tensor, 0, (2, 1, 2, 1)).sum().backward()
    assert tensor.grad.tolist() == [0, 2, 2]
    states = DeviceCopies(torch.ones(3))
    with torch.inference_mode():
        states.on(tensor.device, torch.float64)
    (tensor.double() * states.on(tensor.device, torch.float64)).sum().backward()
    assert tensor.grad.tolist() == [1, 3, 3]


def test_a_copy_for_each_device_and_dtype_until_the_tensor_is_written_to():
    own = torch.tensor([1.0, 2.0])
    copies = DeviceCopies(own)
    assert copies.on(own.device) is own
    half = copies.on(own.device, torch.float16)
    assert half is copies.on(own.device, torch.float16)
    assert half.tolist() == [1, 2]
    assert copies.on(META) is copies.on(META, torch.float32)
    own[0] = 3
    assert copies.on(own.device, torch.float16).tolist() == [3, 2]


def test_a_copy_is_in_the_graph_of_a_tensor_that_has_one():
    own = torch.ones(2, requires_grad=True)
    copies = DeviceCopies(own)
    with torch.no_grad():
        copies.on(own.device, torch.float64)
    copies.on(own.device, torch.float64).sum().backward()
    assert own.grad.tolist() == [1, 1]
