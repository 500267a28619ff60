"""`--json` and `--quiet`: what programs read, and nothing beside it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.command_lines import generate
from helpers.demo_words import OTHER, THING
from PIL import Image

from sdattn import load_run
from sdattn.cli.failures import save_drawn
from sdattn.cli.output import Output


def only(out):
    """The one object on stdout."""
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of the demo."""
    import sdattn

    folder = tmp_path_factory.mktemp("run") / "first"
    pipe = sdattn.load_pipeline("demo", device="cpu")
    sdattn.generate(pipe, f"a red {THING}", num_inference_steps=1).save(folder)
    return folder


@pytest.mark.slow
def test_generate_answers_with_its_run(invoke, model):
    code, out, err = generate(invoke, model, "--json", "--ask", "wheel", "--out", "run")
    assert code == 0
    assert "StableDiffusionPipeline" in err
    [found] = only(out)["runs"]
    assert (found["folder"], found["open"]) == ("run", "run/report.html")
    assert found["info"] == json.loads(Path("run/run.json").read_text())
    maps = load_run("run").heatmaps.occurrences()
    assert [word["word"] for word in found["words"]["prompt"]] == [held.label for held in maps]
    for word, held in zip(found["words"]["prompt"], maps, strict=True):
        assert word["tokens"] == list(held.columns)
        assert word["highest"] == pytest.approx(held.range[1], abs=1e-3)
    assert [word["word"] for word in found["words"]["asked"]] == ["wheel"]


def test_a_failure_is_an_object_too(invoke, model):
    code, out, err = generate(invoke, model, "--json", "--seed", "-1")
    assert code == 2
    assert only(out)["error"].startswith("--seed -1: pass a whole number")
    assert only(out)["error"] in err
    code, out, err = generate(invoke, model, "--json", "--steps", "none")
    assert (code, out) == (2, "") and "Usage" in err


@pytest.mark.parametrize("broken", ["sdattn.runs.sampling.heatmaps_of", "sdattn.runs.run.save_run"])
def test_images_that_were_drawn_before_an_error_are_saved(invoke, model, monkeypatch, broken):
    def fails(*given, **options):
        raise OSError(28, "No space left on device", "run")

    Path("outputs").mkdir()
    Path("outputs/unfinished-1.png").write_text("another's")
    with monkeypatch.context() as spoilt:
        spoilt.setattr(broken, fails)
        code, out, err = generate(invoke, model, "--json", "--out", "run")
    assert code == 1
    said = only(out)
    assert said["images"] == ["outputs/unfinished-2.png"]
    assert "drawn before is in outputs/unfinished-2.png" in err and "disk of run" in err
    assert generate(invoke, model, "--out", "run")[0] == 0
    with Image.open("outputs/unfinished-2.png") as found, Image.open("run/image.png") as image:
        assert found.tobytes() == image.tobytes()


def test_images_of_one_colour_are_not_saved_and_videos_are(tmp_path):
    frames = [Image.effect_noise((8, 8), 50 + number).convert("RGB") for number in range(3)]
    error = ValueError()
    error.images = [Image.new("RGB", (8, 8)), frames, frames[0]]
    first, second = save_drawn(error, tmp_path / "new")
    with Image.open(first) as video, Image.open(second) as image:
        assert (Path(first).name, video.n_frames) == ("unfinished-1.webp", 3)
        assert image.tobytes() == frames[0].tobytes()
    assert save_drawn(ValueError(), tmp_path) == []
    assert save_drawn(error, Path(first)) == []  # a file is in the way


@pytest.mark.slow
def test_quiet_prints_nothing_but_what_is_wrong(invoke, model):
    assert generate(invoke, model, "--quiet", "--out", "run") == (0, "", "")
    code, out, err = generate(invoke, model, "-q", "--out", "run")
    assert (code, out) == (2, "") and "exists already" in err
    assert only(generate(invoke, model, "-q", "--json", "--out", "two")[1])["runs"]


@pytest.mark.slow
def test_explain_answers_with_its_run(invoke):
    Image.new("RGB", (64, 64), (200, 30, 30)).save("photo.png")
    options = ("--timesteps", "100", "--device", "cpu", "--json")
    code, out, err = invoke("explain", "photo.png", f"a red {THING}", *options)
    [found] = only(out)["runs"]
    assert (code, found["open"]) == (0, "outputs/photo-explained-0/report.html")
    assert found["info"]["explained"]["timesteps"] == [100]
    assert "looking: " in err


@pytest.mark.slow
def test_info_answers_with_the_layers(invoke, whole_model):
    code, out, _ = invoke("info", whole_model, "--json")
    found = only(out)
    assert code == 0
    kind = [found[name] for name in ("pipeline", "device", "dtype")]
    assert kind == ["StableDiffusionPipeline", "cpu", "float32"]
    assert len(found["layers"]) == 32
    first = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
    assert found["layers"][0] == {
        "name": first,
        "kind": "self",
        "place": "down",
        "level": 0,
        "heads": found["layers"][0]["heads"],
        "grid": [16, 16],
    }
    assert found["tokenizers"] == {"tokenizer": "CLIPTokenizer"}
    cells = 5 * 256 + 5 * 64 + 5 * 16 + 4
    assert found["bytes_held"]["default"] == cells * found["token_columns"] * 4
    assert isinstance(found["shortcomings"], list)


@pytest.fixture
def batch(demo_batch, tmp_path):
    """A batch run to spoil."""
    return shutil.copytree(demo_batch, tmp_path / "RUN")


@pytest.fixture(scope="module")
def demo_batch(tmp_path_factory):
    from sdattn.batch import Request, run_batch

    place = tmp_path_factory.mktemp("batch")
    (place / "in.txt").write_text(f"a red {THING}\na blue {OTHER}\n")
    options = {"num_inference_steps": 1}
    run_batch(Request(place / "in.txt", place / "RUN", options=options, batch_size=2, device="cpu"))
    return place / "RUN"


@pytest.mark.slow
def test_batch_answers_how_far_it_is(invoke, batch):
    code, out, _ = invoke("batch", "--status", "RUN", "--json")
    found = only(out)
    assert (code, found.pop("began") > 0, found.pop("nbytes") > 0) == (0, True, True)
    assert found == {
        "folder": "RUN",
        **{"items": 2, "whole": 2, "failed": 0, "bad_lines": 0, "shards": 1, "done": 1},
        **{"rate": None, "seconds_left": None},
    }
    code, out, _ = invoke("batch", "--verify", "RUN", "--json")
    assert (code, only(out)) == (0, {"folder": "RUN", "items": 2, "problems": []})


def test_verify_lists_the_problems_and_fails_as_before(invoke, batch):
    broken = next(batch.rglob("image.png"))
    broken.write_bytes(broken.read_bytes()[:-9])
    code, out, err = invoke("batch", "--verify", "RUN", "--json")
    found = only(out)
    assert code == 1 and found["problems"]
    assert all(problem in err for problem in found["problems"])
    assert any("image.png" in problem for problem in found["problems"])
    assert invoke("batch", "--verify", "RUN", "--quiet")[:2] == (1, "")


def test_what_libraries_print_goes_to_stderr(capsys):
    output = Output(as_json=True)
    with output.answering(SimpleNamespace(params=())):
        print("a library's word")
        output.answer({"items": 1})
    assert capsys.readouterr() == ('{"items": 1}\n', "a library's word\n")
