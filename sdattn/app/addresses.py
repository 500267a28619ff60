"""A guard of the live page: gradio fetches a file that a request names by an address."""

from contextlib import suppress
from typing import Any

from fastapi import HTTPException, Request


async def refuse_addresses(request: Request) -> None:
    """Refuse a request with a file whose path is an address, so that the network is left alone."""
    if request.method != "POST" or "multipart" in request.headers.get("content-type", ""):
        return  # no value, or an upload
    with suppress(ValueError):
        if _has_address(await request.json()):
            raise HTTPException(403, "A file is uploaded here, not fetched from an address.")


def _has_address(value: Any) -> bool:
    if isinstance(value, dict):
        is_address = "://" in str(value.get("path"))
        return is_address or any(map(_has_address, value.values()))
    return isinstance(value, list) and any(map(_has_address, value))
