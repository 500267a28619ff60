"""HTML pages in one file: a template of this folder with its styles and script inside.

A page loads nothing, and a content security policy in it holds the browser to that. Only our own
scripts run, whatever a prompt says: the policy names them by their hash.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def page(
    name: str,
    *,
    home: Path = _HERE,
    shared: Sequence[str] = (),
    further: Sequence[str] = (),
    images_from: str = "",
    **values: object,
) -> bytes:
    """Return a page as UTF-8 HTML.

    Args:
        name: template ``NAME.html``, with ``theme.css`` and ``theme.js``, then the files named in
            ``shared``, then ``NAME.css`` and ``NAME.js``.
        home: folder of the template, if it is another room's.
        shared: names of styles and scripts here that several pages share.
        further: names of styles and scripts here that come last.
        images: where images may come from besides the page itself, in the syntax of a content
            security policy.
        values: values for the template, which escapes them.
    """
    files = [*(_HERE / part for part in ("theme", *shared)), home / name]
    files += [_HERE / part for part in further]
    style = "\n".join(_read(file.with_suffix(".css")) for file in files)
    script = "\n".join(_read(file.with_suffix(".js")) for file in files)
    policy = f"default-src 'none'; img-src data: {images_from}; style-src '{_hash(style)}'; "
    policy += f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    values |= {"style": style, "script": script, "policy": policy}
    html: str = _template(home, name).render(**values)
    return html.encode()


@cache
def _template(home: Path, name: str) -> Any:
    import jinja2  # only where a page is made

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader([home, _HERE]),
    )
    return environment.get_template(f"{name}.html")


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
