"""Threads of a run: one for a small model on a CPU, and the caller's number afterwards."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from helpers.tiny_pipelines import small_pipeline
from PIL import Image
from torch.nn.modules.module import register_module_forward_pre_hook

import sdattn
from sdattn import edit, explain, generate, knockout
from sdattn.errors import SdattnWarning
from sdattn.models import threads
from sdattn.models.threads import few_threads, warn_of_slow_steps

PIPE = small_pipeline()
OPTIONS = {"num_inference_steps": 3, "width": 64, "height": 64}
IMAGE = Image.new("RGB", (64, 64), "red")
RUNS = {
    "generate": lambda pipe: generate(pipe, "a red cat", ask="dog", causal=True, **OPTIONS),
    "explain": lambda pipe: explain(pipe, IMAGE, "a red cat"),
    "invert": lambda pipe: explain(pipe, IMAGE, "a red cat", invert=True, num_inference_steps=2),
    "edit": lambda pipe: edit.edit(pipe, "a red cat", "a red dog", **OPTIONS),
    "guide": lambda pipe: edit.guide(
        pipe, "a red cat", [edit.inside("cat", (0, 0, 0.5, 0.5))], scale=0.01, **OPTIONS
    ),
    "knockout": lambda pipe: knockout(pipe, "a red cat", "cat", **OPTIONS),
}
NAMED = sorted(RUNS.keys() - {"knockout"})  # those that take a model's name


def test_torch_may_begin_with_the_machines_cores_or_with_this_processs(monkeypatch):
    usable = {0: {3, 5, 7}, 1: {0}}  # by process; 0 is this one
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 16 if logical else 8)
    monkeypatch.setattr("os.sched_getaffinity", usable.get, raising=False)
    assert threads._cores() == {16, 8, 3}
    monkeypatch.delattr("os.sched_getaffinity")  # macOS
    assert threads._cores() == {16, 8}


@pytest.fixture
def two(monkeypatch):
    """A machine that starts with two threads, and a user who chose no number."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@contextmanager
def seen_threads():
    """Yield the numbers of threads in which modules run inside the block."""
    seen = set()
    hook = register_module_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("run", RUNS)
def test_a_small_model_runs_in_one_thread(two, run):
    with seen_threads() as seen:
        RUNS[run](PIPE)
    assert seen == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("run", NAMED)
def test_a_model_by_its_name_runs_alike(two, run, model, monkeypatch):
    monkeypatch.setattr("sdattn.runs.preparing.load_pipeline", lambda name: PIPE)
    with seen_threads() as seen:
        RUNS[run](model)
    assert seen == {1}
    assert torch.get_num_threads() == 2


def test_the_callers_number_is_put_back_after_a_failure(two):
    def stop(*_):
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        sdattn.generate(PIPE, "a red cat", callback_on_step_end=stop, **OPTIONS)
    assert torch.get_num_threads() == 2


def test_the_number_that_the_user_chose_stays(two, monkeypatch):
    monkeypatch.setattr(threads, "_cores", lambda: {2, 8})
    torch.set_num_threads(3)
    with few_threads(PIPE):
        assert torch.get_num_threads() == 3
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with few_threads(PIPE):
        assert torch.get_num_threads() == 2


def test_a_large_model_and_a_gpu_keep_all_threads(two, monkeypatch):
    weights = sum(
        weight.numel()
        for part in PIPE.components.values()
        if isinstance(part, torch.nn.Module)
        for weight in part.parameters()
    )
    for size, within in ((weights, 2), (weights + 1, 1)):
        monkeypatch.setattr(threads, "SMALL", size)
        with few_threads(PIPE):
            assert torch.get_num_threads() == within
    monkeypatch.setattr(type(PIPE), "_execution_device", torch.device("cuda"))
    with few_threads(PIPE):
        assert torch.get_num_threads() == 2


def told(seconds):
    """Return the warnings of a run whose model calls end at these seconds."""
    times = iter(seconds)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with warn_of_slow_steps(PIPE, clock=lambda: next(times)):
            for _ in seconds:
                PIPE.unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 77, 32))
    assert not PIPE.unet._forward_hooks
    return [str(one.message) for one in found if one.category is SdattnWarning]


def test_slow_steps_in_several_threads_are_told_once(two):
    assert told([50.0, 51.0, 52.0]) == []  # the first step is not counted; a second is not slow
    [text] = told([0.0, 0.5, 2.0, 4.0])
    assert "OMP_NUM_THREADS=1" in text


def test_slow_steps_are_told_only_where_fewer_threads_may_help(two, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threads, "SMALL", 1)
        assert told([0.0, 5.0]) == []
    torch.set_num_threads(1)
    assert told([0.0, 5.0]) == []


def test_a_run_warns_of_its_slow_steps(two, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(threads, "SLOW", -1.0)
    with pytest.warns(SdattnWarning, match="OMP_NUM_THREADS=1"):
        generate(PIPE, "a red cat", **OPTIONS)
