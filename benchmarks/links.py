"""Measures hard links as another way to share unchanged objects between tags: the time of a link, and the size of copies.

Today a save refers to the object of an older tag. With hard links, each tag would have a name of its own for that object, and
would stay whole if somebody removed the older tag by hand. `docs/ARCHITECTURE.md` says what was chosen, and why.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

TAGS = 10
COPIES = {
    "cp -r": ("cp", "-r"),
    "cp -a": ("cp", "-a"),
    "rsync -a": ("rsync", "-a"),
    "rsync -aH": ("rsync", "-aH"),
    "shutil.copytree": (),
}


def shared_root(root: Path, frozen: int, own: int, *, links: bool) -> None:
    """TAGS tags of `own` bytes each, which share one object of `frozen` bytes: by links or by references."""
    for number in range(TAGS):
        tag = root / f"global_step{number}"
        tag.mkdir(parents=True)
        (tag / "own").write_bytes(os.urandom(own))
        if number == 0:
            (tag / "frozen").write_bytes(os.urandom(frozen))
        elif links:
            os.link(root / "global_step0" / "frozen", tag / "frozen")


def copied(command: tuple[str, ...], root: Path, to: Path) -> int | None:
    """The bytes that a copy of `root` takes; None if there is no such program."""
    if not command:
        shutil.copytree(root, to)
    elif shutil.which(command[0]) is None:
        return None
    else:
        subprocess.run([*command, f"{root}/" if command[0] == "rsync" else str(root), str(to)], check=True)
    return size_of(to)


def size_of(root: Path) -> int:
    """The bytes of all files below `root`, each counted once however many names it has."""
    found = {}
    for path in root.rglob("*"):
        status = path.stat()
        if path.is_file():
            found[status.st_ino] = status.st_size
    return sum(found.values())


def link_s(directory: Path, count: int) -> float:
    """The seconds that one link takes, with the fsync of its directory, as a commit needs it."""
    (directory / "object").write_bytes(b"x")
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        began = time.perf_counter()
        for number in range(count):
            os.link(directory / "object", directory / f"link{number}")
            os.fsync(descriptor)
        return (time.perf_counter() - began) / count
    finally:
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="a directory on the disk to measure")
    parser.add_argument("--mib", type=int, default=64, help="MiB of the shared object; each tag has a sixteenth more")
    parser.add_argument("--links", type=int, default=200, help="how many links to time")
    options = parser.parse_args()
    frozen = options.mib << 20
    with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
        place = Path(scratch)
        (place / "timed").mkdir()
        print(f"one link and the fsync of its directory: {link_s(place / 'timed', options.links) * 1000:.2f} ms")
        for way in ("references", "links"):
            root = place / way
            shared_root(root, frozen, frozen // 16, links=way == "links")
            whole = size_of(root)
            print(f"{TAGS} tags with {way}: {whole / frozen:.2f} times the shared object")
            for name, command in COPIES.items():
                to = place / f"{way}-copy"
                size = copied(command, root, to)
                print(f"  {name}: {'not installed' if size is None else f'{size / whole:.2f} times the root'}")
                shutil.rmtree(to, ignore_errors=True)


if __name__ == "__main__":
    main()
