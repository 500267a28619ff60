"""Images of the user's own in a batch, explained as explain() does, wherever they are found."""

import io
import os
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pytest
from helpers.batch_draws import SMALL, draw
from helpers.demo_batches import contents, rows, stamps, wait_until, whole, write_lines
from helpers.demo_words import needs_sprites
from helpers.forks import Fork
from helpers.galleries import data_of
from helpers.tiers import tiered
from PIL import Image

from scripts.scenes.emoji import random_scene
from sdattn import explain, load_pipeline
from sdattn.batch import Request, open_batch, run_batch, verify
from sdattn.batch.input.items import read_items
from sdattn.batch.input.plan import check_items
from sdattn.batch.input.sources import read_source
from sdattn.batch.storage.folder import BatchFolder

CAPTIONS = ("a red cat", "a dog", "dog and cat")
SAVE = ("image", "maps", "masks")


def photo(number, size=(128, 128)):
    noise = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), np.uint8)
    return Image.fromarray(noise)


def as_bytes(image, kind="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def pairs(folder, captions=CAPTIONS):
    folder.mkdir(parents=True)
    for number, caption in enumerate(captions):
        photo(number).save(folder / f"p{number}.png")
        (folder / f"p{number}.txt").write_text(caption + "\n")
    return folder


def items_of(source):
    return read_items(*read_source(str(source)))


def explain_all(model, source, out, **request):
    usual = {"batch_size": 1, "device": "cpu", "save": SAVE, "progress": False}
    return run_batch(Request(source, out, str(model), **{**usual, **request}))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return pairs(tmp_path_factory.mktemp("photos") / "set")


# What is explained


@pytest.mark.slow
@needs_sprites
def test_an_item_is_what_explain_makes_of_it(demo, tmp_path):
    rng = np.random.default_rng(3)
    scenes = [random_scene(rng, n_objects=2) for _ in range(3)]
    lines = [{"image": f"{i}.png", "prompt": s.caption(rng)} for i, s in enumerate(scenes)]
    lines[1] |= {"seed": 9, "timesteps": [100, 400], "words": [scenes[1].objects[0].noun]}
    for line, scene in zip(lines, scenes, strict=True):
        Image.fromarray(scene.draw()).save(tmp_path / line["image"])
    wide = Image.fromarray(scenes[2].draw()).resize((300, 200))
    wide.save(tmp_path / "2.png")
    write_lines(tmp_path / "in.jsonl", [*lines, {"prompt": "a cat", "num_inference_steps": 2}])
    outcome = explain_all("demo", tmp_path / "in.jsonl", tmp_path / "run")
    assert (outcome.whole, outcome.failed, outcome.bad_lines) == (4, 0, 0)
    found = open_batch(tmp_path / "run")
    assert found["000004"].settings.explained is None  # drawn
    for number, line in enumerate(lines, 1):
        asked = {name: line[name] for name in ("timesteps", "words") if name in line}
        image = Image.open(tmp_path / line["image"])
        run = explain(demo, image, line["prompt"], seed=line.get("seed", number - 1), **asked)
        ours, theirs = found[f"{number:06d}"], run[0]
        assert ours.image.tobytes() == theirs.image.tobytes()
        assert ours.info["explained"] == theirs.info["explained"]
        assert list(ours.heatmaps.words) == list(theirs.heatmaps.words)
        for own, other in zip(
            ours.heatmaps.occurrences(), theirs.heatmaps.occurrences(), strict=True
        ):
            assert (own.values - other.values).abs().max() < 2e-3 * other.values.max()  # float16
    row = rows(tmp_path / "run" / "metadata.jsonl")[1]
    assert (row["source_file"], row["words"]) == ("1.png", lines[1]["words"])


@pytest.mark.slow
def test_images_of_one_size_run_together_each_from_its_own_noise(model, photos, tmp_path):
    explain_all(model, photos, tmp_path / "alone")
    explain_all(model, photos, tmp_path / "together", batch_size=3)
    alone, together = open_batch(tmp_path / "alone"), open_batch(tmp_path / "together")
    assert list(alone) == list(together) == ["p0", "p1", "p2"]
    for name in alone:
        for one, other in zip(
            *(run[name].heatmaps.occurrences() for run in (alone, together)), strict=True
        ):
            assert (one.values - other.values).abs().max() < 2e-3 * one.values.max()


@pytest.mark.parametrize("kind", tiered(["folder", "webdataset", "parquet"], daily=3))
@pytest.mark.slow
def test_rows_name_a_mask_for_each_word(model, photos, tmp_path, kind):
    explain_all(model, photos, tmp_path / "run", format=kind)
    assert verify(tmp_path / "run") == (3, [])
    found, files = open_batch(tmp_path / "run"), contents(tmp_path / "run")
    for row in rows(tmp_path / "run" / "metadata.jsonl"):
        heatmaps = found[row["id"]].heatmaps
        assert len(row["masks"]) == len(row["words"]) == len(row["prompt"].split())
        for name, heatmap in zip(row["masks"], heatmaps.occurrences(), strict=True):
            if kind == "folder":
                mask = Image.open(tmp_path / "run" / name)
            else:
                mask = Image.open(io.BytesIO(files[row["id"]][name]))
            assert (mask.size, mask.mode) == ((row["width"], row["height"]), "L")
            same = np.array(mask) == 255 * heatmap.mask((128, 128)).numpy()
            assert same.mean() > 0.98, same.mean()
    if kind == "parquet":
        from pyarrow import parquet

        [shard] = (tmp_path / "run" / "shards").iterdir()
        table = parquet.read_table(shard, columns=["source_file", "masks"]).to_pylist()
        assert table[1] == {
            "source_file": "p1.png",
            "masks": ["masks/01-a.png", "masks/02-dog.png"],
        }


# Where images are found


def tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def imagefolder(folder, captions=CAPTIONS):
    (folder / "deep").mkdir(parents=True)
    lines = []
    for number, caption in enumerate(captions):
        photo(number).save(folder / "deep" / f"p{number}.png")
        lines.append({"file_name": f"deep/p{number}.png", "text": caption, "width": 64})
    write_lines(folder / "metadata.jsonl", lines)
    return folder


def tarred(path, numbers=(0, 1, 2)):
    members = {}
    for i in numbers:
        members |= {f"p{i}.png": as_bytes(photo(i)), f"p{i}.txt": CAPTIONS[i].encode()}
        members |= {f"p{i}.json": b"{}"}
    return tar_of(path, members)


def tars(source):
    source.mkdir()
    tarred(source / "0.tar", [0])
    tarred(source / "1.tar", [1, 2])
    return source


def nested(source):
    deep = source / "a" / "b"
    pairs(deep)
    for ending in ("png", "txt"):
        (deep / f"p0.{ending}").rename(source / f"p0.{ending}")
    (source / "RUN" / "items").mkdir(parents=True)  # a run among its photos is none of them
    (source / "RUN" / "batch.json").touch()
    photo(0).save(source / "RUN" / "items" / "image.png")
    return source


def data_set():
    images = [{"bytes": as_bytes(photo(i)), "path": f"p{i}.png"} for i in range(3)]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    return datasets.Dataset.from_dict({"image": images, "text": list(CAPTIONS)}, features)


def saved(source):
    data_set().save_to_disk(source)
    return source


def parquet(source):
    data_set().to_parquet(source.with_suffix(".parquet"), batch_size=2)  # several row groups
    return source.with_suffix(".parquet")


def listed(source):
    pairs(source)
    lines = [{"image": f"set/p{i}.png", "caption": one} for i, one in enumerate(CAPTIONS)]
    return write_lines(source.with_name("in.jsonl"), lines)


FORMS = {
    "pairs": pairs,
    "nested": nested,
    "tar": lambda source: tarred(source.with_suffix(".tar")),
    "tars": tars,
    "imagefolder": imagefolder,
    "split": lambda source: imagefolder(source / "train").parent,
    "saved": saved,
    "parquet": parquet,
    "list": listed,
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # datasets leaves files open
@pytest.mark.parametrize("form", FORMS)
def test_one_set_of_photos_in_every_form(tmp_path, capsys, tiny_pipe, form):
    source = FORMS[form](tmp_path / "set") or tmp_path / "set"
    items, bad = items_of(source)
    assert bad == []
    items = sorted(items, key=lambda item: Path(item.image.name).name)
    assert [item.prompt for item in items] == list(CAPTIONS)
    below = "a/b/" if form == "nested" else ""
    assert [item.image.name for item in items] == ["p0.png", f"{below}p1.png", f"{below}p2.png"]
    for number, item in enumerate(items):
        assert item.image.size == (128, 128)
        assert item.image.open().tobytes() == photo(number).tobytes()
    first = ["p0", "a-b-p1"] if form == "nested" else ["000001", "000002"]
    first = ["p0", "p1"] if form in ("pairs", "tar", "tars") else first
    assert [item.id for item in items[:2]] == first
    jobs, bad = check_items(tiny_pipe, items, {})
    assert (len(jobs), bad) == (3, [])
    assert all("width" not in job.options for job in jobs)
    if form == "imagefolder":
        assert "not used, as an image decides them: 'width'" in capsys.readouterr().err


def test_an_image_turned_by_its_exif_tag_has_its_upright_size(tmp_path):
    tag = Image.Exif()
    tag[0x0112] = 6
    photo(0, (64, 32)).save(tmp_path / "a.jpg", exif=tag)
    (tmp_path / "a.txt").write_text("a cat")
    [item], _ = items_of(tmp_path)
    assert item.image.size == (32, 64)


# What cannot be explained


def test_what_lacks_an_image_or_a_caption_is_a_bad_line(tmp_path):
    folder = pairs(tmp_path / "set")
    (folder / "p0.txt").unlink()
    (folder / "p1.png").write_bytes(b"no image")
    (folder / "alone.txt").write_text("a cat")
    photo(5).save(folder / "p2.jpg")
    photo(6).save(folder / "good one.webp")
    (folder / "good one.txt").write_bytes("\ufeffa cat".encode())
    (folder / "empty.txt").write_text("\n")
    photo(7).save(folder / "empty.png")
    [item], bad = items_of(folder)
    assert (item.prompt, item.id, item.image.name) == ("a cat", "000002", "good one.webp")
    reasons = {line.text[11:16]: line.reason for line in bad}
    assert "without an image" in reasons["alone"]
    assert "prompt=''" in reasons["empty"]
    assert "without a caption" in reasons['p0", ']
    assert "p1.png is not a readable image" in reasons['p1", ']
    assert "another image" in reasons['p2", ']
    assert len(bad) == 5


def bad_of(pipe, tmp_path, line, defaults=None):
    write_lines(tmp_path / "in.jsonl", [line])
    items, unread = items_of(tmp_path / "in.jsonl")
    _, bad = check_items(pipe, items, defaults or {})
    [one] = [*unread, *bad]
    return one.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": "none.png"}, "image='none.png' cannot be read: No such file"),
        ({"image": "in.jsonl"}, "in.jsonl is not a readable image"),
        ({"image": "."}, "cannot be read"),
        ({"image": 3}, "image=3: write the path"),
        ({"image": "https://host/a.png"}, "is an address"),
        ({"prompt": None}, "prompt is missing"),
        ({"width": 64}, "`width`"),
        ({"negative_prompt": "dog"}, "`negative_prompt`"),
        ({"timesteps": [0]}, "timesteps"),
        ({"edit_to": "a dog"}, "edit_to"),
        ({"words": ["dog"]}, "'dog' is not in the prompt"),
    ],
)
def test_lines_that_cannot_be_explained_are_bad(tiny_pipe, tmp_path, changes, reason):
    photo(0).save(tmp_path / "a.png")
    line = {"image": "a.png", "prompt": "a cat", **changes}
    line = {name: value for name, value in line.items() if value is not None}
    assert reason in bad_of(tiny_pipe, tmp_path, line)


