"""Calls that are refused before anything runs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from sdattn.models.denoiser import find_denoiser


@contextmanager
def refused_unrun(pipe, message: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Check that the block raises an error that says so, before the pipeline's denoiser or the
    encoder of its images ran, and that the layers have their processors."""
    model = find_denoiser(pipe).model
    before = dict(getattr(model, "attn_processors", {}))
    ran = []
    with ExitStack() as hooks:
        for module in (model, getattr(pipe.vae, "encoder", model)):
            hook = module.register_forward_pre_hook(lambda module, _: ran.append(type(module)))
            hooks.callback(hook.remove)
        with pytest.raises(error, match=message):
            yield
    assert not ran
    assert all(model.attn_processors[name] is one for name, one in before.items())
