"""Models of a hub in the situations that people meet: how a command ends, and in which words.

The hub is small, but its API is a real one's, and so are the libraries that ask it.
"""

import os
import shlex
import signal

import pytest
from helpers.hub_server import TOKEN
from helpers.tiers import tiered

DRAW = ("generate", "a cat", "--force", "--steps", "1", "--width", "64", "--height", "64")
DRAW += ("--device", "cpu", "--out", "run", "--model")
ALIEN = ("stacktrace", "Traceback", "mozilla", "local_files_only", "trust_remote_code", "repo_id")
PAGE = "https://huggingface.co"
WEIGHTS = "diffusion_pytorch_model.safetensors"

# A situation is a few of these words, and "first", "cached" (by an earlier run), "main" (the same,
# by one without further options), "partial" (all but the UNet's weights), and of the disk "full",
# or "filling" while it still says that there is space.
HUBS = {
    "503": {"status": 503},
    "429": {"status": 429, "retry_after": 1},
    "dropped": {"drops": True},
    "silent": {"delay": 50.0},
    "slow": {"delay": 0.02, "bytes_per_second": 1e6},
    "cut": {"cut_after": 1 << 16},
    "cut-once": {"cut_after": 1 << 16, "cuts": 1},
    "stalled": {"stall_after": 1 << 15},
    "deleted": {"repositories": {}},
}
VARIABLES = {  # HUB is the hub's own address
    "offline": {"HF_HUB_OFFLINE": "1"},
    "token": {"HF_TOKEN": TOKEN},
    "expired": {"HF_TOKEN": "expired"},
    "proxy": {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": "HUB"},
    "unplugged": {"HF_ENDPOINT": "http://127.0.0.1:1"},
    "silent": {"HF_HUB_ETAG_TIMEOUT": "1"},
    "stalled": {"HF_HUB_DOWNLOAD_TIMEOUT": "1"},
}

# What follows --model; the situation; the exit code; a word of the one line that is printed, which
# is a warning if the command goes on, and "" if there is none
SITUATIONS = [
    ("acme/sd", "cut-once", 0, ""),
    ("acme/sd", "cached offline", 0, ""),
    ("acme/sd", "cached expired", 0, "HF_TOKEN"),
    ("acme/sd", "offline", 2, "copy"),
    ("acme/sd", "expired", 2, "HF_TOKEN"),
    ("acme/sd", "503", 1, "503"),
    ("acme/sd", "proxy", 1, "proxy"),
    ("acme/sd", "unplugged", 1, "connection"),
    ("acme/sd", "full", 1, "disk"),
    ("acme/sd --revision v9", "first", 2, "--revision"),
    ("acme/missing", "first", 2, "name"),
    ("acme/private", "first", 2, "private"),
    ("acme/private", "token", 0, ""),
    ("acme/gated", "first", 2, "gated"),
    ("acme/several", "first", 2, "acme/several/acme_v8.safetensors"),
    (f"{PAGE}/acme/several/blob/main/acme_v8.safetensors", "first", 0, ""),
    ("acme/lora", "first", 2, "--lora acme/lora"),
    ("acme/code", "first", 2, "code"),
    ("acme/llm", "first", 2, "LlamaForCausalLM"),
]
FURTHER = [  # the last ones wait for an answer until they give up
    ("acme/sd", "429", 1, "429"),
    ("acme/sd", "partial", 0, ""),
    ("acme/sd", "partial offline", 2, "copy"),
    ("acme/fp16", "first", 0, "fp16"),
    ("acme/stray", "first", 0, ""),
    ("acme/sd --lora acme/lora", "cached offline", 0, ""),
    ("acme/pickles", "first", 2, "convert"),
    ("acme/both --variant fp16", "first", 0, ""),
    ("acme/sd", "first", 0, ""),
    ("acme/sd", "cached 503", 0, "503"),
    ("acme/sd", "dropped", 1, "connection"),
    ("acme/sd", "cut", 1, "connection"),
    ("acme/sd", "partial proxy", 1, "proxy"),
    ("acme/sd --revision v9", "main", 2, "--revision"),
    ("acme/missing", "offline", 2, "copy"),
    ("acme/gated", "token", 0, ""),
    ("acme/refused", "first", 2, "gated"),
    ("acme/sharded", "first", 0, ""),
    ("acme/single", "first", 0, ""),
    ("acme/single/other.safetensors", "first", 2, "acme_v7.safetensors"),
    (f"{PAGE}/acme/sd", "first", 0, ""),
    ("acme/lora-bare", "first", 2, "--lora acme/lora-bare"),
    ("acme/empty", "first", 2, "model_index.json"),
    ("acme/sd", "cached dropped", 0, "connection"),
    ("acme/sd", "cached proxy", 0, "proxy"),
    ("acme/sd", "slow", 0, ""),
    ("acme/sd", "partial 503", 1, "503"),
    ("acme/sd", "filling", 1, "disk"),
    ("acme/missing", "token", 2, "name"),
    ("acme/refused", "token", 2, "gated"),
    ("acme/single", "cached offline", 0, ""),
    ("acme/single", "dropped", 1, "connection"),
    ("acme/code-part", "first", 2, "code"),
    ("acme/sd --lora acme/missing", "first", 2, "name"),
    ("acme/gated", "expired", 2, "HF_TOKEN"),
    ("acme/both --variant bf16", "first", 2, "fp16"),
    ("acme/sd --lora acme/lora", "first", 0, ""),
    ("acme/single/acme_v7.safetensors", "first", 0, ""),
    ("acme/sd --revision v1", "first", 0, ""),
    ("acme/sd", "cached 429", 0, "429"),
    ("acme/sd", "cached unplugged", 0, "connection"),
    ("acme/sd", "cached deleted", 0, "name"),
    ("acme/sd", "partial dropped", 1, "connection"),
    ("acme/sd --revision v9", "503", 1, "503"),
    ("acme/missing", "503", 1, "503"),
    ("acme/missing/acme_v7.safetensors", "first", 2, "name"),
    ("acme/private", "expired", 2, "HF_TOKEN"),
    ("acme/private", "cached", 0, "private"),
    ("acme/gated", "cached", 0, ""),
    ("acme/fp16", "cached offline", 0, "fp16"),
    ("acme/fp16", "503", 1, "503"),
    ("acme/both --variant fp16", "cached offline", 0, ""),
    ("acme/both --variant fp16", "main offline", 2, "copy"),
    ("acme/sharded", "cached offline", 0, ""),
    ("acme/single", "cached dropped", 0, "connection"),
    ("acme/single", "expired", 2, "HF_TOKEN"),
    ("acme/single/acme_v7.safetensors", "cached proxy", 0, "proxy"),
    (f"{PAGE}/acme/sd", "main offline", 0, ""),
    (f"{PAGE}/acme/missing", "first", 2, "name"),
    ("acme/lora", "offline", 2, "copy"),
    ("acme/sd --lora acme/lora", "main 503", 1, "503"),
    ("acme/sd", "silent", 1, "connection"),
    ("acme/sd", "cached silent", 0, "connection"),
    ("acme/sd", "stalled", 1, "connection"),
]
# Files with weights that are fetched, where others are next to them or in the cache. None are for
# what is refused.
FETCHED = {
    ("acme/sd", "partial"): [f"unet/{WEIGHTS}"],
    ("acme/sd", "cached offline"): [],
    ("acme/stray", "first"): [
        "text_encoder/model.safetensors",
        f"unet/{WEIGHTS}",
        f"vae/{WEIGHTS}",
    ],
    ("acme/both --variant fp16", "first"): [
        "text_encoder/model.fp16.safetensors",
        f"unet/{WEIGHTS.replace('.', '.fp16.')}",
        f"vae/{WEIGHTS.replace('.', '.fp16.')}",
    ],
    (f"{PAGE}/acme/several/blob/main/acme_v8.safetensors", "first"): ["acme_v8.safetensors"],
}


def arrange(commands, typed, words):
    """Arrange a situation; return the variables of a command's environment in it."""
    own = {"cached", "partial"} & {*words}
    if own or "main" in words:
        first = shlex.split(typed.removeprefix(f"{PAGE}/"))[: None if own else 1]
        commands.fill_the_cache(*DRAW, *first, "-q", HF_TOKEN=TOKEN)
    if "partial" in words:
        commands.lose(f"unet/{WEIGHTS}")
    commands.hub.requests.clear()
    variables = {}
    for word in words:
        for name, value in HUBS.get(word, {}).items():
            setattr(commands.hub, name, value)
        for name, value in VARIABLES.get(word, {}).items():
            variables[name] = value.replace("HUB", commands.hub.url)
    return variables


@pytest.mark.parametrize(
    ("typed", "situation", "code", "noun"),
    [pytest.param(*row, id=f"{row[0]}, {row[1]}") for row in SITUATIONS]
    + [pytest.param(*row, id=f"{row[0]}, {row[1]}", marks=pytest.mark.slow) for row in FURTHER],
)
def test_a_command_ends_as_it_should_and_says_why(commands, typed, situation, code, noun):
    words = situation.split()
    variables = arrange(commands, typed, words)
    command = (*DRAW, *shlex.split(typed), "-q")
    disk = " ".join({"full", "filling"} & {*words})
    done = commands.run(*command, disk=disk, **variables)
    assert (done.code, done.out) == (code, ""), done.err
    assert commands.parts() == []
    if code == 2 or (typed, situation) in FETCHED:
        assert commands.hub.weights_sent() == FETCHED.get((typed, situation), [])
    if not noun:
        assert done.err == ""
        return
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("sdattn: " if code else "sdattn: warning: ")
    assert noun in done.err
    assert [word for word in ALIEN if word in done.err] == []
    assert [name for name in names_in(typed) if name not in done.err] == []


def names_in(typed):
    """Return what a message names of what was typed: a repository, and its file if there is one."""
    asked = shlex.split(typed)[-1 if "--lora" in typed else 0].removeprefix(f"{PAGE}/")
    owner, name, *file = asked.replace("/blob/main", "").split("/")
    return [f"{owner}/{name}", *file]


@pytest.mark.parametrize("name", tiered(["lora-bare", "lora"]))
def test_the_model_that_a_lora_is_for_is_named(commands, name):
    """By its card, or by what its trainer wrote into the file."""
    assert "acme/sd" in commands.run(*DRAW, f"acme/{name}", "-q").err


def test_a_killed_download_leaves_nothing_behind(commands):
    commands.hub.stall_after = 1 << 15
    pid = commands.start(*DRAW, "acme/sd", "-q")
    assert commands.hub.has_stalled.wait(30)
    os.kill(pid, signal.SIGKILL)
    assert commands.wait(pid).code == -signal.SIGKILL
    assert commands.parts() != []
    commands.hub.reset()
    assert commands.run(*DRAW, "acme/sd", "-q").code == 0
    assert commands.parts() == []


def test_an_interrupted_download_ends_at_once_and_leaves_nothing(commands):
    """At once: the hub sends nothing more, and the command would wait longer than it may take."""
    commands.hub.stall_after = 1 << 20  # after the header
    pid = commands.start(*DRAW, "acme/single", "-q", HF_HUB_DOWNLOAD_TIMEOUT="3600")
    assert commands.hub.has_stalled.wait(30)
    os.kill(pid, signal.SIGINT)
    assert commands.wait(pid).code == 130
    assert commands.parts() == []


def test_parts_that_another_process_still_writes_stay(commands):
    """Both variants are in the same folder of the cache."""
    commands.hub.stall_after = 1 << 15
    commands.hub.stalls = 1
    first = commands.start(*DRAW, "acme/both", "-q", HF_HUB_DOWNLOAD_TIMEOUT="100")
    assert commands.hub.has_stalled.wait(30)
    assert commands.run(*DRAW, "acme/both", "--variant", "fp16", "-q").code == 0
    assert commands.parts() != []
    commands.hub.stall_after = None
    assert commands.wait(first).code == 0
    assert commands.parts() == []
