"""Items that are edits of an image: lines with ``edit_to``."""

import io
import json
import shutil

import numpy as np
import pytest
from helpers.batch_draws import SMALL, draw
from helpers.galleries import data_of
from PIL import Image
from sdattn.batch.engines.raydata import Draw
from sdattn.batch.input.items import read_items
from sdattn.batch.input.plan import check_items, fingerprint
from sdattn.batch.storage.folder import BatchFolder

from sdattn import edit_image, generate, load_pipeline
from sdattn.batch.reading import open_batch, verify

GUIDED = {**SMALL, "guidance_scale": 5.0, "num_inference_steps": 2}
SWAP = {"id": "swap", "prompt": "a red cat", "edit_to": "a red dog", "seed": 3}
LINES = [
    {"id": "before", "prompt": "a red cat", "seed": 3},
    SWAP,
    {
        "id": "refined",
        "prompt": "a cat",
        "edit_to": "a red cat",
        "seed": 4,
        "blend": ["cat"],
        "weights": {"red": 2.0},
        "cross_replace_steps": [0.0, 0.5],
        "negative_prompt": "dog",
        "words": ["red cat"],
    },
    {"id": "behind", "prompt": "a red dog", "seed": 3},
]


@pytest.fixture(scope="module", params=["folder", "webdataset", "parquet"])
def drawn(model, tmp_path_factory, request):
    root = tmp_path_factory.mktemp("edits") / "run"
    save = ("image", "maps", "report")
    outcome = draw(model, root, LINES, options=GUIDED, format=request.param, save=save)
    assert (outcome.whole, outcome.failed, outcome.bad_lines) == (4, 0, 0)
    return root


def files_of(root):
    layout = BatchFolder(root).layout
    return {item: layout.read(item, location) for item, location in layout.find()}


def pixels(data):
    return np.array(Image.open(io.BytesIO(data)))


@pytest.mark.slow
def test_an_item_is_what_edit_makes_of_it(model, drawn):
    pipe, files = load_pipeline(model, device="cpu"), files_of(drawn)
    for line in LINES[1:3]:
        given = {name: value for name, value in line.items() if name not in ("id", "words")}
        source, target = given.pop("prompt"), given.pop("edit_to")
        alone = edit_image(pipe, source, target, **GUIDED | given)
        found, run = files[line["id"]], open_batch(drawn)[line["id"]]
        assert (pixels(found["source.png"]) == np.array(alone.images[0])).all()
        assert (pixels(found["image.png"]) == np.array(alone.images[1])).all()
        assert (np.array(alone.images[0]) != np.array(alone.images[1])).any()
        said = json.loads(found["run.json"])
        assert (said["prompt"], said["edited"]) == (target, alone[1].info["edited"])
        for word in line.get("words", ["red", "dog"]):
            ours, theirs = run.heatmaps[word].map, alone.heatmaps[1][word].map
            assert (ours - theirs).abs().max() < 2e-3 * theirs.max()  # float16
        page = found["edit.html"].decode()
        assert source in page and target in page


@pytest.mark.slow
def test_items_beside_an_edit_are_no_edits(model, drawn):
    files, pipe = files_of(drawn), load_pipeline(model, device="cpu")
    for line in (LINES[0], LINES[3]):
        found = files[line["id"]]
        assert not {"source.png", "edit.html"} & set(found)
        assert json.loads(found["run.json"]).get("edited") is None
        own = np.array(generate(pipe, line["prompt"], seed=line["seed"], **GUIDED).images[0], int)
        assert np.abs(pixels(found["image.png"]) - own).max() <= 2  # drawn two together
    # an edit starts from the noise of its source
    assert np.abs(pixels(files["swap"]["source.png"]).astype(int) - own).max() > 2


def test_rows_and_checksums_know_the_source(drawn):
    assert verify(drawn) == (4, [])
    rows = [json.loads(line) for line in (drawn / "metadata.jsonl").read_text().splitlines()]
    assert [row.get("source_prompt") for row in rows] == [None, "a red cat", "a cat", None]
    assert [row["prompt"] for row in rows] == ["a red cat", "a red dog", "a red cat", "a red dog"]


@pytest.mark.slow
def test_a_source_that_was_changed_is_found(model, tmp_path):
    draw(model, tmp_path / "run", [SWAP], options=GUIDED)
    [path] = (tmp_path / "run").glob("items/*/swap/source.png")
    Image.new("RGB", (64, 64)).save(path)
    problem = "swap: source.png is not what was written: its checksum differs"
    assert [problem in one for one in verify(tmp_path / "run")[1]] == [True]
    shutil.rmtree(path.parent)
    assert draw(model, tmp_path / "run", [SWAP], options=GUIDED).whole == 1
    assert verify(tmp_path / "run") == (1, [])


