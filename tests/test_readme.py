"""The Python of README and docs/ runs, a page's blocks one after the other, in 4 steps for its 20;
what the pages link is there, and the API pages have an entry for every public name.

scripts/docs checks the rest: it runs the notebooks and builds the site strictly.
"""

import gc
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.storages import clear_memory

import sdattn
from sdattn.models.demos import DEMOS, demo_named

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
CODE = {
    page: blocks
    for page in PAGES
    if (blocks := re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
}
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def test_the_readme_has_the_chain_and_the_guide_has_code():
    first = CODE[README][0]  # the chain, link by link
    assert all(name in first for name in ("set_attn_processor", "AttentionStore", "heatmaps("))
    assert len([line for line in first.splitlines() if line.strip()]) <= 11
    guide = {page.stem for page in CODE if page.parent.name == "guide"}
    assert guide >= {"start", "captures", "words", "presets", "figures", "attention"}
    assert {page.stem for page in CODE} >= {"editing", "batches", "causes"}


def test_the_readme_stays_short():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 1000


def test_the_readme_has_each_command_that_makes_maps():
    """Their options are checked with those of all pages, in tests/cli/test_clusters.py."""
    typed = re.findall(r"^sdattn (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"generate", "show", "explain", "edit", "batch"} <= {*typed}


def test_an_index_gets_absolute_links(monkeypatch):
    hatchling = SimpleNamespace(MetadataHookInterface=object)  # installed only where it builds
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", hatchling)
    hook = runpy.run_path(str(ROOT / "scripts" / "readme_links.py"))["ReadmeLinks"]()
    hook.root = str(ROOT)
    metadata = {"urls": {"Repository": "https://forge.example/sdattn"}}
    hook.update(metadata)
    text = metadata["readme"]["text"]
    assert LINK.findall(text) == []
    assert "](https://forge.example/sdattn/raw/HEAD/outputs/example/card.png)" in text
    assert "](https://forge.example/sdattn/blob/HEAD/docs/limits.md)" in text


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[] if page == README else [pytest.mark.slow])
        for page in CODE
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves files open
def test_blocks_run(page, tmp_path, monkeypatch):
    clear_memory()  # another test's run may be there
    monkeypatch.chdir(tmp_path)
    for demo in map(demo_named, DEMOS):
        monkeypatch.setitem(demo.settings, "num_inference_steps", 4)
    names = {"__name__": "__main__"}
    for block in CODE[page]:
        block = re.sub(r'(num_inference_steps"?[=:] ?)20\b', r"\g<1>4", block)
        exec(compile(block, str(page), "exec"), names)
    names.clear()
    gc.collect()


def test_the_recipe_for_weights_and_biases_logs_an_image_a_word(monkeypatch):
    """Against a double of its ``wandb.Image(image)`` and ``run.log(dict, step=step)``."""
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Image=np.asarray))
    text = (ROOT / "docs" / "guide" / "recipes.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    names, logged = {"sdattn": sdattn}, []
    exec(block, names)
    logger = SimpleNamespace(log=lambda images, step: logged.append((step, images)))
    pipe = sdattn.load_pipeline("demo", device="cpu")
    names["log_maps"](logger, pipe, "a cat left of a pizza", 100, num_inference_steps=2)
    [(step, images)] = logged
    assert step == 100
    assert list(images) == ["a", "cat", "left", "of", "pizza", "image"]
    assert all(one.shape[:2] >= images["image"].shape[:2] for one in images.values())


@pytest.mark.skipif(not (ROOT / "outputs").exists(), reason="an sdist has no images")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = LINK.findall(prose)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES[1:], ids=name_of)
def test_code_fits_a_narrow_window(page):
    blocks = re.findall(r"^ *```.*?^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.M)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebooks_are_kept_without_outputs(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


def test_the_citation_names_this_version():
    assert f"\nversion: {sdattn.__version__}\n" in (ROOT / "CITATION.cff").read_text(
        encoding="utf-8"
    )
