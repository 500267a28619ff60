"""``sdattn app``: a live page with the report's view."""

from typing import Annotated

import typer

from .options import Loaded, load


def app(
    loaded: Loaded,
    host: Annotated[
        str, typer.Option(help="Address; 0.0.0.0 is open to everyone who can reach this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first free one from 7860.")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open a browser.")] = False,
) -> None:
    """Draw images, explain photos and edit in a page, and see where the words went. Needs gradio:
    pip install 'sdattn[app]'

    Examples:
      sdattn app --browser
      sdattn app --model owner/name --port 8000
    """
    from ..app.server import check_address, import_gradio

    check_address(host, port)  # first what can be refused, since models take long to load
    import_gradio()
    from ..app.page import serve

    serve(load(loaded), host, port, browser=browser)
