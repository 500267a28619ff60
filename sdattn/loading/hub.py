"""Why something could not be fetched from the hub, in words for the user."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import AccessError

# The classes are huggingface_hub's and its HTTP library's, which differs between versions: by name.
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_NOT_REACHED = (
    "the hub cannot be reached, and this machine's cache does not hold it. Check the connection, "
    "or pass a local folder."
)
_REASONS = {  # the first whose class is in the chain of causes counts
    "GatedRepoError": (
        f"access requires accepting its terms. Do so on its page there, and {_LOG_IN}."
    ),
    "RepositoryNotFoundError": (
        "there is nothing of that name, or it is private. Check the name; if it is private, "
        f"{_LOG_IN}."
    ),
    "OfflineModeIsEnabled": (
        "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, and this machine's cache does not hold it. "
        "Unset that, or pass a local folder."
    ),
    **dict.fromkeys(("TransportError", "ConnectionError", "Timeout"), _NOT_REACHED),
}


@contextmanager
def needs_the_hub(what: str) -> Iterator[None]:
    """Turn any error into an OSError that says why ``what`` cannot be fetched, and what to do."""
    try:
        yield
    except Exception as error:  # from httpx, the hub and the OS alike: it cannot be fetched
        raise AccessError(f"Could not load {what} from the hub: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    chain = list(_causes(error))
    names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    known = next((text for name, text in _REASONS.items() if name in names), None)
    said = dict.fromkeys(" ".join(str(cause).split()) for cause in chain)
    return known or " Since: ".join(text for text in said if text)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from or during, the last first."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
