"""What ComfyUI's page gets of the nodes: its script, and the example workflows."""

import importlib
import json
from pathlib import Path

import pytest
from helpers.browser import start_browser  # noqa: F401  (the fixture)

nodes = importlib.import_module("integrations.comfyui")
HOME = Path(nodes.__file__).parent
WEB = HOME / nodes.WEB_DIRECTORY
EXAMPLES = sorted((HOME / "example_workflows").glob("*.json"))
APP = "export const app = { registerExtension(one) { globalThis.extension = one; } };"
# A node as the page makes it: kinds of nodes are classes whose prototypes extensions change.
NODE = """async ([name, tables]) => {
    await import("/extensions/sdattn/words_at_spot.js");
    class Node {
        widgets = [];
        addDOMWidget(name, type, element, options) {
            const widget = { name, type, element, options };
            this.widgets.push(widget);
            return widget;
        }
        onExecuted(output) { this.executed = output; }
    }
    extension.beforeRegisterNodeDef(Node, { name });
    const node = new Node();
    node.onNodeCreated?.();
    const shown = [];
    for (const text of tables) {
        node.onExecuted({ text });
        shown.push(node.widgets.map((one) => one.element.value));
    }
    const kept = node.widgets.filter((one) => one.serialize !== false || one.options.serialize);
    const readOnly = node.widgets.every((one) => one.element.readOnly);
    return { shown, kept: kept.length, readOnly, executed: node.executed };
}"""


def answer(route):
    path = route.request.url.removeprefix("http://comfy.test")
    if path == "/scripts/app.js":
        return route.fulfill(body=APP, content_type="text/javascript")
    script = WEB / path.removeprefix("/extensions/sdattn/")
    if script.is_file():
        return route.fulfill(body=script.read_text(), content_type="text/javascript")
    return route.fulfill(body="<p>", content_type="text/html", status=200 if path == "/" else 404)


@pytest.fixture
def page(browser):
    made = browser.new_page()
    made.route("**/*", answer)
    made.goto("http://comfy.test/")
    yield made
    made.close()


def test_words_at_a_spot_are_shown_in_their_node(page):
    tables = [["cat: 2.0 times its mean"], ["cat: 1.0\nsofa: 0.5"], None]
    found = page.evaluate(NODE, ["SdattnWordsAtSpot", tables])
    assert found["shown"] == [["cat: 2.0 times its mean"], ["cat: 1.0\nsofa: 0.5"], [""]]
    assert found["readOnly"] and found["kept"] == 0  # saved graphs and what runs stay as they are
    assert found["executed"] == {"text": None}


def test_other_nodes_stay_as_they_are(page):
    assert page.evaluate(NODE, ["SaveImage", [["text"]]])["shown"] == [[]]


def test_the_script_is_of_a_node_that_there_is_and_whose_text_it_shows():
    (script,) = WEB.glob("*.js")
    (name,) = [name for name in nodes.NODE_CLASS_MAPPINGS if f'"{name}"' in script.read_text()]
    assert nodes.NODE_CLASS_MAPPINGS[name].OUTPUT_NODE
    assert "WEB_DIRECTORY" in nodes.__all__


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_nothing_in_an_example_covers_another_node(path):
    """The page makes a node as high as its title, rows, texts and what it shows need."""
    shown = {"SaveImage": 220, "SdattnWordsAtSpot": 120}
    boxes = []
    for node in json.loads(path.read_text())["nodes"]:
        x, y = node["pos"]
        width, height = node["size"]
        rows = max(len(node["inputs"]), len(node["outputs"])) + len(node["widgets_values"])
        height = max(height, 20 * rows + shown.get(node["type"], 0))
        boxes.append((node["type"], x, y - 30, x + width, y + height))
    for i, (name, left, top, right, bottom) in enumerate(boxes):
        for other, *box in boxes[:i]:
            is_apart = right <= box[0] or box[2] <= left or bottom <= box[1] or box[3] <= top
            assert is_apart, f"{name} and {other}"
