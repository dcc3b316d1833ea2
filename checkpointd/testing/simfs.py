"""The state of a simulated file system and the effects of a power cut. It is synchronous; `simdisk.py` adds processes.

The legal faults. A power cut may have exactly these effects, each chosen from the seed:
  SIMFS-1  Content that no successful fsync covered may vanish, survive in part (any subset of its 512-byte sectors, of any of
      the writes), or survive whole. A size may survive without its content: the missing bytes then read as zeros.
  SIMFS-2  A change of a name (create, link, rename, unlink, mkdir, rmdir) that no fsync of its directory covered may or may not
      survive, independently of all other changes and of the content. A link or a rename survives whole or not at all: no name
      refers to a mixture, and no replaced name is missing.
  SIMFS-3  A rename between directories is durable at its target once the target's directory is synced. The name at its source
      may come back until the source's directory is synced, too. Syncing the source's directory makes the whole rename durable.
  SIMFS-4  Everything that an fsync covered survives: content by the fsync of its file, names by the fsync of their directory
      (the name of a directory is in its parent). Content without a surviving name is lost.
Without a power cut:
  SIMFS-5  A failed fsync (EIO, ENOSPC) drops the file's dirty pages: they count as clean but are lost. Any part of them may
      have reached the disk. A later fsync succeeds and writes nothing. A reader may see the new content or, if pages were
      evicted, the old content.
  SIMFS-6  A failed fsync of a directory leaves its names in doubt. A later successful one makes them durable (journalled
      names).
  SIMFS-7  A failed write may have written any part from its beginning.
Not modelled: bytes that decay after they were durable, blocks of other files that show up, caches of a network file system.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

SECTOR_BYTES = 512


@dataclass(slots=True, eq=False)
class SimFile:
    """An inode: readers see `data`, the disk holds `durable`, and `dirty` has the changes between the two, in order."""

    number: int
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    dirty: list[Change] = field(default_factory=list)
    changed: int = 0
    """Stands for the time of its last change: a later one is greater."""
    locked_by: object | None = None
    """The holder of the flock on the file, and the processes that wait for the lock."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SimDirectory:
    live: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: dict[NameChange, None] = field(default_factory=dict)
    """The changes in doubt of names here, in order, and of renames from here."""


