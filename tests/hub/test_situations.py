"""Models of a hub in the situations that people meet: how a command ends, and in which words.

The hub is small, but its API is a real one's, and so are the libraries that ask it.
"""

import shlex

import pytest
from helpers.hub_commands import HubCommands
from helpers.hub_repositories import make_repositories
from helpers.hub_server import TOKEN, HubServer

DRAW = ("generate", "a cat", "-q", "--force", "--steps", "1", "--width", "64", "--height", "64")
DRAW += ("--device", "cpu", "--out", "run", "--model")
ALIEN = ("stacktrace", "Traceback", "mozilla", "local_files_only", "trust_remote_code", "repo_id")
PAGE = "https://huggingface.co"

HUBS = {  # how the hub answers, in a word of a situation
    "503": {"status": 503},
    "429": {"status": 429, "retry_after": 1},
    "dropped": {"drops": True},
    "silent": {"delay": 50.0},
    "slow": {"delay": 0.02, "bytes_per_second": 1e6},
    "cut": {"cut_after": 1 << 16},
}
VARIABLES = {  # of the environment; HUB is the hub's own address
    "offline": {"HF_HUB_OFFLINE": "1"},
    "token": {"HF_TOKEN": TOKEN},
    "expired": {"HF_TOKEN": "expired"},
    "proxy": {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": "HUB"},
    "unplugged": {"HF_ENDPOINT": "http://127.0.0.1:1"},
}

# --model and further options; the situation; the exit code; a word of the message
SITUATIONS = [
    ("acme/sd", "first", 0, ""),
    ("acme/sd", "cached", 0, ""),
    ("acme/sd", "offline", 2, "copy"),
    ("acme/sd", "cached offline", 0, ""),
    ("acme/sd", "expired", 2, "HF_TOKEN"),
    ("acme/sd", "503", 1, "503"),
    ("acme/sd", "429", 1, "429"),
    ("acme/sd", "dropped", 1, "reach"),
    ("acme/sd", "proxy", 1, "proxy"),
    ("acme/sd --revision v9", "first", 2, "--revision"),
    ("acme/lora", "first", 2, "--lora acme/lora"),
    ("acme/pickles", "first", 2, "pickle"),
]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(make_repositories(folder / "repositories")) as hub:
        with HubCommands(hub, folder) as commands:
            yield commands


@pytest.fixture(autouse=True)
def _first(commands):
    """Begin with a hub that is well, and an empty cache."""
    commands.hub.reset()
    commands.empty_the_cache()


@pytest.mark.parametrize(
    ("typed", "situation", "code", "noun"),
    [pytest.param(*row, id=f"{row[0]}, {row[1]}") for row in SITUATIONS],
)
def test_a_command_ends_as_it_should_and_says_why(commands, typed, situation, code, noun):
    command = (*DRAW, *shlex.split(typed))
    words = situation.split()
    if "cached" in words:
        commands.fill_the_cache(*command, HF_TOKEN=TOKEN)
    variables = {}
    for word in words:
        for name, value in HUBS.get(word, {}).items():
            setattr(commands.hub, name, value)
        for name, value in VARIABLES.get(word, {}).items():
            variables[name] = value.replace("HUB", commands.hub.url)
    done = commands.run(*command, disk_is_full="full" in words, **variables)
    assert (done.code, done.out) == (code, ""), done.err
    if code == 0:
        assert done.err == ""
        return
    assert done.err.count("\n") == 1
    assert done.err.startswith("sdattn: ")
    assert noun in done.err
    assert [word for word in ALIEN if word in done.err] == []
