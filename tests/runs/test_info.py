"""A run's folder that someone else made or that was damaged: the file, the entry, what to do."""

import copy
import json
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.small_runs import packed, saved, small_run
from helpers.tiers import tiered
from PIL import Image
from safetensors.torch import load, save

from sdattn import diff, load_run
from sdattn.figures import figure
from sdattn.files.records import sealed
from sdattn.files.writing import sha256
from sdattn.runs.info import read_info
from sdattn.runs.parts import READ
from sdattn.runs.report import report
from sdattn.runs.unpacking import unpack_run


@pytest.fixture(scope="module")
def whole():
    files = packed()
    return {name: files[name] for name in READ if name in files}


def with_info(files, info):
    """The files with another document, as if it had been written so."""
    return {**files, "run.json": sealed(info)}


def info_of(files):
    return json.loads(files["run.json"])


def use(files):
    """All that reading a run leads to."""
    run = unpack_run(files, "RUN")
    report(run)
    for one in (*run.heatmaps.occurrences(), *run.heatmaps):
        assert one
    return run


def places(value, at=()):
    """The way to every entry of a document."""
    yield at
    if isinstance(value, dict):
        for name, one in value.items():
            yield from places(one, (*at, name))
    elif isinstance(value, list):
        for i, one in enumerate(value[:2]):
            yield from places(one, (*at, i))


def at(document, place):
    for name in place[:-1]:
        document = document[name]
    return document


OPTIONAL = {"truncated", "seed", "model", "pipeline", "scheduler", "options", "options_left_out"}
OPTIONAL |= {"device", "dtype", "timesteps", "captured", "versions", "size", "asked", "checksum"}
OPTIONAL |= {"score", "missing"}  # of a run without a word to judge


def entries():
    return [one for one in places(json.loads(packed()["run.json"])) if one]


