"""`verify` names every harm, litter goes, and a run's command writes its summaries again."""

import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import fsspec
import pytest
from helpers.batch_draws import draw, watch_models  # noqa: F401
from helpers.batch_runs import FORMATS, manifest, new_run, pack, three
from helpers.storages import memory_bucket, quick_waits  # noqa: F401
from helpers.trees import tree
from PIL import Image

from sdattn.batch import checking, verify
from sdattn.batch.checking import remove_litter, write_summaries
from sdattn.batch.gallery.sheets import make_sheet, tile_of_images
from sdattn.batch.records import ShardFile, read_manifest, read_record, record_name
from sdattn.files.addresses import Address
from sdattn.files.place import Place
from sdattn.files.writing import sha256

each_format = pytest.mark.parametrize("format", FORMATS)
BAD = b'{"line": 5, "reason": "no prompt", "text": "{}"}\n'
FAILED = {"id": "d", "line": 4, "prompt": "a cat", "seed": 4, "failed": "no", "traceback": "no"}
SUMMARIES = ("metadata.jsonl", "errors.jsonl", "index.html")


def finished(root, format):
    """A run with all kinds of files: items a, b with a sheet, and c; d has failed."""
    more = {"bad_lines": 1, "bad_lines_sha256": sha256(BAD), "save": ["image", "overlays", "maps"]}
    new_run(root, three(), failed=[FAILED], format=format, **more)
    place = Place(root)
    place.publish("bad_lines.jsonl", BAD)
    record, tile = read_record(place, 0), tile_of_images(Image.new("RGB", (96, 64)), None)
    image, _ = make_sheet([tile, tile])
    checksum = sha256(image)
    sheet = ShardFile(f"shards/000000-{checksum[:6]}.webp", len(image), checksum)
    place.publish(sheet.name, image)
    place.publish(
        record_name(0), type(record)(0, "of the shard", record.data, sheet, record.rows).packed()
    )
    return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {format: finished(root / format, format) for format in FORMATS}


@pytest.fixture
def run(runs, tmp_path, format):
    """A run to harm."""
    return Place(shutil.copytree(runs[format].root, tmp_path / "run"))


def harm_file(path, harm, chance):
    """Flip a bit of a file, cut it or remove it."""
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if harm == "removed":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(data[:at])
    else:
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)


def check_named(place, harm, *names):
    """Harm files; verify names each, an item's with its id; put them back."""
    before = {name: (place.root / name).read_bytes() for name in names}
    chance = random.Random(f"{harm} {names}")
    for name in names:
        harm_file(place.root / name, harm, chance)
    try:
        _, problems = verify(place.root)
    except (OSError, ValueError) as error:
        problems = [str(error)]
    for name in names:
        item = "/".join(name.split("/")[:3])  # a file or, of an item's, its folder
        told = item, name.removeprefix(f"{item}/")
        assert any(all(text in problem for text in told) for problem in problems), (name, problems)
    for name, data in before.items():
        (place.root / name).write_bytes(data)


@each_format
@pytest.mark.parametrize("harm", ["flipped", "cut", "removed"])
def test_every_harm_of_every_file_is_named(run, format, harm):
    before = tree(run.root)
    for path in run.root.rglob("*"):
        os.utime(path, (0, 0))  # no harm makes litter of the rest
    data = [name for name in before if "/" in name and not name.endswith((".jsonl", "run.json"))]
    check_named(run, harm, "bad_lines.jsonl", *data)
    for name in before:
        if name.endswith("run.json") or name in ("batch.json", record_name(0), record_name(2)):
            check_named(run, harm, name)
    check_named(run, harm, *SUMMARIES)
    assert tree(run.root) == before and verify(run.root) == (3, [])


@each_format
def test_what_belongs_to_nobody_is_named(run, format):
    if format == "folder":
        location = read_record(run, 0).rows[0]["place"]
        run.publish(f"{location}/heatmaps/foreign.txt", b"x")
        problem = f"a: heatmaps/foreign.txt is not the run's (in {location})"
        assert verify(run.root)[1] == [problem]
    run.publish(record_name(1), run.read(record_name(0)))
    assert any("000001.jsonl is the record of shard 0" in one for one in verify(run.root)[1])


# Litter


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path):
    place = tmp_path if request.param == "disk" else request.getfixturevalue("memory")
    return place / "run"


def grow_old(place, *names):
    """As if these, and all below, had been written long ago."""
    for name in names:
        if place.is_remote:
            for path, file in fsspec.filesystem("memory").store.items():
                if f"{path}/".startswith(f"{place.root.path}/{name}/"):
                    file.created = datetime.fromtimestamp(0, UTC)
        else:
            for path in (place.root / name, *(place.root / name).rglob("*")):
                os.utime(path, (0, 0))


def names_in(place):
    return {f"shards/{name}" for name in place.files("shards", deep=True)}