def test_defaults_for_drawing_are_for_lines_that_draw(tiny_pipe, tmp_path):
    photo(0).save(tmp_path / "a.png")
    lines = [{"image": "a.png", "prompt": "a cat"}, {"prompt": "a cat"}]
    defaults = {**SMALL, "guidance_scale": 4.0, "negative_prompt": "dog", "clip_skip": 1}
    write_lines(tmp_path / "in.jsonl", lines)
    jobs, bad = check_items(tiny_pipe, items_of(tmp_path / "in.jsonl")[0], defaults)
    assert bad == [] and jobs[0].shape != jobs[1].shape
    assert jobs[0].options == {"clip_skip": 1} and jobs[0].item.negative_prompt is None
    assert jobs[1].options["width"] == 64 and jobs[1].item.negative_prompt == "dog"
    assert "`guidance_scale`" in bad_of(tiny_pipe, tmp_path, lines[0], defaults)


def test_other_pipelines_have_bad_lines(tmp_path):
    from helpers.transformer_rows import TRANSFORMERS

    photo(0).save(tmp_path / "a.png")
    pipe = next(row for row in TRANSFORMERS if row.name == "Sana").make()
    assert "SanaPipeline" in bad_of(pipe, tmp_path, {"image": "a.png", "prompt": "a cat"})


