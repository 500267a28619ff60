"""How the live page is served: to this machine's own pages alone, with nothing from a network."""

import os
import socket
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from ..errors import MissingPackageError

# A framed page reports its height, which only it knows, see theme.js; other pages are not heard.
_FIT = """
addEventListener("message", ({ source, data }) => {
  if (!(data?.sdattnHeight > 0)) return;
  for (const frame of document.querySelectorAll("iframe[title=sdattn]"))
    if (frame.contentWindow === source)
      frame.style.height = `${Math.min(data.sdattnHeight, 20000)}px`;
});
"""
# The frame is as wide as what is around it. The last runs are a strip of small images below its
# name, however many they are.
_STYLE = """
.html-container:has(iframe) { padding: 0 !important }
#last-runs .grid-wrap { padding-top: 30px }
#last-runs .grid-container { grid: 104px / auto-flow 104px !important }
"""


def import_gradio() -> Any:
    """The package.

    Raises:
        ImportError: it is not installed.
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # it is read at the import
    os.environ.setdefault("GRADIO_RUN_HISTORY", "False")  # a second list of runs, with its own page
    try:
        import gradio
    except ImportError as error:
        raise MissingPackageError(
            "The live page needs gradio: pip install 'sdattn[app]'"
        ) from error
    return gradio


def launch_settings(host: str, port: int | None) -> dict[str, Any]:
    """How gradio serves the app: nothing is loaded from or sent to another machine."""
    gradio = import_gradio()
    from starlette.middleware import Middleware

    sans, mono = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    return {
        "server_name": host,
        "server_port": port,
        "share": False,
        "ssr_mode": False,
        "enable_monitoring": False,
        "max_file_size": 1,  # in bytes: the page uploads nothing
        "app_kwargs": {"middleware": [Middleware(OwnPages, host=host)]},
        "footer_links": [],
        "head": f"<script>{_FIT}</script>",
        "css": _STYLE,
        "theme": gradio.themes.Default(font=sans, font_mono=mono).set(  # its own are of a network
            **{f"button_primary_background_fill{mode}": "*primary_700" for mode in ("", "_dark")},
            **{f"button_primary_background_fill_hover{m}": "*primary_800" for m in ("", "_dark")},
        ),
    }


class OwnPages:
    """ASGI in front of gradio: a request is answered if it was sent to this machine by the page
    that it serves, or by no page.

    Otherwise a page of another site could draw and upload here, and, with a name of its own that
    leads to this machine (DNS rebinding), read what came of it.
    """

    def __init__(self, app: Any, host: str):
        name = socket.gethostname().lower()
        self.app, self.names = app, {"localhost", host.lower(), name, f"{name}.local"}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        if scope["type"] == "lifespan" or not (refusal := self._refusal(headers)):
            await self.app(scope, receive, send)
            return
        plain = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 403, "headers": plain})
        await send({"type": "http.response.body", "body": refusal.encode()})

    def _refusal(self, headers: dict[bytes, str]) -> str:
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not self._is_here(host):
            return f"{host!r} is no name of this machine. Start with --host NAME to allow one."
        if origin is not None and origin.partition("://")[2] != host:
            return f"A page of {origin!r} cannot use this one."
        return ""

    def _is_here(self, host: str) -> bool:
        """An address is: another site's page has that of the other site."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ip_address(name))
        except ValueError:
            return False
