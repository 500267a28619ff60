"""Whose function runs in the place of a module's own."""

from functools import partial

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from sdattn.models.replaced_calls import replaced_call


def foreign(given):
    return given


def with_forward(function):
    module = nn.Linear(2, 2)
    module.forward = function
    return module


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2),
        with_forward(partial(nn.Linear.forward, nn.Linear(2, 2))),
        add_hook_to_module(nn.Linear(2, 2), ModelHook()),
        add_hook_to_module(add_hook_to_module(nn.Linear(2, 2), ModelHook()), ModelHook(), True),
    ],
)
def test_what_a_library_puts_there_calls_the_modules_own(module):
    assert replaced_call(module) is None
    assert module(torch.ones(2)).shape == (2,)


@pytest.mark.parametrize("function", [foreign, partial(foreign), partial(partial(foreign))])
@pytest.mark.parametrize(
    "wrap", [lambda module: module, partial(add_hook_to_module, hook=ModelHook())]
)
def test_a_function_of_other_code_is_found_below_what_libraries_put_around_it(function, wrap):
    module = wrap(with_forward(function))
    assert replaced_call(module) == ("forward", foreign)
    given = torch.ones(2)
    assert module(given) is given


def test_a_function_of_no_module_is_of_other_code():
    function = "".join
    assert function.__module__ is None
    assert replaced_call(with_forward(function)) == ("forward", function)


def test_python_asks_the_class_alone_how_it_is_called():
    module = nn.Linear(2, 2)
    vars(module)["__call__"] = foreign
    assert replaced_call(module) is None
    kind = type("Other", (nn.Linear,), {"__module__": "theirs", "__call__": foreign})
    assert replaced_call(kind(2, 2)) == ("__call__", foreign)
