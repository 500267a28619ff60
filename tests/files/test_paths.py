"""Paths inside a folder, and the names of files in it."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from sdattn import Heatmaps, read_prompt
from sdattn.files.paths import check_apart, file_name, inside
from sdattn.files.writing import write_files
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.runs.folder import save_run
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.info import RunSettings


@pytest.mark.parametrize(
    "word",
    ["cat", "../../etc/passwd", "..", ".", "", "a/b\\c", "CON", "红色的", "😀", "x" * 2000, "a\0b",
     '<>:"|?*', "-", " "],
)  # fmt: skip
def test_file_names_are_safe(tmp_path, word):
    name = file_name(word)
    assert name
    assert not set(name) & set('/\\<>:"|?*\0. ')
    assert len(name.encode()) <= 160
    (tmp_path / f"01-{name}.png").write_text("")
    assert len(os.listdir(tmp_path)) == 1


def test_words_that_differ_in_case_only_do_not_clash(tokenizer, tmp_path):
    image, prompt = Image.new("RGB", (64, 64)), "Cat cat CAT"
    maps = Heatmaps(read_prompt(tokenizer, prompt), torch.rand(4, 4, 77))
    layers = LayerMaps({"up": LayerMap("up", 0, 2, maps.maps[None])}, maps.columns, passes=1)
    folder = save_run(
        tmp_path / "run", ImageRun(image, maps, layers, RunSettings(prompt=prompt, seed=None))
    )
    names = [name.lower() for name in os.listdir(folder / "heatmaps")]
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    "place",
    ["../x", "a/../../x", "/etc/passwd", "..", ".", "", "C:/x", "C:x", "\\\\host\\x", "a\\..\\x",
     "a\0"],
)  # fmt: skip
def test_a_place_that_is_not_in_the_folder_is_refused(tmp_path, place):
    with pytest.raises(ValueError, match="inside it"):
        inside(tmp_path, place)


def test_no_link_is_followed_out_of_a_folder(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "image.png").write_bytes(b"mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "heatmaps").symlink_to(tmp_path / "secret")
    (tmp_path / "run" / "image.png").symlink_to(tmp_path / "secret" / "image.png")
    (tmp_path / "run" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "by-a-link").symlink_to(tmp_path / "run")
    for place in ("heatmaps/01-a.png", "heatmaps", "image.png", "gone"):
        for folder in ("run", "by-a-link"):
            with pytest.raises(ValueError, match="is a link"):
                inside(tmp_path / folder, place)
            with pytest.raises(ValueError, match="is a link"):
                write_files(tmp_path / folder, {place: b"theirs"})
    assert {p.name: p.read_bytes() for p in (tmp_path / "secret").iterdir()} == {
        "image.png": b"mine"
    }
    assert not (tmp_path / "nowhere").exists()
    assert inside(tmp_path / "by-a-link", "a/b").parent == tmp_path / "by-a-link" / "a"


@pytest.mark.parametrize(
    ("out", "how"),
    [
        ("run", "is the input"), ("run/../run", "is the input"), ("link", "is the input"),
        (".", "contains the input"), ("run/sub/x", "is inside the input"),
        ("link/x", "is inside the input"),
    ],
)  # fmt: skip
def test_an_output_is_apart_from_the_inputs(tmp_path, monkeypatch, out, how):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("other").mkdir()
    Path("link").symlink_to("run")
    for one in ("run", "link"):
        with pytest.raises(FileExistsError, match=f"{how} {one}"):
            check_apart(Path(out), Path(one), Path("other"))
    check_apart(Path("run-2"), Path("run"), Path("link"), Path("nowhere"))
    check_apart(Path("other/run"), Path("run"))
