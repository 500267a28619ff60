"""Why the hub did not give what was asked, in one sentence that says what to do."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import (
    AccessError,
    DeniedError,
    InvalidValueError,
    MissingFileError,
    OptionError,
    SdattnError,
)

# The classes are the hub's library's and its HTTP library's, which differs by version: by name.
# The first counts that is among the classes of an error and of its causes.
_KINDS: dict[str, tuple[type[SdattnError], str]] = {
    "HFValidationError": (
        InvalidValueError,
        "its names are owner/name, of letters, digits and - _ . alone.",
    ),
    "OfflineModeIsEnabled": (
        MissingFileError,
        "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, and this machine's cache does not hold it. "
        "Unset that; or type `hf download {repo}` on a machine with a network, and copy {folder} "
        "from its cache to {cache}.",
    ),
    "GatedRepoError": (DeniedError, "it is gated. Accept its terms on {page}, {then}."),
    "RepositoryNotFoundError": (
        MissingFileError,
        "there is nothing of that name, or it is private. Check the name; if it is private, "
        "{log_in}.",
    ),
    "ProxyError": (
        AccessError,
        "the proxy of {proxy} refused the connection ({said}). If it asks for a login, set "
        "{proxy}=http://USER:PASSWORD@HOST:PORT; if there is no proxy, unset it.",
    ),
}
_STATUS: dict[int, tuple[type[SdattnError], str]] = {
    401: (
        DeniedError,
        "the hub refused {token}, which is wrong or has expired, though public models need none. "
        "Unset HF_TOKEN, or set it to a valid token.",
    ),
    403: (DeniedError, "the hub answered 403. Check what {token} may read."),
    407: _KINDS["ProxyError"],
    429: (
        AccessError,
        "the hub answered 429: too many requests from this address. Try again in a few minutes; "
        "who logs in, with `hf auth login` or HF_TOKEN, may ask more often.",
    ),
}
_ANSWERED = (
    AccessError,
    "the hub answered {status}. Check that {hub}, as HF_ENDPOINT has it, is a hub of models.",
)
_DOWN = (AccessError, "the hub answered {status}: it is overloaded or down. Try again later.")
_UNTRUSTED = (
    AccessError,
    "the hub's certificate cannot be verified, as behind a proxy that decrypts. Set SSL_CERT_FILE "
    "and REQUESTS_CA_BUNDLE to the file of your company's certificates.",
)
_NOT_REACHED = (
    AccessError,
    "{hub} cannot be reached ({said}). Check the connection, or pass a local folder.",
)
# urllib3 shows objects by their addresses in memory, and the hub numbers its answers
_NOISE = re.compile(r"<[^<>]* at 0x[0-9a-f]+>: ?| ?\(Request ID: [^)]*\)")
_LOST = {"TransportError", "ConnectionError", "Timeout", "TimeoutError", "ChunkedEncodingError"}
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


@contextmanager
def asking_hub(what: str, repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn any error of the hub, of its library or of the disk into one that says why ``what``
    cannot be fetched from ``repo``, and what to do.

    Raises:
        ValueError: the name is none that the hub has, or there is no such revision.
        FileNotFoundError: nothing of that name, or not on this machine if the hub may not be asked.
        PermissionError: gated, or the token is refused.
        OSError: the hub or a proxy cannot be reached or does not answer, or the disk is full.
    """
    try:
        yield
    except SdattnError:
        raise
    except Exception as error:  # of httpx or requests, the hub's library and the system
        chain = list(_causes(error))
        names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
        if "RevisionNotFoundError" in names:
            text = f"{repo} has no branch, tag or commit of that name. Leave it out for the newest."
            raise OptionError("revision", revision, text) from error
        asked = f"Could not load {what} from the hub: "
        if any(getattr(each, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for each in chain):
            raise full_disk(asked) from error
        status = next(filter(None, map(_status, chain)), None)
        kind, text = _reason(names, status, [str(cause) for cause in chain])
        fields = _fields(repo, chain[-1])
        raise kind(asked + text.format(status=status, **fields)) from error


def full_disk(asked: str) -> AccessError:
    """Return the error for a disk that has no room for what was asked."""
    from huggingface_hub import constants

    return AccessError(
        f"{asked}the disk of {constants.HF_HUB_CACHE} is full. Free some space, or set HF_HOME to "
        "a folder on another disk."
    )


def folder_of(repo: str) -> str:
    """Return the name of a repository's folder in the cache."""
    return f"models--{repo.replace('/', '--')}"


def _reason(names: set[str], status: int | None, texts: list[str]) -> tuple[type[SdattnError], str]:
    """Return the kind of an error by the classes and the messages of its causes, and its text."""
    from huggingface_hub import get_token

    # The hub says of a wrong token also that there is nothing of that name; to a good one, 404.
    if status == 401 and "GatedRepoError" not in names and get_token() is not None:
        return _STATUS[401]
    for name, reason in _KINDS.items():
        if name in names:
            return reason
    if status in _STATUS:
        return _STATUS[status]
    if status is not None and status >= 400:
        return _DOWN if status >= 500 else _ANSWERED
    if any("CERTIFICATE_VERIFY_FAILED" in text for text in texts):
        return _UNTRUSTED
    if names & _LOST:
        return _NOT_REACHED
    said = dict.fromkeys(" ".join(text.split()) for text in texts)
    return AccessError, " Since: ".join(filter(None, said)).replace("{", "{{").replace("}", "}}")


def _fields(repo: str, first: BaseException) -> dict[str, str]:
    """Return what messages name, by the names in them; ``first`` is the first error of all."""
    from huggingface_hub import constants, get_token

    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    set_here = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    said = " ".join(str(first).split()) or type(first).__name__
    return {
        "repo": repo,
        "hub": constants.ENDPOINT,
        "page": f"{constants.ENDPOINT}/{repo}",
        "cache": constants.HF_HUB_CACHE,
        "folder": folder_of(repo),
        "log_in": f"{log_in}, of an account that may read it",
        "then": f"then {log_in}" if get_token() is None else "with the account of your token",
        "token": "the token in HF_TOKEN" if set_here else "the token of `hf auth login`",
        "proxy": next((name for name in _PROXIES if os.environ.get(name)), _PROXIES[0]),
        "said": _NOISE.sub("", said)[:160].rstrip("."),
    }


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from or during, the last first."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an error is about."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None
