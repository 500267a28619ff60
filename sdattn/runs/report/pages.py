"""HTML of one file: a template of this folder with its styles and its script inside.

No address is loaded, which a content security policy in the page holds the browser to; no script
but our own runs, whatever a prompt says: the policy names it by its hash.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def page(name: str, *, shared: Sequence[str] = (), images: str = "", **values: Any) -> bytes:
    """A page.

    Args:
        name: of the template: ``NAME.html``, with ``theme.css`` and ``theme.js``, then those of
            ``shared``, then ``NAME.css`` and ``NAME.js``.
        shared: names of what several pages have.
        images: where pictures may come from but the page itself, as a content security policy puts
            it.
        values: for the template, escaped wherever they stand.
    """
    parts = ("theme", *shared, name)
    style, script = ("\n".join(_read(f"{p}.{kind}") for p in parts) for kind in ("css", "js"))
    policy = f"default-src 'none'; img-src data: {images}; style-src '{_hash(style)}'; "
    policy += f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    return _template(name).render(style=style, script=script, policy=policy, **values).encode()


@cache
def _template(name: str) -> Any:
    import jinja2  # only where a page is made

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(_HERE),
    )
    return environment.get_template(f"{name}.html")


@cache
def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
