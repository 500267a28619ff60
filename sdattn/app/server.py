"""Serving the live page: to this machine's own pages only, with nothing loaded from a network."""

import errno
import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import OptionError, optional, refuse

_HERE = Path(__file__).parent


def import_gradio() -> Any:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read at import
    os.environ.setdefault("GRADIO_RUN_HISTORY", "False")  # a second list of runs, with its own page
    return optional("gradio", "The live page", "sdattn[app]")


def check_address(host: str, port: int | None) -> None:
    """Raise ValueError for a host that is no address of this machine, or a port that is taken or
    may not be used; None is any free port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port or 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            tried.bind(address)
            tried.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = "another program listens there. Pass another, or none for the first free one."
            raise OptionError("port", port, text) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise refuse("port", port, "one from 1024, which need no rights") from None
        text = f"it is no address of this machine ({error.strerror}). Leave it out for this machine"
        raise OptionError("host", host, f"{text} alone.") from None


def launch_settings(host: str, port: int | None) -> dict[str, Any]:
    """Return gradio's settings: nothing is loaded from or sent to another machine."""
    gradio = import_gradio()
    from starlette.middleware import Middleware

    return {
        "server_name": host,
        "server_port": port,
        "share": False,
        "ssr_mode": False,
        "enable_monitoring": False,
        "max_file_size": "32mb",  # of a photo
        "app_kwargs": {
            "middleware": [Middleware(OwnPages, host=host)],
            "dependencies": [_address_guard()],
        },
        "footer_links": [],
        "head": f"<script>{(_HERE / 'page.js').read_text()}</script>",
        "css": (_HERE / "page.css").read_text(),
        "theme": gradio.themes.Default(  # whose own fonts are online
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
        ).set(
            **{f"button_primary_background_fill{mode}": "*primary_700" for mode in ("", "_dark")},
            **{f"button_primary_background_fill_hover{m}": "*primary_800" for m in ("", "_dark")},
            block_info_text_color="*neutral_600",
            body_text_color_subdued="*neutral_600",
        ),
    }


def _address_guard() -> Any:
    """Return a FastAPI dependency that refuses a request with a file whose path is an address:
    gradio would fetch it from the network."""
    from fastapi import Depends, HTTPException, Request

    async def refuse_addresses(request: Request) -> None:
        # Written in any other way, gradio or FastAPI may still read the body as JSON.
        kind = request.headers.get("content-type", "").partition(";")[0].rstrip()
        if request.method != "POST" or kind == "multipart/form-data":
            return  # no value, or an upload
        with suppress(ValueError):
            if _has_address(await request.json()):
                raise HTTPException(403, "A file is uploaded here, not fetched from an address.")

    return Depends(refuse_addresses)


def _has_address(value: Any) -> bool:
    if isinstance(value, dict):
        is_address = "://" in str(value.get("path"))
        return is_address or any(map(_has_address, value.values()))
    return isinstance(value, list) and any(map(_has_address, value))


class OwnPages:
    """ASGI middleware that answers a request only if it was sent to this machine by its own page,
    or by no page.

    Otherwise a page of another site could draw and upload here, and, with a name of its own that
    leads to this machine (DNS rebinding), read the results.
    """

    def __init__(self, app: Any, host: str):
        name = socket.gethostname().lower()
        self.app = app
        self.names = {"localhost", host.lower(), name, f"{name}.local"}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        if scope["type"] == "lifespan" or not (refusal := self._refusal(headers)):
            await self.app(scope, receive, send)
            return
        plain = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 403, "headers": plain})
        await send({"type": "http.response.body", "body": refusal.encode()})

    def _refusal(self, headers: dict[bytes, str]) -> str:
        host = headers.get(b"host", "")
        origin = headers.get(b"origin")
        try:  # any IP address passes, since another site's page has its own name
            name = urlsplit(f"//{host}").hostname or ""
            is_here = name in self.names or bool(ip_address(name))
        except ValueError:
            is_here = False
        if not is_here:
            return f"{host!r} is not a name of this machine. Start with --host NAME to allow it."
        if origin is not None and origin.partition("://")[2] != host:
            return f"A page of {origin!r} cannot use this one."
        return ""