@pytest.mark.slow
def test_an_image_that_cannot_be_decoded_fails_alone(model, photos, tmp_path):
    folder = pairs(tmp_path / "set", CAPTIONS[:2])
    data = as_bytes(photo(8), "JPEG")
    (folder / "cut.jpg").write_bytes(data[: len(data) // 2])
    (folder / "cut.txt").write_text("a cat")
    outcome = explain_all(model, folder, tmp_path / "run", batch_size=3)
    assert (outcome.whole, outcome.failed, outcome.exit_code) == (2, 1, 1)
    [failed] = rows(tmp_path / "run" / "errors.jsonl")
    assert failed["id"] == "cut" and "cut.jpg" in failed["reason"]
    photo(8).save(folder / "cut.jpg")
    assert explain_all(model, folder, tmp_path / "run", force=True).whole == 3


# Going on


@pytest.mark.slow
def test_a_changed_photo_is_explained_anew_and_no_other(model, photos, tmp_path):
    folder, run = pairs(tmp_path / "set"), tmp_path / "run"
    explain_all(model, folder, run)
    before = stamps(run)
    photo(9).save(folder / "p1.png")
    with pytest.raises(ValueError, match="input"):
        explain_all(model, folder, run)
    outcome = explain_all(model, folder, run, force=True)
    assert (outcome.before, outcome.whole) == (2, 3)
    assert len(before.items() & stamps(run).items()) == 2
    assert open_batch(run)["p1"].image.tobytes() == photo(9).tobytes()
    assert verify(run) == (3, [])


def test_a_parquet_file_that_was_written_again_is_read_again(tmp_path):
    """In one process, too: what was read of the earlier file is not its images."""
    source = parquet(tmp_path / "set")
    before, _ = items_of(source)
    image = {"bytes": as_bytes(photo(9)), "path": "p9.png"}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    held = {"image": [image], "text": ["a dog"]}
    datasets.Dataset.from_dict(held, features).to_parquet(source)
    [after], bad = items_of(source)
    assert bad == [] and after.image.open().tobytes() == photo(9).tobytes()
    with pytest.raises(ValueError, match="p0.png has changed"):
        before[0].image.open()


def test_a_photo_that_changes_during_the_run_is_not_explained(photos, tmp_path):
    folder = pairs(tmp_path / "set")
    items, _ = items_of(folder)
    photo(9).save(folder / "p1.png")
    assert items[0].image.open().size == (128, 128)
    with pytest.raises(ValueError, match="changed"):
        items[1].image.open()


@pytest.mark.weekly
@pytest.mark.skipif(os.name == "nt", reason="sends signals")
def test_killed_in_the_middle_the_same_command_does_the_rest(invoke, model, tmp_path):
    pairs(tmp_path / "set", CAPTIONS * 5)
    arguments = ["batch", "set", "--model", model, "--save", "image,maps,masks"]
    arguments += ["--batch-size", "2", "--device", "cpu", "--out"]
    process = Fork(*arguments, "run", cwd=tmp_path)
    wait_until(lambda: whole(tmp_path / "run") >= 3, process)
    process.kill()
    process.wait(60)
    before = stamps(tmp_path / "run")
    assert 3 <= len(before) < 15
    for out in ("run", "undisturbed"):
        code, _, err = invoke(*map(str, arguments), out)
        assert code == 0, err
    assert before.items() <= stamps(tmp_path / "run").items()
    assert verify(tmp_path / "run") == (15, [])
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed")
    assert len(list(BatchFolder(tmp_path / "run").layout.find())) == 15


# What is shown


@pytest.mark.slow
def test_the_gallery_has_the_file_and_the_strongest_word(model, photos, tmp_path):
    draw(model, tmp_path / "run", ["a cat", {"image": str(photos / "p0.png"), "prompt": "a cat"}])
    drawn, explained = data_of(tmp_path / "run" / "index.html")["rows"]
    words = rows(tmp_path / "run" / "metadata.jsonl")[1]["statistics"]
    assert drawn[9:] == []
    assert explained[9:] == [
        None,
        "p0.png",
        int(np.argmax([word["peak"] - word["mean"] for word in words])),
    ]


@pytest.mark.slow
def test_masks_of_a_folder_of_photos_from_the_command_line(invoke, model, photos, tmp_path):
    arguments = ("--model", str(model), "--device", "cpu", "--save", "maps,masks")
    code, out, err = invoke("batch", str(photos), "--out", "run", *arguments)
    assert code == 0, err
    assert "3 of 3 items" in " ".join(out.split())
    [row, *_] = rows(tmp_path / "run" / "metadata.jsonl")
    assert "file_name" not in row and all(
        (tmp_path / "run" / name).is_file() for name in row["masks"]
    )


@pytest.mark.slow
def test_a_run_of_photos_is_read_by_ray_data_too(model, photos):
    from sdattn.batch import Draw

    made = Draw(str(model), device="cpu", save=("heatmaps",))(
        {"prompt": ["a cat"], "image": [str(photos / "p0.png")], "seed": [4]}
    )
    run = explain(load_pipeline(model, device="cpu"), photo(0), "a cat", seed=4)
    assert np.abs(made["heatmaps"][0][1] - run.heatmaps["cat"].map.numpy()).max() < 1e-3
