"""Where a model is: a demo, a folder or file here, or a name of the hub."""

import pytest

from sdattn.loading.locating import find_model
from sdattn.loading.repository import HubName
from sdattn.models.demos import DEMOS


def test_a_demo_that_is_not_installed_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(DEMOS, "demo-mmdit", tmp_path)
    with pytest.raises(ImportError, match="pip install ./demos") as caught:
        find_model("demo-mmdit")
    assert "\n" not in str(caught.value)


PAGE = "https://huggingface.co/owner/name"
NAMES = {
    "owner/name": HubName("owner/name"),
    "owner/na.me-1_0": HubName("owner/na.me-1_0"),
    "owner/name/a.safetensors": HubName("owner/name", "a.safetensors"),
    "owner/name/folder/a.safetensors": HubName("owner/name", "folder/a.safetensors"),
    PAGE: HubName("owner/name"),
    f"{PAGE}/": HubName("owner/name"),
    f"{PAGE}/tree/main": HubName("owner/name"),
    f"{PAGE}/tree/v1.0": HubName("owner/name", revision="v1.0"),
    f"{PAGE}/blob/main/a.safetensors": HubName("owner/name", "a.safetensors"),
    f"{PAGE}/resolve/v1/b/a.safetensors?download=true": HubName(
        "owner/name", "b/a.safetensors", "v1"
    ),
    f"{PAGE}/blob/main/README.md": HubName("owner/name"),
    f"{PAGE}/tree/refs%2Fpr%2F1": HubName("owner/name", revision="refs/pr/1"),
    f"{PAGE}/blob/refs%2Fpr%2F1/b/a%20b.safetensors": HubName(
        "owner/name", "b/a b.safetensors", "refs/pr/1"
    ),
    f"{PAGE}/commit/0123abc": HubName("owner/name", revision="0123abc"),
    f"{PAGE}/discussions/7": HubName("owner/name"),
    "https://hf.co/owner/name": HubName("owner/name"),
}


@pytest.mark.parametrize("text", NAMES)
def test_names_and_addresses_of_the_hub_are_read(text):
    assert HubName.read(text) == NAMES[text]
    assert find_model(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "folder/a.safetensors",
        "/a/b",
        "./a/b",
        "~/a/b",
        "a/b/c",
        "a//b",
        "a/b.safetensors/c",
    ],
)
def test_other_text_is_no_name_of_the_hub(text):
    assert HubName.read(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("https://example.com/owner/name", "HF_ENDPOINT"),
        ("https://huggingface.co/owner", "names no model"),
        ("https://huggingface.co", "names no model"),
        ("https://huggingface.co/datasets/owner/name", "names no model"),
        ("https://huggingface.co/spaces/owner/name", "names no model"),
    ],
)
def test_an_address_that_names_no_model_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        find_model(text)


def test_an_address_and_an_option_cannot_name_two_revisions():
    with pytest.raises(ValueError, match="names another revision"):
        HubName.read(f"{PAGE}/tree/v1", "v2")
    assert HubName.read(f"{PAGE}/tree/v1", "v1").revision == "v1"
