"""Photos to explain: none becomes a prompt, and what cannot be explained is a named bad line."""

import os
import re
import struct
import tarfile
import unicodedata
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from helpers.item_lines import check_message, photo, planned, put, write_tar
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from pyarrow import parquet

from sdattn.batch.columns import Columns
from sdattn.files.writing import sha256

PNG = photo()
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def explained(source, **request):
    """Ids and captions of what is explained, and the reasons of bad lines by what they name."""
    items, bad = planned(photos=source, **request)
    assert all(item.image is not None for item in items)
    for one in bad:
        check_message(one)
    return {item.id: item.prompt for item in items}, [one.reason for one in bad]


def table(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)
    return path


# Pairs in folders


def test_a_folder_of_pairs_is_explained(tmp_path):
    put(tmp_path, "b.JPG", photo(kind="JPEG"))
    put(tmp_path, "b.txt", "\ufeffa red cat\n")
    put(tmp_path, "sub/IMG_1.5x.jpeg", photo(1, kind="JPEG"))
    put(tmp_path, "sub/IMG_1.5x.TXT", "a dog")
    put(tmp_path, "photo.jpg/c d.webp", photo(2, kind="WEBP"))
    put(tmp_path, "photo.jpg/c d.txt", "a cow")
    items, bad = planned(photos=tmp_path)
    assert bad == []
    assert [(item.line, item.id, item.prompt, item.image.name) for item in items] == [
        (1, "b", "a red cat", "b.JPG"),
        (2, "photo.jpg-c-d", "a cow", "photo.jpg/c d.webp"),
        (3, "sub-IMG_1.5x", "a dog", "sub/IMG_1.5x.jpeg"),
    ]
    assert [item.seed for item in items] == [0, 1, 2]
    assert items[2].image.open().size == (128, 128)


def test_an_image_upright_by_its_tag_and_changed_since(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    path = put(tmp_path, "a.jpg", photo(size=(128, 64), kind="JPEG", exif=exif))
    put(tmp_path, "a.txt", "a cat")
    [item], _ = planned(photos=tmp_path)
    assert item.image.size == (64, 128)
    assert item.image.sha256 == sha256(path.read_bytes())
    path.write_bytes(PNG)
    with pytest.raises(ValueError, match="has changed"):
        item.image.open()


def test_what_has_no_pair_is_named(tmp_path):
    put(tmp_path, "images/a.png", PNG)
    put(tmp_path, "captions/a.txt", "a cat")
    put(tmp_path, "b.png", PNG)
    found, reasons = explained(tmp_path)
    assert found == {}
    named = [reason.split(" is ")[0] for reason in reasons]
    assert named == ["b.png", "captions/a.txt", "images/a.png"]


@pytest.mark.skipif(".avif" not in Image.registered_extensions(), reason="an older Pillow")
def test_a_broken_avif_is_a_bad_line(tmp_path):
    data = photo(kind="AVIF")
    for sign in ("iloc", "pitm", "av1C", "ispe"):  # boxes that say where an image is, and what
        at = data.index(sign.encode()) + 4
        put(tmp_path, f"{sign}.avif", data[:at] + bytes(12) + data[at + 12 :])
        put(tmp_path, f"{sign}.txt", "a cat")
    put(tmp_path, "good.png", PNG)
    put(tmp_path, "good.txt", "a cat")
    found, bad = explained(tmp_path)
    assert found == {"good": "a cat"} and len(bad) == 4
    assert all(re.match(r"\w+\.avif is not a readable image", reason) for reason in bad)


@pytest.mark.parametrize(
    "kind", [RuntimeError, EOFError, struct.error, ZeroDivisionError, IndexError, zlib.error]
)
def test_whatever_a_decoder_raises_is_told_with_the_name(tmp_path, monkeypatch, kind):
    put(tmp_path, "good.png", PNG)
    put(tmp_path, "good.txt", "a cat")
    [item], _ = planned(photos=tmp_path)

    def load(self):
        raise kind

    monkeypatch.setattr(PngImageFile, "load", load)
    with pytest.raises(ValueError, match=f"good.png is not a readable image: {kind.__name__}"):
        item.image.open()
    monkeypatch.setattr(PngImageFile, "verify", load)
    assert explained(tmp_path)[1] == [f"good.png is not a readable image: {kind.__name__}"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.heic": b"\0" * 99, "a.txt": "x"}, "a.heic is not a readable .* pip install"),
        ({"a.svg": b"<svg/>", "a.txt": "x"}, "a.svg is of a format that is not read"),
        ({"a.png": b"", "a.txt": "x"}, "a.png is empty"),
        ({"a.png": PNG[:200], "a.txt": "x"}, "a.png is not a readable image"),
        ({"a.png": PNG, "a.txt": ""}, "prompt=''"),
        ({"a.png": PNG, "a.txt": b"wei\xdf"}, "a.txt is not UTF-8"),
        ({"a.png": PNG, "a.jpg": PNG, "a.txt": "x"}, "a.jpg and a.png have one name"),
        ({"a.png": PNG, "a.txt": "x", "a.TXT": "y"}, "a.TXT and a.txt have one name"),
        ({"Cat.png": PNG, "cat.txt": "x"}, "Cat.png is an image without.*into Cat.txt"),
    ],
)
def test_one_image_one_caption(tmp_path, files, reason):
    for name, data in {**files, "good.png": PNG, "good.txt": "a cat"}.items():
        put(tmp_path, name, data)
    found, reasons = explained(tmp_path)
    assert found == {"good": "a cat"}
    assert any(re.search(reason, one) for one in reasons)