def refusal(files):
    """What is said of a run, in all that reading it leads to; None where it can be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            use(files)
        except (ValueError, FileNotFoundError) as error:
            return str(error)
    return None


@pytest.mark.slow
def test_every_entry_that_is_missing_is_named(whole):
    """None is a KeyError; what the rest does not need may be missing."""
    for place in entries():
        info = info_of(whole)
        if isinstance(place[-1], int) or place[0] in ("options", "versions"):
            continue
        del at(info, place)[place[-1]]
        said = refusal(with_info(whole, info))
        if said is None:
            assert {*place} & OPTIONAL or place[0] in ("preset", "files"), place
            continue
        assert said.startswith("RUN"), (place, said)
        assert place[-1] in said or place[0] in ("layers", "more"), (place, said)
        assert re.search("generate the run again|saved without|this version's format", said)


@pytest.mark.parametrize("junk", tiered([None, True, -1, 10**30, 0.5, "x", [], [[]], {}, {"x": 1}]))
@pytest.mark.slow
def test_nothing_of_the_wrong_kind_is_a_traceback(whole, junk):
    """Every entry in turn holds something else: it is read as that, or file and reason are said."""
    for place in entries():
        if place[0] == "tokens" and place[1:2] != (1,):
            continue
        info = info_of(whole)
        at(info, place)[place[-1]] = copy.deepcopy(junk)
        said = refusal(with_info(whole, info))
        assert said is None or said.startswith("RUN"), (place, said)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.pop("prompt"), "RUN/run.json: 'prompt' is missing. Restore it or generate"),
        (lambda i: i["words"][1].pop("columns"), r"'words\[1\].columns' is missing"),
        (
            lambda i: i["words"][1].update(end=99),
            r"'words\[1\]' is at 2 to 99, and the prompt",
        ),
        (lambda i: i["words"][1].update(columns=[99]), r"'words\[1\].columns' are \[99\] of 77"),
        (lambda i: i["preset"].update(kernel=3), "'preset.kernel' cannot be read: Unexp"),
        (lambda i: i["preset"].update(steps="some"), "preset.steps.* is \"some\": .*'mean'"),
        (lambda i: i.update(passes=0), "'passes' is 0, where 1 or more"),
        (lambda i: i.update(columns=[*i["columns"][:-1], 0]), "'columns' are .* is there once"),
        (
            lambda i: i["layers"]["up.b"].update(grid=[3, 2]),
            r"RUN: .*up.b has the shape \(2, 3, ",
        ),
        (lambda i: i["layers"].update(c=i["layers"]["up.b"]), "RUN: .*c has the shape None"),
        (lambda i: i["more"].update(why=i["more"]["asked"]), "'more' has 'why', which no run"),
        (lambda i: i["files"].pop("asked/maps.safetensors"), "does not name asked/maps"),
        (lambda i: i["files"].pop("steps.safetensors"), "does not name steps.safetensors"),
        (lambda i: i["details"].update(steps=[0]), "RUN: .* the shape .2, 4, 6, 77., where .1, 4"),
        (lambda i: i.update(options=[]), r"'options' is \[\]: Input should be an object"),
        (lambda i: i["captured"].update(steps="some"), "'captured' cannot be read: steps='some'"),
        (lambda i: i["captured"].update(heads="last"), "'captured' cannot be read: heads='last'"),
        (lambda i: i["captured"].update(heads=[1, 1]), r"'captured' cannot be read: heads=\[1, 1"),
        (lambda i: i["details"].update(heads="some"), "'details.heads' is \"some\", where 'all'"),
        (lambda i: i.update(asked=3), "'asked' is 3: Input should be a valid string"),
        (lambda i: i["statistics"][1].pop("mass"), r"'statistics\[1\].mass' is missing"),
        (lambda i: i["statistics"][0].update(centre=[0.5]), r"'statistics\[0\].centre\[1\]' is"),
    ],
)
def test_what_is_wrong_is_named(whole, change, message):
    info = info_of(whole)
    change(info)
    assert re.search(message, refusal(with_info(whole, info)))


# Damage


@pytest.mark.slow
def test_a_flip_anywhere_in_run_json_is_found(whole):
    """Every 19th byte, one bit and all bits of it, and every byte of the last lines."""
    data = whole["run.json"]
    for mask in (1, 4, 255):
        for i in (*range(mask % 19, len(data), 19), *range(len(data) - 90, len(data))):
            flipped = bytearray(data)
            flipped[i] ^= mask
            with pytest.raises(ValueError, match="RUN/run.json"):
                read_info({"run.json": bytes(flipped)}, "RUN")


def test_a_document_without_its_checksum_is_refused(whole):
    info = info_of(whole)
    del info["checksum"]
    data = (json.dumps(info, indent=1, ensure_ascii=False) + "\n").encode()
    with pytest.raises(ValueError, match="RUN/run.json.*run"):
        read_info({"run.json": data}, "RUN")


@pytest.mark.parametrize(
    "part",
    ["image.png", *(f"{one}.safetensors" for one in ("maps", "steps", "heads", "asked/maps"))],
)
def test_a_flip_in_a_part_that_is_read_is_found(whole, part):
    for i in range(3, len(whole[part]), len(whole[part]) // 5):
        flipped = bytearray(whole[part])
        flipped[i] ^= 1
        with pytest.raises(ValueError, match=f"RUN/{part}.*run"):
            unpack_run({**whole, part: bytes(flipped)}, "RUN")


def test_a_part_that_the_run_did_not_write_is_not_read(whole):
    """Steps put beside a run that kept none: run.json has no checksum of them."""
    info = info_of(whole)
    del info["files"]["steps.safetensors"], info["files"]["heads.safetensors"]
    info["details"] |= {"steps": None, "heads": None, "columns": []}
    run = unpack_run(with_info(whole, info), "RUN")
    assert run.details.steps is None and run.details.heads is None


def replaced(files, part, data):
    info = info_of(files)
    info["files"][part] = sha256(data)
    return with_info({**files, part: data}, info)


@pytest.mark.parametrize("part", [name for name in READ if name.endswith("s") and "/" not in name])
def test_maps_that_are_none_are_named(whole, part):
    for data in (b"", b"x" * 100, save({"foreign": torch.zeros(2)})):
        with pytest.raises(ValueError, match="^RUN"):
            use(replaced(whole, part, data))
    maps = load(whole[part])
    name = max(maps)
    maps[name] = maps[name][..., :-1].contiguous()
    with pytest.raises(ValueError, match=f"^RUN: .*{name}.*shape"):
        use(replaced(whole, part, save(maps)))


def ghostscript(path):
    """An image that Pillow starts Ghostscript for."""
    Path(path).write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 96 64\n%%EndComments\n(%pipe%touch started)"
        b" (w) file closefile\nshowpage\n%%EOF\n"
    )


def as_format(kind, path):
    Image.new("RGB", (96, 64)).save(path, kind)


OTHERS = [ghostscript, *(partial(as_format, kind) for kind in ("JPEG", "GIF", "TIFF", "PDF"))]


@pytest.mark.parametrize("write", OTHERS)
def test_an_image_that_is_no_png_is_not_opened(whole, tmp_path, write):
    write(tmp_path / "x")
    with pytest.raises(ValueError, match="RUN/image.png.*PNG"):
        unpack_run(replaced(whole, "image.png", (tmp_path / "x").read_bytes()), "RUN")


@pytest.mark.slow
def test_a_whole_run_comes_back(whole, tmp_path):
    run = use(whole)
    assert run.details.calls == (0, 1) and run.more["asked"][0] == "red cat"
    back = load_run(saved(tmp_path / "run"))
    assert back.info == info_of(whole) and back.settings.captured.spots
    assert torch.equal(back.details.spots, small_run().details.spots.half().float())
    assert diff(back, back).settings == {}
    figure(back, "steps")
