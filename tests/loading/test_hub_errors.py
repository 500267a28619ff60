"""What is said when the hub does not give a model: of each reason, with the errors that come."""

import errno
import importlib
import logging

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from sdattn.errors import AccessError, DeniedError, MissingFileError, is_bug
from sdattn.loading.hub_errors import _PROXIES, asking_hub
from sdattn.loading.repository import HubName, asking

# Of huggingface_hub, by its version: requests, httpx or httpx2.
http = importlib.import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
NotConnected = getattr(http, "ConnectError", None) or http.ConnectionError

LONG = "404 Client Error. (Request ID: Root=1-abc) " + "Repository Not Found for url: " + "x" * 400


class ChunkedEncodingError(OSError):
    """As requests, the HTTP library of older versions, calls it."""


class Answer:
    def __init__(self, status):
        self.status_code = status


def of_the_hub(kind, status=None):
    """An error of a kind as an answer of the hub raises it, whichever way the version makes it."""
    error = kind.__new__(kind)
    OSError.__init__(error, LONG)
    if status is not None:
        error.response = Answer(status)
    return error


@pytest.fixture(autouse=True)
def no_proxy_and_no_token(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for name in _PROXIES:
        monkeypatch.delenv(name, raising=False)


def said(error, cause=None, kind=OSError):
    with pytest.raises(kind) as caught:
        with asking_hub("'owner/name'", "owner/name", "v9"):
            raise error from cause
    return str(caught.value)


REASONS = [  # an error, what it becomes, and words of the message
    (of_the_hub(GatedRepoError, 401), DeniedError, ("its terms", "hf auth login")),
    (of_the_hub(RepositoryNotFoundError, 401), MissingFileError, ("private", "HF_TOKEN")),
    (of_the_hub(HfHubHTTPError, 401), DeniedError, ("refused the token", "HF_TOKEN")),
    (of_the_hub(HfHubHTTPError, 403), DeniedError, ("403",)),
    (of_the_hub(HfHubHTTPError, 429), AccessError, ("429", "few minutes", "hf auth login")),
    (of_the_hub(HfHubHTTPError, 503), AccessError, ("503", "again")),
    (of_the_hub(HfHubHTTPError, 404), AccessError, ("answered 404", "HF_ENDPOINT")),
    (of_the_hub(HfHubHTTPError, 451), AccessError, ("answered 451", "HF_ENDPOINT")),
    (of_the_hub(HfHubHTTPError, 407), AccessError, ("proxy", "HTTPS_PROXY", "USER:PASSWORD")),
    (OfflineModeIsEnabled("offline"), MissingFileError, ("HF_HUB_OFFLINE", "hf download owner")),
    (NotConnected("no route to host"), AccessError, ("cannot be reached", "no route to host")),
    (http.ReadTimeout("slow"), AccessError, ("cannot be reached", "connection")),
    (ChunkedEncodingError("IncompleteRead"), AccessError, ("cannot be reached", "connection")),
    (ConnectionResetError("reset"), AccessError, ("cannot be reached", "connection")),
    (OSError(errno.ENOSPC, "No space left on device"), AccessError, ("full", "HF_HOME")),
    (NotConnected("[SSL: CERTIFICATE_VERIFY_FAILED]"), AccessError, ("SSL_CERT_FILE",)),
]


@pytest.mark.parametrize(("error", "kind", "parts"), REASONS)
def test_a_reason_that_is_known_says_what_to_do(error, kind, parts):
    cause_lies_below = said(OSError("Cannot load model: is not cached locally. " + LONG), error)
    for text in (said(error, kind=kind), cause_lies_below):
        assert text.startswith("Could not load 'owner/name' from the hub: ")
        assert all(part in text for part in parts)
        assert "Request ID" not in text


@pytest.mark.parametrize(("status", "noun"), [(401, "wrong or has expired"), (404, "private")])
def test_a_token_is_to_blame_only_for_401(monkeypatch, status, noun):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "expired")
    assert noun in said(of_the_hub(RepositoryNotFoundError, status))


def test_a_gated_model_is_not_the_token_s_fault(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "of somebody")
    assert "its terms" in said(of_the_hub(GatedRepoError, 401))


def test_the_hubs_log_is_as_it_was_afterwards():
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.INFO)
    try:
        with asking(HubName("owner/name")):
            assert log.level == logging.ERROR
        assert log.level == logging.INFO
    finally:
        log.setLevel(before)


def test_a_revision_that_is_not_there_is_an_option():
    text = said(of_the_hub(RevisionNotFoundError, 404), kind=ValueError)
    assert text.startswith("`revision='v9'`: owner/name has no branch, tag or commit")


def test_a_file_that_is_not_here_since_the_hub_is_not_reached():
    missing = LocalEntryNotFoundError("we cannot find the snapshot folder on the local disk")
    assert "cannot be reached" in said(missing, NotConnected("no route"))


def test_any_other_reason_is_given_whole():
    text = said(ValueError("first\n {} " + "reason " * 100), KeyError("the cause"))
    assert text.count("reason") == 100 and "first {} reason" in text
    assert text.endswith("Since: 'the cause'")


def test_the_proxy_is_the_one_that_is_set(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert "set https_proxy=" in said(of_the_hub(HfHubHTTPError, 407))


@pytest.mark.parametrize("kind", [NotConnected, http.ReadTimeout])
def test_a_network_that_fails_is_no_bug(kind):
    assert not is_bug(kind("no route to host"))
