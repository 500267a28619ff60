"""A warning points at the line of the user's own that did it, however deep it was noticed."""

import ast
import linecache
import threading
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline

import sdattn
from sdattn import AttentionStore, CaptureWarning, TorchAttnProcessor, TruncationWarning
from sdattn.edit import register_attention_control

PROMPT = "a red cat"
LONG = "a red cat " * 40
BLUE = LONG.replace("red", "blue", 1)
SMALL = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}


def a_capture_that_ends(pipe):
    with sdattn.capture(pipe, steps=[0, 7]):  # this line
        pipe(PROMPT, **SMALL)


def a_capture_among_others(pipe):
    with ExitStack() as stack:  # this line
        stack.enter_context(sdattn.capture(pipe, steps=[0, 7]))
        stack.enter_context(torch.no_grad())
        pipe(PROMPT, **SMALL)


def a_processor_replaced_in_a_capture(pipe):
    with sdattn.capture(pipe):
        pipe.unet.set_attn_processor(AttnProcessor())
        pipe(PROMPT, **SMALL)  # this line


def a_capture_that_checks_itself(pipe):
    with sdattn.capture(pipe, steps=[0, 7]) as store:
        store.checks_itself = False
        pipe(PROMPT, **SMALL)
    store.check()  # this line


def a_store_of_two_passes_a_step(pipe):
    store = AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    with torch.no_grad():
        for text in torch.randn(2, 1, 7, 32, generator=torch.Generator().manual_seed(0)):
            pipe.unet.forward(torch.zeros(1, 4, 8, 8), timestep=600, encoder_hidden_states=text)
    return store


def a_store_that_is_read(pipe):
    store = a_store_of_two_passes_a_step(pipe)
    _ = store.last_step  # this line


def a_store_that_is_averaged(pipe):
    store = a_store_of_two_passes_a_step(pipe)
    store.get_average_attention()  # this line


def a_controller_that_saw_nothing(pipe):
    with register_attention_control(pipe, AttentionStore()):  # this line
        pass


def a_handle_that_is_removed(pipe):
    handle = register_attention_control(pipe, AttentionStore())
    handle.remove()  # this line


def heatmaps_of_a_long_prompt(pipe):
    with sdattn.capture(pipe) as store:
        pipe(LONG, **SMALL)
    sdattn.heatmaps(store, pipe.tokenizer, LONG)  # this line


def a_prompt_that_is_read(pipe):
    sdattn.read_prompt(pipe.tokenizer, LONG)  # this line


def an_image_that_is_drawn(pipe):
    sdattn.generate(pipe, LONG, height=64, width=64, num_inference_steps=2)  # this line


def an_edit(pipe):
    sdattn.edit_image(pipe, LONG, BLUE, height=64, width=64, num_inference_steps=2)  # this line


def a_capture_in_a_thread(pipe):
    def run():
        with sdattn.capture(pipe, steps=[0, 7]):  # this line
            pipe(PROMPT, **SMALL)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


LINES = [
    a_capture_that_ends,
    a_capture_among_others,
    a_processor_replaced_in_a_capture,
    a_capture_that_checks_itself,
    a_store_that_is_read,
    a_store_that_is_averaged,
    a_controller_that_saw_nothing,
    a_handle_that_is_removed,
    heatmaps_of_a_long_prompt,
    a_prompt_that_is_read,
    an_image_that_is_drawn,
    an_edit,
    a_capture_in_a_thread,
]


@pytest.mark.parametrize("line", tiered(LINES, quick=2), ids=lambda line: line.__name__)
def test_a_warning_points_at_the_users_own_line(line):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        line(make_pipeline())
    ours = [one for one in heard if issubclass(one.category, (CaptureWarning, TruncationWarning))]
    assert ours
    for one in ours:
        assert one.filename == __file__
        assert "# this line" in linecache.getline(__file__, one.lineno), one.lineno


@pytest.mark.slow
def test_nothing_counts_the_levels_of_the_stack():
    package = Path(sdattn.__file__).parent
    counting = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
    }
    assert counting == set()
