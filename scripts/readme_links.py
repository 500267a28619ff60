"""Build hook: README's links become absolute in the package's metadata.

In the repository they are relative, so they work on a forge and on disk. A package index needs
addresses, which begin with ``Repository`` of ``project.urls`` in pyproject.toml.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^]]*\])\((?!\w+:|#)([^)\s]+)\)")


def absolute(text: str, repository: str) -> str:
    """Return Markdown with absolute links: images raw, everything else as the forge shows it."""

    def link(found: re.Match[str]) -> str:
        view = "raw" if found[1] else "blob"
        return f"{found[1]}{found[2]}({repository.rstrip('/')}/{view}/HEAD/{found[3]})"

    return LINK.sub(link, text)


class ReadmeLinks(MetadataHookInterface):
    """The hook that hatchling calls; without ``Repository`` the links stay relative."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        if repository:
            text = absolute(text, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