@each_format
def test_what_no_record_names_goes_once_it_is_old(root, format):
    new_run(root, three(), format=format)
    place, made = Place(root), manifest(format=format)
    named = names_in(place)
    ending = {"webdataset": "tar"}.get(format, format)
    litter = {f"shards/000000-00000{n}.{ending}" for n in (1, 2)}
    litter |= {f"shards/000000-00000{n}.webp" for n in (1, 2)}
    if format == "folder":
        litter = {f"shards/000000/a-00000{n}/{name}" for n in (1, 2) for name in pack("a")}
        litter |= {"shards/000001-000001.webp", "shards/000000-000002.tar"}
    for name in litter:
        place.publish(name, b"x")
    assert remove_litter(place, made) == [] and names_in(place) == named | litter
    old = {name for name in litter if "000001" in name.split("-", 1)[1]}
    units = {"/".join(name.split("/")[:3]) for name in old}
    grow_old(place, *units, *named)
    assert set(remove_litter(place, made)) == units
    assert names_in(place) == named | litter - old


@each_format
def test_verify_reads_and_never_writes(run, format):
    """Also a run on a disk that cannot be written, with what an earlier command left."""
    mine = ["shards/notes.txt", "shards/000000-mine.txt"]
    litter = ["shards/000000-000001.webp", "shards/000009-000001.tar"]
    for name in (*mine, *litter):
        run.publish(name, b"x")
    grow_old(run, *mine, *litter)
    before = tree(run.root)
    assert verify(run.root) == (3, []) and tree(run.root) == before
    assert set(remove_litter(run, read_manifest(run))) == set(litter)
    assert all((run.root / name).exists() for name in mine)


def test_a_foreign_file_in_an_items_folder_goes_when_its_shard_is_drawn_again(model, tmp_path):
    """As `--verify` advises: remove the record, and run the command."""
    draw(model, tmp_path / "run", ["a cat"])
    before = tree(tmp_path / "run")
    [item] = (tmp_path / "run/shards/000000").iterdir()
    (item / ".DS_Store").write_bytes(b"Finder")
    assert ".DS_Store is not the run's" in verify(tmp_path / "run")[1][0]
    (tmp_path / "run" / record_name(0)).unlink()
    draw(model, tmp_path / "run", ["a cat"])
    assert tree(tmp_path / "run") == before


@each_format
def test_nothing_of_a_shard_without_a_sound_record_is_litter(root, format):
    """Its items may be whole, and its record can come back."""
    new_run(root, three(), format=format)
    place, made = Place(root), manifest(format=format)
    place.publish(record_name(0), b"damaged")
    place.remove(record_name(1))
    before = names_in(place)
    grow_old(place, "shards")
    assert remove_litter(place, made) == [] and names_in(place) == before
    # Once more, of a list that has become shorter
    assert remove_litter(place, manifest(format=format, shards=0)) and not names_in(place)


# What is made from the records


def test_a_runs_command_writes_damaged_summaries_again(model, tmp_path):
    lines = [{"prompt": "a cat"}, {"prompt": 5}]
    draw(model, tmp_path / "run", lines)
    before = tree(tmp_path / "run")
    for name in ("metadata.jsonl", "bad_lines.jsonl"):
        (tmp_path / "run" / name).write_bytes(before[name][:-9])
    for name in ("errors.jsonl", "index.html"):
        (tmp_path / "run" / name).unlink()
    assert len(verify(tmp_path / "run")[1]) == 1  # the others are compared with sound records only
    assert draw(model, tmp_path / "run", lines).before == 1
    assert tree(tmp_path / "run") == before and verify(tmp_path / "run") == (1, [])


@each_format
def test_a_row_is_asked_for_no_more_than_its_version_wrote(run, format):
    record = read_record(run, 0)
    fewer = ("score", "missing", "blanked")
    rows = [{name: held for name, held in row.items() if name not in fewer} for row in record.rows]
    assert rows != record.rows
    older = type(record)(0, record.fingerprint, record.data, record.sheet, rows)
    run.publish(record_name(0), older.packed())
    write_summaries(run, read_manifest(run))
    assert verify(run.root) == (3, [])
    rows[0]["truncated"] = ["of another run"]  # what it has is compared
    run.publish(record_name(0), older.packed())
    write_summaries(run, read_manifest(run))
    [problem] = verify(run.root)[1]
    assert "its row is not what run.json says, of truncated" in problem


def test_a_record_of_another_input_is_named_by_its_number_of_items(tmp_path):
    """It is sound by itself."""
    run = finished(tmp_path / "run", "folder")
    record = read_record(run, 0)
    rows = [*record.rows, {**FAILED, "id": "e"}]
    run.publish(
        record_name(0), type(record)(0, "of the shard", record.data, record.sheet, rows).packed()
    )
    problems = verify(run.root)[1]
    assert any("5 items and batch.json 4: one is of another" in one for one in problems)


def test_verify_fetches_each_shard_of_a_bucket_once(memory, monkeypatch):
    """Also if more of them are checked at once than copies are kept."""
    items = {f"i{n:02d}": pack(f"i{n:02d}", n) for n in range(1, 33)}
    root = new_run(f"{memory}/run", items, format="webdataset")
    fetched = []
    own = Address.fetch

    def fetch(self, path):
        fetched.append(self.name)
        own(self, path)

    monkeypatch.setattr(Address, "fetch", fetch)
    with ThreadPoolExecutor(16) as pool:
        monkeypatch.setattr(checking, "ThreadPoolExecutor", lambda: pool)
        assert verify(root) == (32, [])
    assert len(fetched) == len(set(fetched)) == 16
