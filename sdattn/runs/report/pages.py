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


def page(
    name: str,
    *,
    home: Path = _HERE,
    shared: Sequence[str] = (),
    further: Sequence[str] = (),
    images_from: str = "",
    **values: object,
) -> bytes:
    """A page.

    Args:
        name: of the template: ``NAME.html``, with ``theme.css`` and ``theme.js``, then those of
            ``shared``, then ``NAME.css`` and ``NAME.js``.
        home: the folder that has it, where that is another room's.
        shared: names of what several pages have, here.
        further: names of what only some of these pages have, here; they come last.
        images_from: where images may come from but the page itself, as a content security policy
            puts it.
        values: for the template, escaped wherever they stand.
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
