"""A repository of the hub, as its API tells of it; its files are those of a folder."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

COMMIT = "a" * 40
_LARGE = (".safetensors", ".bin", ".ckpt")


@dataclass(frozen=True)
class Repository:
    """A folder, and who may read it: ``"public"``, ``"private"`` and ``"gated"`` (with the token),
    or ``"refused"`` (gated, and nobody was let in)."""

    folder: Path
    access: str = "public"

    def files(self) -> list[str]:
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in paths)

    def card(self) -> dict[str, Any]:
        """Return the front matter of the README."""
        readme = self.folder / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        matter = re.match(r"---\n(.*?\n)---\n", text, re.DOTALL)
        return yaml.safe_load(matter[1]) if matter else {}

    def entry(self, name: str) -> dict[str, Any]:
        """Return a file as the API lists it in a tree."""
        data = (self.folder / name).read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git}
        if name.endswith(_LARGE):
            sha = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": sha, "size": len(data), "pointerSize": 134}
        return entry

    def info(self, name: str, *, with_sizes: bool) -> dict[str, Any]:
        """Return what the API says of the repository; ``with_sizes`` also of its files."""
        card = self.card()
        tags = [f"license:{card['license']}"] if "license" in card else []
        if "base_model" in card:
            tags += [f"base_model:{card['base_model']}"]
        siblings = []
        for file in self.files():
            sibling: dict[str, Any] = {"rfilename": file}
            if with_sizes:
                entry = self.entry(file)
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    lfs = entry["lfs"]
                    sibling["lfs"] = {
                        "sha256": lfs["oid"],
                        "size": lfs["size"],
                        "pointerSize": lfs["pointerSize"],
                    }
            siblings.append(sibling)
        gated = {"gated": "auto", "refused": "manual"}.get(self.access, False)
        return {
            "_id": "1",
            "id": name,
            "modelId": name,
            "author": name.partition("/")[0],
            "sha": COMMIT,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "private": self.access == "private",
            "gated": gated,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": tags + card.get("tags", []),
            "cardData": card,
            "siblings": siblings,
        }

    def tree(self, folder: str, *, is_recursive: bool) -> list[dict[str, Any]]:
        """Return the folders and files below a folder as the API lists them."""
        start = f"{folder}/" if folder else ""
        entries = []
        folders = set[str]()
        for name in self.files():
            if not name.startswith(start):
                continue
            deeper = name.removeprefix(start).split("/")[:-1]
            for depth in range(1, len(deeper) + 1):
                path = start + "/".join(deeper[:depth])
                if path not in folders and (is_recursive or depth == 1):
                    folders.add(path)
                    entries.append({"type": "directory", "path": path, "size": 0, "oid": COMMIT})
            if is_recursive or not deeper:
                entries.append(self.entry(name))
        return entries
