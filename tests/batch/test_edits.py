"""Items that are edits of an image: lines with ``edit_to``."""

import io
import json

import numpy as np
import pytest
from helpers.batch_draws import SMALL, draw
from helpers.batch_runs import FORMATS, rows_of
from helpers.galleries import data_of
from helpers.item_lines import planned, read_items
from helpers.transformer_rows import sana
from PIL import Image

from sdattn import edit_image, generate, load_pipeline
from sdattn.batch import open_batch, verify
from sdattn.batch.formats import format_of
from sdattn.batch.records import read_manifest
from sdattn.files.place import Place

GUIDED = {**SMALL, "guidance_scale": 5.0, "num_inference_steps": 2}
SWAP = {"id": "swap", "prompt": "a red cat", "edit_to": "a red dog", "seed": 3}
LINES = [
    {"id": "before", "prompt": "a red cat", "seed": 3},
    SWAP,
    {
        **{"id": "refined", "prompt": "a cat", "edit_to": "a red cat", "seed": 4},
        **{"blend": ["cat"], "weights": {"red": 2.0}, "cross_replace_steps": [0.0, 0.5]},
        **{"negative_prompt": "dog", "words": ["red cat"]},
    },
    {"id": "behind", "prompt": "a red dog", "seed": 3},
]


@pytest.fixture(scope="module", params=FORMATS)
def drawn(model, tmp_path_factory, request):
    root = tmp_path_factory.mktemp("edits") / "run"
    save = ("image", "maps", "report")
    outcome = draw(model, root, LINES, options=GUIDED, format=request.param, save=save)
    assert (outcome.whole, outcome.failed, outcome.bad_lines) == (4, 0, 0)
    return root


def files_of(root):
    format = format_of(Place(root), read_manifest(Place(root)))
    rows = rows_of(root / "metadata.jsonl")
    return {row["id"]: format.read(row["place"], row["id"]) for row in rows}


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
        said = json.loads(found["run.json"])
        assert (said["prompt"], said["edited"]) == (target, alone[1].info["edited"])
        for word in line.get("words", ["red", "dog"]):
            ours, theirs = run.heatmaps[word].map, alone.heatmaps[1][word].map
            assert (ours - theirs).abs().max() < 2e-3 * theirs.max()  # float16
        assert source in found["edit.html"].decode() and target in found["edit.html"].decode()


@pytest.mark.slow
def test_rows_checksums_and_the_gallery_know_the_source(model, drawn):
    assert verify(drawn) == (4, [])
    rows = rows_of(drawn / "metadata.jsonl")
    assert [row.get("source_prompt") for row in rows] == [None, "a red cat", "a cat", None]
    files = files_of(drawn)
    edits = [{"source.png", "edit.html"} <= files[row["id"]].keys() for row in rows]
    assert edits == [False, True, True, False]
    # drawn two together, of which neither is the edit's
    alone = generate(load_pipeline(model, device="cpu"), "a red dog", seed=3, **GUIDED).images[0]
    assert np.abs(pixels(files["behind"]["image.png"]) - np.array(alone, int)).max() <= 2
    cards = data_of(drawn / "index.html")["rows"]
    assert ["source" in card["thumb"] for card in cards] == [False, True, True, False]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"edit_to": " "}, "edit_to=' ': write the edited prompt, with at least one word in it"),
        ({"edit_to": "a red cat"}, "The target is the source and no weights were given"),
        ({"edit_to": None, "blend": "cat"}, "edit_to is missing"),
        ({"blend": 5}, "blend=5`: pass a word"),
        ({"blend": "bird"}, "'bird' is in none of the prompts"),
        ({"weights": {"bird": 2}}, "'bird' is not in the prompt"),
        ({"cross_replace_steps": 8}, "8: pass a part of the run from 0 to 1"),
        ({"words": ["cat"]}, "'cat' is not in the prompt. Its words are: a, red, dog"),
    ],
)
def test_edits_that_cannot_be_are_bad_lines(changes, reason):
    lines = [{"prompt": "a red cat"}, {**SWAP, **changes}, {"prompt": "a dog"}]
    items, [bad] = read_items("".join(json.dumps(line) + "\n" for line in lines).encode())
    assert [item.line for item in items] == [1, 3]
    assert (bad.line, reason in bad.reason) == (2, True), bad.reason


def test_a_row_of_csv_may_be_an_edit():
    data = b'prompt,edit_to,weights,blend\na 2,2,"{""2"": 2}",\na cat,,,\na cat,a dog,,cat\n'
    (one, other, third), bad = read_items(data, "csv")
    assert not bad
    assert (one.edit_to, one.edit) == ("2", {"weights": {"2": 2}})
    assert (other.edit_to, other.edit, other.text) == (None, {}, "a cat")
    assert (third.edit_to, third.edit) == ("a dog", {"blend": "cat"})


def test_pipelines_without_edits_have_bad_lines(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(SWAP))
    _, [bad] = planned(sana(), source=tmp_path / "in.jsonl")
    assert bad.reason.endswith("found a SanaPipeline.")
