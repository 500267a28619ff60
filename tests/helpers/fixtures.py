"""Fixtures of all tests: tiny models, and the command line in an empty folder."""

import os
import sys
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTokenizer

from helpers.chain_runs import captured, chained, make_pipe
from helpers.tiny_pipelines import make_pipeline, make_unet, small_pipeline
from helpers.tiny_tokenizers import tiny_tokenizer
from sdattn import AttentionStore, cli, load_pipeline

# Tiny models gain nothing from threads, which wait for each other on a machine with other work.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def pytest_runtest_setup(item):
    here = torch.cuda.is_available() or "device" in item.fixturenames
    if item.get_closest_marker("gpu") and not here:
        pytest.skip("needs a GPU, and torch finds none here")


@pytest.fixture(scope="session")
def device(request) -> str:
    """Of tests that need a GPU but can be tried without: the GPU, or what --device names."""
    chosen = request.config.getoption("--device")
    if not chosen and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch finds none here; --device cpu runs it without")
    return chosen or "cuda"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The folder of a tiny pipeline, for all tests; none of them changes it."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    small_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def whole_model(tmp_path_factory) -> Path:
    """The same with all blocks of SD 1.x, of 16 layers for each kind of attention."""
    folder = tmp_path_factory.mktemp("whole") / "tiny"
    make_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_unet() -> UNet2DConditionModel:
    return make_unet()


@pytest.fixture
def tiny_pipe() -> StableDiffusionPipeline:
    return make_pipeline()


@pytest.fixture
def tokenizer() -> CLIPTokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def demo():
    """The model inside the package; nothing changes it."""
    pipe = load_pipeline("demo", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def mmdit():
    """The demo with joint attention; nothing changes it."""
    pipe = load_pipeline("demo-mmdit", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def kept_steps():
    """A pipeline, a store that kept four steps of two images, and what capture() saw of each."""
    pipe, prompts = make_pipe(), ["a red cat", "a dog, a cat"]
    store = AttentionStore(pipeline=pipe, keep_steps=True)
    chained(pipe, prompts, steps=4, store=store)
    options = {"steps": "all", "heads": "all"}
    maps, _ = captured(pipe, prompts, steps=4, capture=options)
    return pipe, prompts, store, maps


@pytest.fixture(name="invoke")
def command_line(monkeypatch, capsys, tmp_path):
    """Run the command line in an empty folder, without a process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["sdattn", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return call


@pytest.fixture
def asked(monkeypatch):
    """The requests that `sdattn batch` makes; nothing is drawn."""
    from sdattn.batch import Outcome

    requests = []
    nothing = Outcome(0, 0, 0, 0, 0, None, seconds=1.0)
    monkeypatch.setattr(
        "sdattn.batch.run.run_batch", lambda request: requests.append(request) or nothing
    )
    return requests


@pytest.fixture
def eagerly(monkeypatch):
    """Models that are compiled run eagerly, as if they were."""
    if not hasattr(torch.compiler, "set_stance"):  # torch 2.5
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