def test_names_are_compared_as_people_see_them(tmp_path):
    put(tmp_path, unicodedata.normalize("NFD", "café.png"), PNG)
    put(tmp_path, unicodedata.normalize("NFC", "café.txt"), "a cat")
    assert explained(tmp_path) == ({"cafe": "a cat"}, [])


def test_ids_that_collide_get_a_suffix(tmp_path):
    for name in ("a/b", "a-b", "A b", "猫", "犬", "b-"):
        put(tmp_path, f"{name}.png", PNG)
        put(tmp_path, f"{name}.txt", name)
    found, reasons = explained(tmp_path)
    assert reasons == []
    assert found == {
        **{"A-b": "A b", "a-b-2": "a-b", "b": "b-", "photo": "犬", "photo-2": "猫"},
        "a-b-3": "a/b",
    }


def test_what_is_no_file_is_never_opened(tmp_path):
    folder, outside = tmp_path / "photos", tmp_path / "disk"
    for name in ("good", "d/e"):
        put(folder, f"{name}.png", PNG)
        put(folder, f"{name}.txt", "a cat")
    put(outside, "b.png", PNG)
    put(outside, "b.txt", "a dog")
    os.mkfifo(folder / "p.png")
    put(folder, "p.txt", "x")
    os.mkfifo(folder / "q.txt")
    (folder / "more").symlink_to(outside)
    (folder / "again").symlink_to(folder / "d")
    (folder / "l.png").symlink_to(outside / "b.png")
    put(folder, "l.txt", "another's dog")
    (folder / "lost.png").symlink_to(folder / "nothing.png")
    (folder / "inside.png").symlink_to(folder / "good.png")
    put(folder, "inside.txt", "a cat again")
    found, reasons = explained(folder)
    assert found == {"good": "a cat", "inside": "a cat again", "d-e": "a cat"}
    assert sorted(reason.split(" is ")[0] for reason in reasons) == [
        *("again", "l.png", "lost.png", "more", "p.png", "q.txt"),
    ]


def test_hidden_files_and_runs_are_counted(tmp_path, capsys):
    for name in ("._a.png", ".DS_Store", "__MACOSX/._a.png", "out/run.json", "Thumbs.db", "a.json"):
        put(tmp_path, name, b"{}")
    put(tmp_path, "out/image.png", PNG)
    put(tmp_path, "a.png", PNG)
    put(tmp_path, "a.txt", "a cat")
    assert explained(tmp_path) == ({"a": "a cat"}, [])
    told = capsys.readouterr().err
    assert "4 files or folders skipped: hidden, or of a run" in told
    assert "2 other files not read: .db (1), .json (1)" in told


def test_metadata_of_an_imagefolder_is_read(tmp_path):
    for name in "abc":
        put(tmp_path, f"{name}.png", PNG)
    lines = '{"file_name": "a.png", "text": "a cat"}\n{"file_name": "b.png", "text": "a dog"}\n'
    put(tmp_path, "metadata.jsonl", "\ufeff" + lines)
    found, reasons = explained(tmp_path)
    assert found == {"a": "a cat", "b": "a dog"}
    assert reasons == ["c.png is not named in metadata.jsonl."]
    (tmp_path / "metadata.jsonl").unlink()
    put(tmp_path, "metadata.csv", "file_name,text\na.png,a cat\nx.png,a dog\n")
    found, reasons = explained(tmp_path)
    assert found == {"a": "a cat"}
    assert [reason.split(" ")[0] for reason in reasons] == ["x.png", "b.png", "c.png"]


@pytest.mark.parametrize("name", ["nothing", "list.txt", "a.png"])
def test_other_sources_are_refused(tmp_path, name):
    if name == "nothing":
        (tmp_path / name).mkdir()
    else:
        put(tmp_path, name, PNG)
    with pytest.raises(ValueError, match="holds no images with captions"):
        planned(photos=tmp_path / name)


