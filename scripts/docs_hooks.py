"""What mkdocs needs to know of this repository: where its images are, how docstrings are written.

Images lie in outputs/, where the commands that make them put them. Pages link them as they lie
in the repository (../outputs/example/grid.png), so the links work on a forge and in the site.
"""

import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

QUIET = {  # what loading a model prints, in the notebooks
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore:IProgress not found",
}
ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("example", "example-edit", "evaluation")
SHARED = re.compile(r"^( +)(\w+(?:, \w+)+):( .*(?:\n\1 {4}.*)*)", re.MULTILINE)  # a, b: of both
TABLE = re.compile(r"^=+ [= ]+$.*^=+ [= ]+$", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([\w.]+)`")


def on_startup(**_: Any) -> None:
    """The kernels of the notebooks take the environment over."""
    os.environ.update(QUIET)


def on_files(files: Files, config: Any) -> Files:
    """Put the images of outputs/ into the site."""
    for folder in SHOWN:
        for image in sorted((ROOT / "outputs" / folder).rglob("*")):
            if image.suffix not in (".png", ".gif", ".webp"):
                continue
            place = image.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """outputs/ is beside docs/ in the repository and inside it in the site."""
    return markdown.replace("../outputs/", "outputs/")


class Docstrings(griffe.Extension):
    """Docstrings as griffe reads them.

    :func:`sdattn.capture` becomes a link where the name has an entry, else code; an argument list's
    "a, b: of both" an entry for each; a table of reStructuredText stays as it is typed.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = TABLE.sub(r"```text\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = SHARED.sub(_each, ROLE.sub(_linked, text))


def _linked(role: re.Match[str]) -> str:
    name = role[1]
    target = name if "." in name else f"sdattn.{name}"
    return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'


def _each(entry: re.Match[str]) -> str:
    indent, names, text = entry.groups()
    return "\n".join(f"{indent}{name}:{text}" for name in names.split(", "))
