"""`sdattn info` of a model of the hub, before any of its weights are fetched."""

import json
import math

import pytest
from helpers.hub_repositories import CHECKPOINT
from helpers.tiers import tiered


def info(commands, *arguments, **variables):
    done = commands.run("info", *arguments, "--json", **variables)
    assert done.code == 0, done.err
    return json.loads(done.out)


def header(path):
    """What a safetensors file says of its tensors, by name."""
    with path.open("rb") as file:
        said = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    said.pop("__metadata__", None)
    return said


@pytest.mark.parametrize("name", tiered(["acme/single", "acme/sd", "acme/sharded"]))
def test_it_says_the_same_as_once_the_model_is_here(commands, name):
    before = info(commands, name)
    assert commands.hub.weights_sent() == []
    hub = before.pop("hub")
    draw = ("--steps", "1", "--width", "64", "--height", "64", "--device", "cpu", "--out", "run")
    assert commands.run("generate", "a cat", "-q", "--force", "-m", name, *draw).code == 0
    assert info(commands, name) == before

    repository = commands.hub.repositories[name]
    files = {file: (repository.folder / file).stat().st_size for file in repository.files()}
    missing = [size for file, size in files.items() if ".safetensors" in file]
    weights = [
        math.prod(tensor["shape"])
        for file in files
        if file.endswith(".safetensors")
        for tensor in header(repository.folder / file).values()
    ]
    assert (hub["files"], hub["bytes"]) == (len(missing), sum(missing))
    assert (hub["license"], hub["gated"]) == ("mit", False)
    assert hub["weights"] == sum(weights)


def test_options_are_told_as_they_would_be_loaded(commands):
    before = info(commands, "acme/both", "--variant", "fp16", "--dtype", "bf16")
    assert before["loading"] == {"variant": "fp16"}
    assert (before["device"], before["dtype"]) == ("cpu", "bfloat16")


def test_people_read_the_size_the_terms_and_the_memory(commands):
    done = commands.run("info", "acme/single")
    said = " ".join(done.out.split())
    size = (commands.hub.repositories["acme/single"].folder / CHECKPOINT).stat().st_size
    assert f"on the hub: 1 of 2 files to fetch, {size / 1e6:.1f} MB; license mit" in said
    assert "in a half type" in said and "StableDiffusionPipeline acme/single" in said


def test_a_hub_that_is_down_leaves_what_the_settings_tell(commands):
    before = info(commands, "acme/sd")
    commands.hub.drops = True
    again = info(commands, "acme/sd")
    assert again["layers"] == before["layers"]
    assert "bytes" not in again["hub"]


@pytest.mark.parametrize(
    ("card", "license"),
    tiered([
        ({"license": "other", "license_name": "acme-1-non-commercial"}, "acme-1-non-commercial"),
        ({"license": ["mit", "apache-2.0"]}, "mit, apache-2.0"),
        ({"license": None}, "not told"),
    ]),
)  # fmt: skip
def test_a_license_of_its_own_is_named(commands, monkeypatch, card, license):
    monkeypatch.setattr("helpers.hub_server.Repository.card", lambda repository: card)
    assert info(commands, "acme/sd")["hub"]["license"] == license