Node: TypeAlias = SimFile | SimDirectory
Part: TypeAlias = tuple[SimDirectory, str, Node | None]


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes written at `offset`, or, with `data` None, the size set to `offset`."""

    offset: int
    data: bytes | None


@dataclass(slots=True, eq=False)
class NameChange:
    """One operation on names that survives whole or not at all. If `node` is None, it removes the name."""

    parts: list[Part]
    source: SimDirectory | None = None
    """The source of a rename (SIMFS-3)."""
    directories: list[SimDirectory] = field(init=False)
    """Those of all parts, also of those that are durable by now."""

    def __post_init__(self) -> None:
        self.directories = [part[0] for part in self.parts]


class SimFs:
    """Files and directories, and their durable state. Raises OSError as the kernel would."""

    def __init__(self) -> None:
        self._root = SimDirectory()
        self._pending: dict[NameChange, None] = {}
        self._made = self._changes = 0

    # --- names -------------------------------------------------------------------------------------------------

    def create(self, path: str) -> SimFile:
        parent, name = self._place(path)
        if name in parent.live:
            raise _error(errno.EEXIST, path)
        file = self._new_file()
        self._change(NameChange([(parent, name, file)]))
        return file

    def make_directory(self, path: str) -> None:
        parent, name = self._place(path)
        if name in parent.live:
            raise _error(errno.EEXIST, path)
        self._change(NameChange([(parent, name, SimDirectory())]))

    def remove_directory(self, path: str) -> None:
        parent, name = self._place(path)
        if self.directory(path).live:
            raise _error(errno.ENOTEMPTY, path)
        self._change(NameChange([(parent, name, None)]))

    def link(self, source: str, target: str) -> None:
        file = self.file(source)
        parent, name = self._place(target)
        if name in parent.live:
            raise _error(errno.EEXIST, target)
        self._change(NameChange([(parent, name, file)]))

    def clone(self, source: str, target: str) -> None:
        """A new file with the content and the time of change of another one, dirty until it is synced."""
        original, file = self.file(source), self.create(target)
        self.write(file, 0, bytes(original.data))
        file.changed = original.changed

    def rename(self, source: str, target: str) -> None:
        file = self.node(source)
        origin, old = self._place(source)
        parent, name = self._place(target)
        if isinstance(parent.live.get(name), SimDirectory):
            raise _error(errno.EISDIR, target)
        if isinstance(file, SimDirectory) and name in parent.live:
            raise _error(errno.ENOTDIR, target)
        if parent.live.get(name) is file:
            return  # POSIX: two names of one file stay as they are.
        self._change(NameChange([(parent, name, file), (origin, old, None)], source=origin))

    def exchange(self, one: str, other: str) -> None:
        first, second = self.node(one), self.node(other)
        origin, old = self._place(one)
        parent, name = self._place(other)
        self._change(NameChange([(parent, name, first), (origin, old, second)], source=origin))

    def unlink(self, path: str) -> None:
        self.file(path)
        parent, name = self._place(path)
        self._change(NameChange([(parent, name, None)]))

    def node(self, path: str) -> Node:
        """The node at `path`; OSError ENOENT or ENOTDIR if there is none."""
        found: Node = self._root
        for part in _parts(path):
            if not isinstance(found, SimDirectory):
                raise _error(errno.ENOTDIR, path)
            inside = found.live.get(part)
            if inside is None:
                raise _error(errno.ENOENT, path)
            found = inside
        return found

    def durable_node(self, path: str) -> Node | None:
        """The node at `path` if no change that is in doubt survives."""
        found: Node = self._root
        for part in _parts(path):
            if not isinstance(found, SimDirectory) or part not in found.durable:
                return None
            found = found.durable[part]
        return found

    def file(self, path: str) -> SimFile:
        node = self.node(path)
        if isinstance(node, SimDirectory):
            raise _error(errno.EISDIR, path)
        return node

    def directory(self, path: str) -> SimDirectory:
        node = self.node(path)
        if isinstance(node, SimFile):
            raise _error(errno.ENOTDIR, path)
        return node

    def sync_directory(self, path: str) -> None:
        """Make the names in `path` durable (SIMFS-2, SIMFS-3, SIMFS-4)."""
        directory = self.directory(path)
        elsewhere = any(part[0] is not directory for change in directory.pending for part in change.parts)
        changes = [*(self._pending if elsewhere else directory.pending)]
        covered: set[tuple[int, str]] = set()
        # Newest first: only the last of several changes to a name counts, and earlier ones must not come back.
        for change in reversed(changes):
            whole = change.source is directory
            left = []
            for part in change.parts:
                place = (id(part[0]), part[1])
                if place not in covered and not (whole or part[0] is directory):
                    left.append(part)
                elif place not in covered:
                    covered.add(place)
                    _set(*_durable(part))
            change.parts = left
            if not left:
                self._settled(change)
        directory.pending.clear()

    def _change(self, change: NameChange) -> None:
        for directory, name, node in change.parts:
            _set(directory.live, name, node)
            directory.pending[change] = None
        self._pending[change] = None

    def _settled(self, change: NameChange) -> None:
        del self._pending[change]
        for directory in change.directories:
            directory.pending.pop(change, None)

    def _place(self, path: str) -> tuple[SimDirectory, str]:
        parent, _, name = path.rpartition("/")
        return self.directory(parent), name

    def _new_file(self) -> SimFile:
        self._made += 1
        return SimFile(self._made, changed=self._time())

    def _time(self) -> int:
        self._changes += 1
        return self._changes

    # --- content -----------------------------------------------------------------------------------------------

    def write(self, file: SimFile, offset: int, data: bytes) -> None:
        self._alter(file, Change(offset, data))

    def truncate(self, file: SimFile, size: int) -> None:
        self._alter(file, Change(size, None))

    def _alter(self, file: SimFile, change: Change) -> None:
        _apply(file.data, change)
        file.dirty.append(change)
        file.changed = self._time()

    def sync(self, file: SimFile) -> None:
        """fsync: makes the content durable, except the part that an earlier failed fsync dropped (SIMFS-5)."""
        disk = bytearray(file.durable)
        for change in file.dirty:
            _apply(disk, change)
        file.durable, file.dirty = bytes(disk), []

    def drop_dirty(self, file: SimFile, rng: random.Random) -> None:
        """A failed fsync (SIMFS-5)."""
        file.durable, file.dirty = _survivors(file, rng), []
        if rng.random() < 0.5:
            kept = file.durable[: len(file.data)]
            file.data[:] = kept + bytes(len(file.data) - len(kept))

    # --- the power cut -----------------------------------------------------------------------------------------

    def power_cut(self, rng: random.Random) -> None:
        """Change to a state that the legal faults allow, chosen by `rng`. Everything that is left is durable."""
        survival = rng.choice((0.0, 0.5, 0.5, 1.0))
        for change in self._pending:
            if rng.random() < survival:
                for part in change.parts:
                    _set(*_durable(part))
        self._pending = {}
        seen: set[int] = set()
        for node in list(_reachable(self._root)):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, SimDirectory):
                node.live = dict(node.durable)
                node.pending = {}
            else:
                node.durable, node.dirty = _survivors(node, rng), []
                node.data, node.locked_by = bytearray(node.durable), None

    def make_all_durable(self) -> None:
        """Make everything durable, as sync(1) does: the starting point of a run."""
        for node in list(_everything(self._root)):
            if isinstance(node, SimFile):
                self.sync(node)
            else:
                node.durable = dict(node.live)
                node.pending = {}
        self._pending = {}

    def dump(self) -> list[str]:
        """Every name below the root with its size, sorted: for messages."""
        return [
            f"{path} {len(node.data)}" if isinstance(node, SimFile) else f"{path}/"
            for path, node in _walk(self._root, "")
            if path
        ]


@lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    if path and not path.startswith("/"):
        raise ValueError(f"{path!r} is not absolute")
    return tuple(part for part in path.split("/") if part)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _durable(part: Part) -> tuple[dict[str, Node], str, Node | None]:
    return part[0].durable, part[1], part[2]


def _set(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _apply(content: bytearray, change: Change) -> None:
    end = change.offset + len(change.data or b"")
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if change.data is None:
        del content[change.offset :]
    else:
        content[change.offset : end] = change.data


def _survivors(file: SimFile, rng: random.Random) -> bytes:
    """The bytes of `file` on the disk if no further write reaches it (SIMFS-1)."""
    disk = bytearray(file.durable)
    fate = rng.choice(("vanished", "whole", "torn", "torn", "size only"))
    for change in file.dirty:
        # Every change has its own random stream, so that other choices do not depend on its number of sectors.
        draw = random.Random(rng.random())
        if fate == "whole" or (change.data is None and fate != "vanished" and draw.random() < 0.5):
            _apply(disk, change)
        elif fate == "torn" and change.data is not None:
            for piece in _sectors(change):
                if draw.random() < 0.5:
                    _apply(disk, piece)
    if fate == "size only":
        _apply(disk, Change(len(file.data), None))
    return bytes(disk)


def _sectors(change: Change) -> Iterator[Change]:
    """The write in pieces that end at sector boundaries of the file: each reaches the disk whole or not at all."""
    data = change.data or b""
    at = 0
    while at < len(data):
        offset = change.offset + at
        size = min(SECTOR_BYTES - offset % SECTOR_BYTES, len(data) - at)
        yield Change(offset, data[at : at + size])
        at += size


def _walk(directory: SimDirectory, path: str) -> Iterator[tuple[str, Node]]:
    yield path, directory
    for name, node in sorted(directory.live.items()):
        if isinstance(node, SimDirectory):
            yield from _walk(node, f"{path}/{name}")
        else:
            yield f"{path}/{name}", node


def _everything(directory: SimDirectory) -> Iterator[Node]:
    return (node for _, node in _walk(directory, ""))


def _reachable(directory: SimDirectory) -> Iterator[Node]:
    """All nodes that durable names lead to, in an order that depends on the names alone."""
    yield directory
    for _, node in sorted(directory.durable.items()):
        if isinstance(node, SimDirectory):
            yield from _reachable(node)
        else:
            yield node
