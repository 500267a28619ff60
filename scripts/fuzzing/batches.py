"""Harm to a finished batch run: `--verify` names it, the same command mends it."""

import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from sdattn.batch import verify
from sdattn.batch.formats import FORMATS
from sdattn.files.place import Place

from . import World, kind


def copy_of(world: World, format: str) -> Path:
    """A copy of a finished run, in a folder of its own."""
    root = world.new_folder() / "run"
    shutil.copytree(world.runs[format], root)
    return root


def files_of(root: Path) -> dict[str, bytes]:
    """What a run keeps."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def some_file(root: Path, chance: random.Random) -> Path:
    """Any of them, the small as often as the large."""
    return root / chance.choice([name for name, data in files_of(root).items() if data])


def flip(path: Path, chance: random.Random) -> str:
    """Turn one bit; of many items as often in a header, which is small, as anywhere."""
    data = bytearray(path.read_bytes())
    place, bit = chance.randrange(len(data)), chance.randrange(8)
    if path.suffix == ".tar" and chance.random() < 0.5:
        with tarfile.open(path) as tar:
            place = chance.choice(tar.getmembers()).offset + chance.randrange(tarfile.BLOCKSIZE)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place} of"


def cut(path: Path, chance: random.Random) -> str:
    """Leave the beginning only."""
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])
    return "the end of"


def remove(path: Path, chance: random.Random) -> str:
    path.unlink()
    return "the whole of"


def look(root: Path, path: Path, done: str) -> str | None:
    """None where verify tells of a file, by its name or its item's."""
    name = path.relative_to(root).as_posix()
    told = f"{done} {name}"
    try:
        _, problems = verify(root)
    except (OSError, ValueError) as error:  # batch.json is gone, or cannot be read at all
        problems = [str(error)]
    if not problems:
        return f"{told} was changed, and nothing found"
    parts = name.split("/")
    if len(parts) > 2:  # an item's, named with its folder
        folder, file = "/".join(parts[:3]), "/".join(parts[3:])
        named = any(folder in one and file in one for one in problems)
    else:
        named = any(name in one for one in problems)
    return None if named else f"{told} was changed, and {problems[0]!r} does not name it"


def harm(how: Callable[[Path, random.Random], str], format: str) -> Callable:
    def case(world: World, chance: random.Random) -> str | None:
        root = copy_of(world, format)
        path = some_file(root, chance)
        missed = look(root, path, how(path, chance))
        shutil.rmtree(root.parent)
        return missed

    return case


for _format in FORMATS:
    kind(f"a bit turned, {_format}", 30)(harm(flip, _format))
    kind(f"a file cut short, {_format}", 6)(harm(cut, _format))
    kind(f"a file removed, {_format}", 6)(harm(remove, _format))


@kind("a link in place of a file or folder", 10)
def link(world: World, chance: random.Random) -> str | None:
    """What it leads to is neither taken for the run's own nor touched."""
    root = copy_of(world, chance.choice([*FORMATS]))
    path = chance.choice(sorted(root.rglob("*")))
    outside = root.parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)
    before = files_of(root.parent / "outside") if outside.is_dir() else outside.read_bytes()
    missed = look_at_link(root, path)
    after = files_of(outside) if outside.is_dir() else outside.read_bytes()
    if before != after:
        missed = f"what {path.relative_to(root)} leads to was changed"
    shutil.rmtree(root.parent)
    return missed


def look_at_link(root: Path, path: Path) -> str | None:
    try:
        if verify(root)[1]:
            return None
        Place(root).begin()  # as every run that writes
    except (OSError, ValueError):
        return None
    return f"{path.relative_to(root)} is a link, and nobody minds"


@kind("harm that the same command mends", 3)
def mend(world: World, chance: random.Random) -> str | None:
    """Files of shards that are gone or cut short are drawn again, bit for bit."""
    format = chance.choice([*FORMATS])
    root, how = copy_of(world, format), chance.choice([cut, remove])
    before = files_of(root)
    path = root / chance.choice([name for name in before if name.startswith("shards/")])
    told = f"{how(path, chance)} {path.relative_to(root)}"
    try:
        world.draw(root, format)
    except (OSError, ValueError, RuntimeError) as error:
        return f"{told} was changed, and then: {error}"
    after = files_of(root)
    differing = sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
    shutil.rmtree(root.parent)
    return f"{told} was changed, and then {differing[:3]} differ" if differing else None
