"""The memory that this process may use: the machine's, or the rest that its control groups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_LIMITS = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
"""Files with a limit, by the type of the file system: version 2 and version 1."""


def memory_bytes(proc: Path = Path("/proc/self")) -> int:
    """The machine's memory, or the least limit of this process's control groups and those above them, where that is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *cgroup_limits(proc)])


def cgroup_limits(proc: Path = Path("/proc/self")) -> Iterator[int]:
    """The limits on memory of the control groups of the process whose directory in /proc is `proc`, and of those above."""
    try:
        groups = dict(_groups((proc / "cgroup").read_text()))
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in mounts:
        first, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        root, place = (_unescaped(part) for part in first.split(" ")[3:5])
        if kind in groups and (kind == "cgroup2" or "memory" in options.split(" ")[-1].split(",")):
            yield from _limits(Path(place), root, groups[kind], _LIMITS[kind])


def _groups(text: str) -> Iterator[tuple[str, str]]:
    """The type of hierarchy, and this process's group in it, of lines such as `4:memory:/a` and `0::/a`."""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "cgroup2", path
        elif "memory" in controllers.split(","):
            yield "cgroup", path


def _limits(place: Path, root: str, group: str, names: tuple[str, ...]) -> Iterator[int]:
    """The limits of `group` and those above it, as far as they are seen below `place`, where the group `root` is mounted."""
    inside = os.path.relpath(group, root)
    # In a container, the group may be told as the host sees it: then the mounted one is its own.
    folder = place if inside.startswith("..") or not (place / inside).is_dir() else place / inside
    while True:
        for name in names:
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():
                yield int(text)
        if folder == place:
            return
        folder = folder.parent


def _unescaped(path: str) -> str:
    """A path of mountinfo, where spaces and the like stand as octal numbers."""
    return path.encode("latin-1", "backslashreplace").decode("unicode_escape") if "\\" in path else path
