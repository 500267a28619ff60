"""A run's folder: whole or not at all, safe names, and parts that must belong together."""

import hashlib
import io
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.bilinear import stretch
from helpers.small_runs import small_run
from PIL import Image
from safetensors.torch import load_file

from sdattn import Heatmaps, load_run, read_prompt
from sdattn.maps.aggregation import aggregate
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.masks import MaskSettings, otsu
from sdattn.maps.presets import Preset
from sdattn.runs.folder import pack_with_page, save_run
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.info import RunSettings
from sdattn.runs.targets import check_target, new_folder

PROMPT = 'a "cat"/dog'
BOTH = Preset("both", ("down", "up"))  # of the layers that runs have here


@pytest.fixture
def parts(tokenizer):
    torch.manual_seed(0)
    maps = {
        "down.a": LayerMap("down", 0, 2, torch.rand(1, 4, 6, 77).softmax(-1)),
        "up.b": LayerMap("up", 1, 2, torch.rand(1, 2, 3, 77).softmax(-1)),
    }
    layers = LayerMaps(maps, tuple(range(77)), passes=3)
    values = aggregate(layers, BOTH)[0]
    image = Image.effect_noise((96, 64), 80).convert("RGB")
    return image, Heatmaps(read_prompt(tokenizer, PROMPT), values, preset=BOTH), layers


def save(run, folder, **options):
    image, maps, layers = run
    run = ImageRun(image, maps, layers, RunSettings(prompt=PROMPT, seed=3))
    return save_run(folder, run, **options)


def test_a_run_comes_back(parts, tmp_path):
    image, maps, layers = parts
    folder = save(parts, tmp_path / "run")
    assert sorted(os.listdir(folder)) == [
        "grid.png", "heatmaps", "image.png", "maps.safetensors", "report.html", "run.json",
    ]  # fmt: skip
    assert sorted(os.listdir(folder / "heatmaps")) == [
        "01-a.png", "02-sign.png", "03-cat.png", "04-sign.png", "05-dog.png",
    ]  # fmt: skip
    back = load_run(folder)
    assert back.image.tobytes() == image.tobytes()
    assert back.heatmaps.prompt == maps.prompt
    assert back.heatmaps.preset == BOTH
    assert back.info["seed"] == 3
    torch.testing.assert_close(back.heatmaps.maps, maps.maps, atol=1e-5, rtol=1e-3)  # float16
    saved = load_file(folder / "maps.safetensors")
    assert saved.keys() == layers.layers.keys()
    for name, one in saved.items():
        assert torch.equal(one, layers.layers[name].maps[0].half())
    assert back.info["layers"]["up.b"] == {"place": "up", "level": 1, "heads": 2, "grid": [2, 3]}
    assert (back.info["passes"], back.info["self_attention"]) == (3, None)
    assert os.listdir(tmp_path) == ["run"]


def test_an_existing_folder_is_kept_unless_forced(parts, tmp_path):
    folder = save(parts, tmp_path / "run")
    (folder / "note.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already.*force=True"):
        save(parts, folder)
    assert (folder / "note.txt").exists()
    with pytest.raises(FileExistsError, match="replaced.*note.txt"):
        save(parts, folder, force=True)
    assert (folder / "note.txt").read_text() == "mine"
    (folder / "note.txt").unlink()
    image, maps, layers = parts
    save((image.rotate(180), maps, layers), folder, force=True)
    assert load_run(folder).image.tobytes() == image.rotate(180).tobytes()
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_write_leaves_what_was_there(parts, tmp_path, error, existing):
    if existing:
        save(parts, tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(error), new_folder(tmp_path / "run", force=existing) as temporary:
        (temporary / "run.json").write_text("half")
        raise error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("target", ["file.txt/run", "/proc/nowhere/run"])
def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path, target):
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(PermissionError, match="Cannot write to"):
        check_target(tmp_path / target)


