"""The memory that this process may use: the machine's, or the rest that its control groups allow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_LIMITS = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
"""Files with a limit, by the type of the file system: version 2 and version 1."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


def memory_bytes(proc: Path = Path("/proc/self")) -> int:
    """The memory of the machine, or the lowest limit of this process's control groups and their parents if that is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *cgroup_limits(proc)])


def cgroup_limits(proc: Path = Path("/proc/self")) -> Iterator[int]:
    """The memory limits of a process's control groups and of their parents; `proc` is the directory of the process in /proc."""
    try:
        groups = dict(_groups((proc / "cgroup").read_text(errors="surrogateescape")))
        mounts = (proc / "mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in mounts:
        first, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        root, place = (unescaped(part) for part in first.split(" ")[3:5])
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
    """The limits of `group` and of its parents that are visible below `place`, where the group `root` is mounted."""
    inside = os.path.relpath(group, root)
    # In a container, /proc may name the group as the host sees it. The mounted group is then the container's own.
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


def unescaped(path: str) -> str:
    """A path of mountinfo, in which the kernel writes spaces and similar characters as octal numbers."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), path)