def test_another_edit_is_another_item(model, tiny_pipe):
    lines = [SWAP, {**SWAP, "weights": {"dog": 2}}, {**SWAP, "edit_to": "a red cat, dog"}]
    lines += [{"prompt": "a red cat", "seed": 3}, {**SWAP, "weights": {"dog": 3}}]
    data = "".join(json.dumps({**line, "id": i}) + "\n" for i, line in enumerate(lines))
    items, _ = read_items(data.encode(), "jsonl")
    jobs, bad = check_items(tiny_pipe, items, {})
    assert not bad
    assert len({fingerprint(job, "settings") for job in jobs}) == len(lines)
    assert len({job.shape for job in jobs}) == 2  # edits run with no others


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"edit_to": " "}, "edit_to=' ': write the edited prompt, with at least one word in it"),
        ({"edit_to": "a red cat"}, "The target is the source and no weights were given"),
        ({"edit_to": None, "blend": "cat"}, "edit_to is missing"),
        ({"blend": 5}, "blend=5: write a word"),
        ({"blend": "bird"}, "'bird' is in none of the prompts"),
        ({"weights": {"dog": "2"}}, "weights={'dog': '2'}: write an object of words"),
        ({"weights": {"bird": 2}}, "'bird' is not in the prompt"),
        ({"mode": "swap"}, "mode='swap'"),
        ({"cross_replace_steps": 8}, "8: pass a part of the run from 0 to 1"),
        ({"words": ["cat"]}, "'cat' is not in the prompt. Its words are: a, red, dog"),
    ],
)
def test_edits_that_cannot_be_are_bad_lines(tiny_pipe, changes, reason):
    lines = [{"prompt": "a red cat"}, {**SWAP, **changes}, {"prompt": "a dog"}]
    data = "".join(json.dumps(line) + "\n" for line in lines)
    items, unread = read_items(data.encode(), "jsonl")
    jobs, bad = check_items(tiny_pipe, items, {})
    assert [job.item.line for job in jobs] == [1, 3]
    [bad] = unread + bad
    assert (bad.line, reason in bad.reason) == (2, True), bad.reason


def test_a_row_of_csv_may_be_an_edit():
    data = b'prompt,edit_to,weights,blend\na cat,2,"{""2"": 2}",\na cat,,,\na cat,a dog,,cat\n'
    (one, other, third), bad = read_items(data, "csv")
    assert not bad
    assert (one.edit_to, one.edit) == ("2", {"weights": {"2": 2}})
    assert (other.edit_to, other.edit, other.text) == (None, {}, "a cat")
    assert (third.edit_to, third.edit) == ("a dog", {"blend": "cat"})


def test_pipelines_without_edits_have_bad_lines():
    from helpers.transformer_rows import TRANSFORMERS

    pipe = next(row for row in TRANSFORMERS if row.name == "Sana").make()
    items, _ = read_items(json.dumps(SWAP).encode(), "jsonl")
    _, [bad] = check_items(pipe, items, {})
    assert bad.reason.endswith("found a SanaPipeline.")


@pytest.mark.slow
def test_rows_of_ray_data_have_the_source_too(model):
    rows = [{**line, "words": None} for line in LINES[:2]]
    columns = {name: [row.get(name) for row in rows] for name in ("prompt", "edit_to", "seed")}
    drawn = Draw(str(model), options=GUIDED, device="cpu", save=("image",))(columns)
    alone = edit_image(
        load_pipeline(model, device="cpu"), *(SWAP["prompt"], SWAP["edit_to"]), seed=3, **GUIDED
    )
    assert drawn["source_image"][0] is None
    assert (drawn["source_image"][1] == np.array(alone.images[0])).all()
    assert (drawn["image"][1] == np.array(alone.images[1])).all()
    assert list(drawn["words"][1]) == ["a", "red", "dog"]


@pytest.mark.slow
def test_the_gallery_shows_both_images(model, tmp_path):
    draw(model, tmp_path / "run", LINES[:2], options=GUIDED, save=("image", "maps", "report"))
    rows = data_of(tmp_path / "run" / "index.html")["rows"]
    assert [row[9:] for row in rows] == [[], ["a red cat"]]