def test_photos_given_as_prompts_are_refused(tmp_path):
    put(tmp_path, "a.png", PNG)
    put(tmp_path, "a.txt", "a cat")
    for source in (tmp_path, write_tar(tmp_path / "a.tar", {"a.png": PNG, "a.txt": b"a cat"})):
        with pytest.raises(ValueError, match="`photos`"):
            planned(source=source)


def test_options_that_an_image_decides_are_refused(tmp_path):
    put(tmp_path, "a.png", PNG)
    put(tmp_path, "p.jsonl", '{"image": "a.png", "prompt": "a cat", "width": 64}')
    put(tmp_path, "p.csv", "image,prompt,width,height\na.png,a cat,64,\n")
    found, [reason] = explained(tmp_path / "p.jsonl")
    assert found == {} and "width" in reason
    assert explained(tmp_path / "p.csv") == ({"a": "a cat"}, [])
    with pytest.raises(ValueError, match="num_inference_steps"):
        explained(tmp_path / "p.csv", options={"num_inference_steps": 5})


# Tars


def test_a_tar_is_explained_wherever_its_pairs_are(tmp_path):
    link, hard = tarfile.TarInfo("l.png"), tarfile.TarInfo("h.png")
    link.type, link.linkname, hard.type, hard.linkname = tarfile.SYMTYPE, "a", tarfile.LNKTYPE, "a"
    folder = tarfile.TarInfo("folder.png")
    folder.type = tarfile.DIRTYPE
    members = {
        **{"./cat.png": PNG, "IMG.2023.png": photo(1), "./cat.txt": b"a cat", "folder": folder},
        **{"l.png": link, "l.txt": b"x", "h.png": hard, "h.txt": b"x", "._cat.png": b"x"},
        **{"../up.png": PNG, "../up.txt": b"up", "more.tar": b"x", "IMG.2023.txt": b"a dog"},
    }
    path = write_tar(tmp_path / "photos.tar", members)
    found, reasons = explained(path)
    assert found == {"cat": "a cat", "IMG.2023": "a dog", "up": "up"}
    assert [reason.split(" is ")[0] for reason in reasons] == ["l.png", "h.png"]
    items, _ = planned(photos=path)
    assert sha256(items[1].image.read()) == sha256(photo(1))


def test_a_sparse_member_of_a_tar_is_named(tmp_path):
    big = tmp_path / "a.png"
    with big.open("wb") as file:
        file.truncate(2**20)
        file.seek(2**19)
        file.write(PNG)
    put(tmp_path, "a.txt", "a cat")
    made = os.system(f"cd {tmp_path} && tar --sparse -cf a.tar a.png a.txt 2>/dev/null")
    if made:
        pytest.skip("this tar packs no sparse files")
    found, [reason] = explained(tmp_path / "a.tar")
    assert found == {} and "a.png is a link, a device or a sparse file" in reason


def test_tars_that_cannot_be_read(tmp_path):
    with tarfile.open(tmp_path / "z.tar", "w:gz") as tar:
        tar.add(put(tmp_path, "x.txt", "x"), "x.txt")
    with pytest.raises(ValueError, match="has to be unpacked"):
        planned(photos=tmp_path / "z.tar")
    whole = write_tar(tmp_path / "w.tar", {"a.png": PNG, "a.txt": b"a cat"})
    whole.write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(ValueError, match="not a readable tar"):
        planned(photos=whole)
    put(tmp_path, "tars/1.tar", b"no tar")
    for number in (0, 2):
        write_tar(tmp_path / f"tars/{number}.tar", {"a.png": photo(number), "a.txt": b"a cat"})
    found, [reason] = explained(tmp_path / "tars")
    assert [*found] == ["a", "a-2"] and reason.startswith("1.tar: ")


# Tables and data sets


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_paths_are_relative_to_the_list(tmp_path, kind, monkeypatch):
    put(tmp_path / "list", "photo.png", photo(size=(128, 64)))
    put(tmp_path / "here", "photo.png", photo(size=(64, 128)))
    os.mkfifo(tmp_path / "list/pipe.png")
    monkeypatch.chdir(tmp_path / "here")
    names = ["photo.png", "gone.png", "http://x/y.png", "pipe.png", ""]
    path = tmp_path / "list" / f"p.{kind}"
    if kind == "parquet":
        images = [{"bytes": None, "path": name} for name in names]
        table(path, image=pa.array(images, STRUCT), prompt=["a cat"] * 5)
    elif kind == "csv":
        put(path.parent, path.name, "file_name,prompt\n" + "".join(f"{n},a cat\n" for n in names))
    else:
        rows = (f'{{"image": "{name}", "prompt": "a cat"}}\n' for name in names)
        put(path.parent, path.name, "".join(rows))
    items, bad = planned(photos=path)
    assert [(item.id, item.image.size) for item in items] == [("photo", (128, 64))]
    assert [one.line - items[0].line for one in bad] == [1, 2, 3, 4]


