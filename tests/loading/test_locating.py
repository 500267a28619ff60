"""What is said when the hub does not give a model: of each reason, with the errors that come."""

import importlib

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from sdattn.errors import is_bug
from sdattn.loading.locating import find_model, needs_the_hub
from sdattn.models.demos import DEMOS

# Of huggingface_hub, by its version: requests, httpx or httpx2.
http = importlib.import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
NotConnected = getattr(http, "ConnectError", None) or http.ConnectionError

LONG = "404 Client Error. (Request ID: Root=1-abc) " + "Repository Not Found for url: " + "x" * 400


def of_the_hub(kind):
    """An error of a kind as an answer of the hub raises it, whichever way the version makes it."""
    error = kind.__new__(kind)
    OSError.__init__(error, LONG)
    return error


def said(error, cause=None):
    with pytest.raises(OSError, match="from the hub") as caught:
        with needs_the_hub("'owner/name'"):
            raise error from cause
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (of_the_hub(GatedRepoError), ("its terms", "hf auth login")),
        (of_the_hub(RepositoryNotFoundError), ("nothing of that name", "private", "HF_TOKEN")),
        (OfflineModeIsEnabled("offline"), ("HF_HUB_OFFLINE", "cache", "folder")),
        (NotConnected("no route to host"), ("cannot be reached", "connection")),
        (http.ReadTimeout("slow"), ("cannot be reached", "connection")),
        (ConnectionResetError("reset"), ("cannot be reached", "connection")),
    ],
)
def test_a_reason_that_is_known_says_what_to_do(error, parts):
    cause_lies_below = said(OSError("Cannot load model: is not cached locally. " + LONG), error)
    for text in (said(error), cause_lies_below):
        assert text.startswith("Could not load 'owner/name' from the hub: ")
        assert all(part in text for part in parts)
        assert "Request ID" not in text


def test_a_file_that_is_not_here_since_the_hub_is_not_reached():
    missing = LocalEntryNotFoundError("we cannot find the snapshot folder on the local disk")
    assert "cannot be reached" in said(missing, NotConnected("no route"))


def test_any_other_reason_is_given_whole():
    text = said(ValueError("first\n " + "reason " * 100), KeyError("the cause"))
    assert text.count("reason") == 100
    assert text.endswith("Since: 'the cause'")


@pytest.mark.parametrize("kind", [NotConnected, http.ReadTimeout])
def test_a_network_that_fails_is_no_bug(kind):
    assert not is_bug(kind("no route to host"))


def test_a_demo_that_is_not_installed_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(DEMOS, "demo-mmdit", tmp_path)
    with pytest.raises(ImportError, match="pip install ./demos") as caught:
        find_model("demo-mmdit")
    assert "\n" not in str(caught.value)
