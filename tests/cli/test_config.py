"""`--config`: the options of a .toml file, or those that a run was made with."""

import json
from pathlib import Path

import pytest
from helpers.command_lines import generate, said
from helpers.demo_words import THING
from PIL import Image, ImageChops

from sdattn import load_run
from sdattn.cli.repeating import options_of_run


def test_a_toml_file_has_the_defaults_and_what_is_typed_wins(invoke, asked):
    Path("batch.toml").write_text(
        'prompts = "in.txt"\nout = "run"\nseed = 7\nsteps = 3\nguidance = 2.5\nnegative = "a, b"\n'
        'max_errors = 2\ninput-format = "csv"\nstrict = true\nforce = false\npreset = "daam"\n'
        '[set]\ntrue_cfg_scale = 4\nscheduler = "4"\n'
    )
    assert invoke("batch", "--config", "batch.toml", "--seed", "8", "--max-errors", "3")[0] == 0
    [request] = asked
    assert (request.source, request.out, request.seed) == ("in.txt", Path("run"), 8)
    assert (request.max_errors, request.input_format) == (3, "csv")
    assert (request.strict, request.force, request.preset.name) == (True, False, "daam")
    assert request.options == {
        "num_inference_steps": 3,
        "guidance_scale": 2.5,
        "negative_prompt": "a, b",
        "true_cfg_scale": 4,
        "scheduler": "4",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stps = 3", "`sdattn batch` has no 'stps'. Did you mean 'steps'?"),
        ("zz = 1\nwidht = 3", "has no 'zz', 'widht'. Did you mean 'width'?"),
        ("steps = [2]", "'steps' is [2]; give it a text or number."),
        ("steps = true", "'steps' is true; give it a text or number."),
        ('strict = "yes"', "'strict' is \"yes\"; give it true or false."),
        ("steps = ", "is no TOML"),
        ("steps = 0", "'--steps'"),
        ("steps = 2.5", "'--steps'"),
        ('preset = "best"', "'--preset'"),
        ("config = 'x.toml'", "has no 'config'"),
    ],
)
def test_entries_that_cannot_be_are_named(invoke, asked, text, message):
    Path("batch.toml").write_text(f"prompts = 'in.txt'\nout = 'run'\n{text}\n")
    code, out, err = invoke("batch", "--config", "batch.toml")
    assert (code, out, asked) == (2, "", [])
    assert message in said(err)


@pytest.mark.slow
def test_a_run_is_drawn_again_from_its_run_json(invoke, model):
    more = ("--seed", "4", "--negative", "a dog", "--guidance", "3", "--width", "64", "--height")
    ways = ("64", "--refine", "self", "--keep", "steps,spots", "--negative-maps", "--set")
    assert generate(invoke, model, *more, *ways, "eta=0.5", "--out", "first")[0] == 0
    command = ("generate", "--config", "first/run.json", "--device", "cpu")
    assert invoke(*command, "--out", "again")[0] == 0
    first, again = load_run("first"), load_run("again")
    assert first.settings.to_json() | {"files": 0} == again.settings.to_json() | {"files": 0}
    assert ImageChops.difference(first.image, again.image).getbbox() is None
    assert invoke(*command, "--seed", "5", "--out", "other")[0] == 0  # a folder will do as well
    assert load_run("other").settings.seed == 5


@pytest.mark.slow
def test_an_edit_is_read_from_its_run_json(invoke, model):
    edited = ("--blend", "cat", "--weight", "dog=2", "--cross", "0.5", "--seed", "3")
    options = ("--steps", "2", "--guidance", "3", "--device", "cpu", "--out", "edit")
    assert invoke("edit", "a red cat", "a red dog", "--model", model, *edited, *options)[0] == 0
    command, found = options_of_run(Path("edit/run.json"))
    assert command == "edit"
    assert found["source"] == "a red cat" and found["targets"] == ["a red dog"]
    assert (found["mode"], found["cross_replace_steps"]) == ("replace", 0.5)
    assert (found["self_replace_steps"], found["seed"]) == (0.4, 3)
    assert (found["blend"], found["weights"]) == (["cat", "dog"], {"dog": 2.0})
    assert found["options"] == {"num_inference_steps": 2, "guidance_scale": 3.0}
    assert invoke("edit", "--config", "edit", "--device", "cpu", "--out", "again")[0] == 0
    first, again = (json.loads(Path(name, "run.json").read_text()) for name in ("edit", "again"))
    changed = {name for name in first if first[name] != again.get(name)}
    assert changed <= {"blend"}  # its words were found, so that all of them are given
    with Image.open("edit/edit.png") as one, Image.open("again/edit.png") as other:
        assert one.tobytes() == other.tobytes()
    code, _, err = invoke("generate", "--config", "edit/target/run.json")
    assert code == 2 and "is of one image of an edit" in said(err)


@pytest.mark.slow
def test_an_image_is_looked_at_again_with_the_run_json_of_its_run(invoke):
    Image.new("RGB", (64, 64), (200, 30, 30)).save("photo.png")
    way = ("--timesteps", "50,100", "--seed", "2", "--ask", "umbrella", "--device", "cpu")
    assert invoke("explain", "photo.png", f"a red {THING}", *way, "--out", "first")[0] == 0
    command = ("explain", "photo.png", "--config", "first", "--device", "cpu", "--out", "again")
    code, _, err = invoke(*command)
    assert code == 0, err
    first, again = load_run("first").settings, load_run("again").settings
    for name in ("prompt", "seed", "asked", "explained", "preset", "options", "timesteps"):
        assert getattr(first, name) == getattr(again, name)
    typed = ("explain", "--config", "first", "--device", "cpu", "--out", "third")
    Path("photo.png").rename("first.png")
    assert invoke(*typed, "--force")[0] == 0  # the folder's own image
    third = load_run("third").settings
    assert third.explained.file == "image.png"
    assert third.explained.timesteps == first.explained.timesteps
    Path("first.png").rename("first/photo.png")  # beside its run.json
    assert invoke(*typed, "--force")[0] == 0
    assert load_run("third").settings.explained == first.explained
    code, _, err = invoke("generate", "--config", "first")
    assert code == 2 and "is of a run of `sdattn explain`" in said(err)


@pytest.mark.parametrize("name", ["prompt", "targets", "mode", "self_replace_steps"])
def test_an_edits_file_that_lacks_an_entry_is_refused_by_its_name(invoke, name):
    whole = {"format": "sdattn-edit-1", "prompt": "a cat", "targets": ["a dog"], "mode": "replace"}
    whole |= {"cross_replace_steps": 0.5, "self_replace_steps": 0.4, "seed": 1, "runs": []}
    whole |= {"blend": None, "weights": {}}
    document = {key: value for key, value in whole.items() if key != name}
    Path("run.json").write_text(json.dumps(document))
    code, _, err = invoke("edit", "--config", "run.json")
    assert code == 2 and f"run.json: {name!r} is missing. Restore it" in said(err)