def test_images_in_a_parquet_file_are_explained(tmp_path):
    cells = [{"bytes": PNG, "path": "a.png"}, None, {"bytes": None, "path": None}]
    cells += [{"bytes": b"", "path": None}, {"bytes": photo(1), "path": "x/a.png"}]
    cells += [{"bytes": photo(2), "path": None}]
    path = table(tmp_path / "p.parquet", image=pa.array(cells, STRUCT), text=["a cat"] * 6)
    found, reasons = explained(path)
    assert [*found] == ["a", "a-2", "000006"]
    assert len(reasons) == 3
    items, _ = planned(photos=path)
    for item, number in zip(items, (0, 1, 2), strict=True):
        assert sha256(item.image.read()) == sha256(photo(number)) == item.image.sha256
    with pytest.raises(ValueError, match="Pass it as `photos`"):
        planned(source=path)
    # as img2dataset writes it
    columns = {"jpg": [PNG, None], "caption": ["a cat", "b"], "key": ["0", "1"], "width": [9, 9]}
    found, [reason] = explained(table(tmp_path / "00000.parquet", **columns))
    assert [*found.values()] == ["a cat"] and reason.startswith("jpg=")


def test_rows_are_read_back_from_any_row_group(tmp_path):
    data = [photo(n, (8, 8)) for n in range(50)]
    path = tmp_path / "p.parquet"
    cells = {"image": data, "text": ["a cat"] * 50}
    parquet.write_table(pa.table(cells), path, row_group_size=20)
    items, bad = planned(photos=path)
    assert bad == []
    for number in (0, 1, 19, 20, 49, 3, 3, 25, 24, 48):
        assert items[number].image.read() == data[number]
    parquet.write_table(pa.table(cells).slice(0, 10), path)
    with pytest.raises(ValueError, match="fewer rows"):
        items[49].image.open()


def test_a_data_set_as_the_hub_has_it(tmp_path):
    table(tmp_path / "data/train-00000-of-00002.parquet", image=[PNG], text=["a cat"])
    table(tmp_path / "data/train-00001-of-00002.parquet", image=[photo(1)], text=["a dog"])
    table(tmp_path / "meta.parquet", key=["a"])
    assert explained(tmp_path) == ({"000001": "a cat", "000001-2": "a dog"}, [])
    table(tmp_path / "data/test-00000-of-00001.parquet", image=[PNG], text=["x"])
    with pytest.raises(ValueError, match="the splits test, train"):
        explained(tmp_path)


def test_of_a_large_row_group_a_few_rows_are_in_memory(tmp_path):
    data = [photo(n) for n in range(300)]
    path, cells = tmp_path / "p.parquet", {"image": data, "text": ["a cat"] * 300}
    pages = {"use_dictionary": False, "write_batch_size": 8, "data_page_size": 2**10}
    parquet.write_table(pa.table(cells), path, **pages)
    items, _ = planned(photos=path)
    before = pa.total_allocated_bytes()
    for number in (0, 299, 5, 298):
        assert items[number].image.read() == data[number]
        assert pa.total_allocated_bytes() - before < path.stat().st_size / 2


@pytest.mark.parametrize("name", ["cover", "image", "photo"])
def test_a_list_with_a_column_of_images_of_any_name_is_one_of_photos(name):
    with pytest.raises(ValueError, match=f"column '{name}' of images. Pass it as `photos`"):
        Columns().choose(["prompt", name], [name])
    assert Columns().choose(["prompt", "file_name"], []) == ["prompt"]


@pytest.mark.slow
def test_a_saved_data_set_of_images(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    images = [Image.new("RGB", (64, 64), "red"), None]
    rows = datasets.Dataset.from_dict({"picture": images, "text": ["a cat", "x"]})
    rows.cast_column("picture", datasets.Image()).save_to_disk(str(tmp_path / "d"))
    [item], [bad] = planned(photos=tmp_path / "d")
    assert item.image.open().getpixel((0, 0)) == (255, 0, 0)
    assert "picture" in bad.reason
    with pytest.raises(ValueError, match="Pass it as `photos`"):
        planned(source=tmp_path / "d")


def test_photos_in_a_storage_are_explained():
    import fsspec

    files = fsspec.filesystem("memory")
    for name, data in {"a.png": PNG, "sub/b.png": PNG, "sub/b.txt": b"b", "a.txt": b"a"}.items():
        files.pipe_file(f"/photos/{name}", data)
    assert explained("memory://photos") == ({"a": "a", "sub-b": "b"}, [])


def test_a_heic_is_read_with_its_package(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    image = heif.from_pillow(Image.new("RGB", (64, 64), "red"))
    image.save(Path(tmp_path, "a.HEIC"))
    put(tmp_path, "a.txt", "a cat")
    assert explained(tmp_path) == ({"a": "a cat"}, [])