@pytest.mark.parametrize("part", ["run.json", "image.png", "maps.safetensors"])
def test_a_part_that_is_missing_or_elsewhere_is_named(parts, tmp_path, part):
    folder = save(parts, tmp_path / "run")
    (folder / part).rename(tmp_path / part)
    with pytest.raises(FileNotFoundError, match=f"has no {part}"):
        load_run(folder)
    (folder / part).symlink_to(tmp_path / part)
    with pytest.raises(ValueError, match=f"{part} is a link"):
        load_run(folder)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("cats", "There is no folder {0}/cats. Did you mean 'cat'?"),
        ("cat/run.json", "{0}/cat/run.json is a file. Name the folder of its run."),
        ("", "{0} is no run, but holds some. Name one: {0}/cat."),
        ("edit", "{0}/edit is no run, but holds some. Name one: {0}/edit/source, {0}/edit/target."),
        ("empty", "{0}/empty has no run.json"),
    ],
)
def test_a_path_that_is_no_run_says_what_is_there(tmp_path, asked, message):
    for name in ("cat", "edit", "edit/source", "edit/target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "edit" / "edit.html").touch()
    (tmp_path / "empty").mkdir()
    if asked == "":
        shutil.rmtree(tmp_path / "edit")
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        load_run(tmp_path / asked)
    assert message.format(tmp_path) in str(refused.value)


def test_parts_that_were_not_asked_for_are_not_there(parts, tmp_path):
    image, heatmaps, _ = parts
    folder = save(parts, tmp_path / "run", parts=("image", "masks"))
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    masks = {f"masks/{name}.png" for name in ("01-a", "02-sign", "03-cat", "04-sign", "05-dog")}
    assert names == {"run.json", "image.png", *masks}
    mask = np.asarray(Image.open(folder / "masks" / "03-cat.png"))
    values = np.asarray(  # an independent resize
        Image.fromarray(heatmaps["cat"].values.numpy()).resize(
            image.size, Image.Resampling.BILINEAR
        )
    )
    assert set(np.unique(mask)) == {0, 255}
    low, high = heatmaps["cat"].range
    clear = np.abs(values - (low + high) / 2) > 1e-3 * high
    assert ((mask == 255) == (values > (low + high) / 2))[clear].all()
    assert clear.mean() > 0.9
    with pytest.raises(FileNotFoundError, match="maps.safetensors"):
        load_run(folder)


@pytest.mark.parametrize("threshold", [0.2, "otsu"])
def test_masks_of_some_words_have_their_numbers_and_threshold(threshold):
    run = small_run(prompt="a red cat, a Red dog")
    files = pack_with_page(run, ("masks",), masks=MaskSettings(("red", "owl"), threshold)).files
    further = {"asked/masks/01-red.png", "asked/masks/05-Red.png"}
    names = ("masks/02-red.png", "masks/06-Red.png")
    assert files.keys() == {*names, *further, "run.json"}
    for heatmap, name in zip(run.heatmaps.find("red"), names, strict=True):
        values = stretch(heatmap.values.double().numpy(), (64, 96))
        level = {"otsu": otsu(torch.from_numpy(values))}.get(threshold)
        level = level or values.min() + 0.2 * (values.max() - values.min())
        clear = np.abs(values - level) > 0.02 * values.max()
        mask = np.asarray(Image.open(io.BytesIO(files[name]))) == 255
        assert (mask == (values >= level))[clear].all() and clear.mean() > 0.6


def test_a_run_is_the_same_bytes_each_time(parts, tmp_path):
    first, again = (save(parts, tmp_path / name) for name in ("a", "b"))
    for path in first.rglob("*.*"):
        assert path.read_bytes() == (again / path.relative_to(first)).read_bytes()
    files = json.loads((first / "run.json").read_bytes())["files"]
    assert len(files) == 9
    for name, digest in files.items():
        assert hashlib.sha256((first / name).read_bytes()).hexdigest() == digest


def test_parts_that_do_not_belong_together_are_refused(parts, tmp_path):
    image, maps, layers = parts
    turned = {n: replace(one, maps=one.maps.flip(1)) for n, one in layers.layers.items()}
    folder = save(parts, tmp_path / "run")
    other = save((image.rotate(180), maps, replace(layers, layers=turned)), tmp_path / "other")
    for part, data, said in (
        ("image.png", (other / "image.png").read_bytes(), "image.png.*run"),
        ("maps.safetensors", (other / "maps.safetensors").read_bytes(), "maps.safetensors.*run"),
        ("run.json", b"\xff{", "is corrupt"),
        ("run.json", b'{"name": "something else"}', "format"),
    ):
        whole = (folder / part).read_bytes()
        (folder / part).write_bytes(data)
        with pytest.raises(ValueError, match=said):
            load_run(folder)
        (folder / part).write_bytes(whole)
