"""Shows objects as plain files beside a POSIX store, for other tools.

A store whose root is a directory named `.checkpointd` can show objects in directories beside it. A shown file
`<root>/../<name>/<file>` has the content of an object, takes no space of its own, and stays when the object is removed. If the
file system can share blocks between files (Btrfs, XFS), it is a clone of the object; otherwise it is a second name of the
object, which becomes read-only.

Invariants
  PLAINDIR-1  A directory beside the root is whole at every moment, also after a power cut: it has the old files, or the new
      files, or it does not exist. It is made under a hidden name (`unfinished.py`), and comes and goes by one rename. (If the
      file system cannot exchange two names, as on NFS, it is missing for a moment when it is replaced.) A lone file replaces an
      older one of its name by one rename.
  PLAINDIR-2  The user's own files, directories and symbolic links in a directory stay in it when it is replaced or goes. If a
      crash leaves some of them under a hidden name, the next `empty` moves them back.
  PLAINDIR-3  When a call returns, its changes are durable.
  PLAINDIR-4  A program that writes to a shown file changes no object. (The superuser may write to read-only files; `verify`
      finds that.)
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress

from checkpointd.errors import StoreError
from checkpointd.layout.files import by_directory, is_lone
from checkpointd.store.names import SERVICE
from checkpointd.store.posix.anchor import LinkMet
from checkpointd.store.posix.disk import Child, FileStatus
from checkpointd.store.posix.rooted import Root
from checkpointd.store.posix.unfinished import UnfinishedDirectories

log = logging.getLogger("checkpointd")

_LATEST_BYTES_MAX = 4096
_COMPARED_BYTES = 4 * 1024 * 1024

LATEST = "latest"
ASIDE = "aside-"
"""Begins the hidden name of an old directory, if the file system cannot exchange two names."""


def can_show(root: str) -> bool:
    """Whether a store at `root` shows objects beside itself."""
    return os.path.basename(root) == SERVICE


class PlainFiles:
    """The directories beside the root, by their paths relative to the directory in which the root lies.

    A lone file (`is_lone`) lies beside the root itself, as `at`, and not in a directory `at`.
    Hold `alone` while you call a method that changes one of them.
    """

    def __init__(self, root: Root) -> None:
        self._root, self._disk = root, root.disk
        self._beside = os.path.dirname(root.path)
        self.unfinished = UnfinishedDirectories(root)
        self._clones = True
        """Whether the file system clones files; True until it refused."""

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Keep every other process out."""
        return self._root.locked()

    async def is_there(self, at: str) -> bool:
        """Whether the directory or the lone file `at` exists. So does a symbolic link of that name, wherever it leads: a
        user may have moved the directory and left a link to it.
        """
        async with self._root.guard("looking at", at, reads=True):
            return await self._status(self._path(at)) is not None

    # --- directories ------------------------------------------------------------------------------------------

    async def publish(
        self, name: str, folder: str, files: Mapping[str, str], filled: Mapping[str, str], latest: str | None
    ) -> None:
        """Make the directory `folder` anew by one rename (PLAINDIR-1), with `files` (path to key of the object), with the
        files `filled` (path to where it lies), and with a file `latest` if given.

        It is made under the hidden name `name`, which nothing has yet. If there was such a directory, it is hidden now. `empty`
        has to follow.
        """
        built, target = self.unfinished.path(name, folder), self._path(folder)
        async with self._root.guard("showing", folder):
            there = await self._there(target)
            await self._build(built, files, filled, latest)
            await self._root.directories.sync_names(built)
            if there is not None and not await self._disk.exchange(built, target):
                await self._move_away(target, self.unfinished.path(f"{ASIDE}{name}", folder))
                there = None
            if there is None:
                await self._disk.rename(built, target)
            # The source first: if the old directory came back there, both names would lead to it.
            await self._disk.sync_directory(os.path.dirname(built))
            await self._sync_above(target)

    async def withdraw(self, name: str, folder: str) -> None:
        """Hide the directory `folder` under `name`, by one rename. `empty` has to follow. Does nothing if `folder` is a
        symbolic link, which leads to files that do not belong to checkpointd.
        """
        target = self._path(folder)
        async with self._root.guard("hiding", folder):
            status = await self._status(target)
            if status is not None and not status.is_link:
                await self._move_away(target, self.unfinished.path(name, folder))

    async def empty(self, name: str, folder: str, is_ours: Callable[[str, FileStatus], bool]) -> None:
        """Move everything that is not ours from the directory hidden under `name` back to `folder`, and remove the rest.

        `is_ours` says so of a file, by its path. If the name of one that goes back is taken, it gets a new one beside it.
        """
        target, aside = self._path(folder), self.unfinished.path(f"{ASIDE}{name}", folder)
        async with self._root.guard("emptying", folder):
            if await self._status(aside) is not None and await self._status(target) is None:
                await self._move(aside, target)  # a crash came between two renames
            for hidden in (name, f"{ASIDE}{name}"):
                found = await self.unfinished.files(hidden, folder)
                ours = {path for path, status in found.items() if is_ours(path, status)}
                await self._move_out(self.unfinished.path(hidden, folder), target, "", ours)
                await self.unfinished.discard(hidden)

    async def _build(self, built: str, files: Mapping[str, str], filled: Mapping[str, str], latest: str | None) -> None:
        names = {*files, *filled} | ({LATEST} if latest is not None else set())
        for directory in by_directory(names) or [""]:
            place = f"{built}/{directory}".rstrip("/")
            await self._root.directories.within(place, lambda made=place: self._disk.make_directory(made))  # type: ignore[misc]
        for path, source in filled.items():
            if path not in files and (latest is None or path != LATEST):
                await self._disk.link(source, f"{built}/{path}")
        for path, key in files.items():
            await self._give(key, f"{built}/{path}")
        if latest is not None:
            async with self._root.temporary(latest.encode()) as temporary:
                await self._disk.rename(temporary, f"{built}/{LATEST}")
        await self.unfinished.sync(built, files=False)

    async def _move_out(self, source: str, target: str, below: str, ours: Collection[str]) -> None:
        """Move what is in the directory `source` to `target`, except `ours`: paths, of which those here begin with `below`."""
        moving = []
        for child in await self._root.children(source, links=True):
            path, old, new = f"{below}{child.name}", f"{source}/{child.name}", f"{target}/{child.name}"
            if child.is_directory and (await self._is_directory(new) or any(one.startswith(f"{path}/") for one in ours)):
                await self._move_out(old, new, f"{path}/", ours)
            elif path not in ours:
                moving.append((old, new))
        if moving:
            await self._make(target)
            for old, new in moving:
                await self._disk.rename(old, await self._free(new))
            await self._disk.sync_directory(source)  # first: what came back there would have two names
            await self._disk.sync_directory(target)

    async def _free(self, path: str) -> str:
        """`path`, or a name beside it that nothing has."""
        if await self._status(path) is None:
            return path
        for number in itertools.count(1):
            if await self._status(f"{path}.{number}") is None:
                log.warning("%s was replaced, and its name was taken again meanwhile: the old one is %s.%d", path, path, number)
                return f"{path}.{number}"
        raise AssertionError("unreachable")

    async def _make(self, directory: str) -> None:
        """Make a directory, durably, if there is none."""
        if await self._status(directory) is None:
            await self._make(os.path.dirname(directory))
            await self._disk.make_directory(directory)
            await self._disk.sync_directory(os.path.dirname(directory))

    async def _move_away(self, target: str, hidden: str) -> None:
        with suppress(FileExistsError):
            place = os.path.dirname(hidden)
            await self._root.directories.within(place, lambda: self._disk.make_directory(place))
        await self._root.directories.sync_names(hidden)
        await self._move(target, hidden)

    async def _move(self, source: str, target: str) -> None:
        await self._disk.rename(source, target)
        await self._disk.sync_directory(os.path.dirname(source))
        await self._disk.sync_directory(os.path.dirname(target))

    async def _give(self, key: str, shown: str) -> None:
        """Make the new file `shown` with the content of an object; writing to it does not change the object (PLAINDIR-4)."""
        stored = f"{self._root.path}/{key}"
        if self._clones:
            self._clones = await self._disk.clone(stored, shown)
            if self._clones:
                await self._disk.sync_file(shown)
                return
        with suppress(PermissionError):  # the file of another user, and only that user's programs could write to it
            await self._disk.protect(stored)
        await self._disk.link(stored, shown)

    async def _sync_above(self, target: str) -> None:
        directory = os.path.dirname(target)
        while len(directory) >= len(self._beside):
            with suppress(FileNotFoundError):  # somebody has just removed the folder, with all that was shown in it
                await self._disk.sync_directory(directory)
            directory = os.path.dirname(directory)

    # --- lone files -------------------------------------------------------------------------------------------

    async def show_lone(self, at: str, key: str) -> None:
        """Show the object `key` as the file `at`, in place of a file or link of that name. StoreError if it is a directory."""
        target, temporary = self._path(at), self._root.temporary_path()
        async with self._root.guard("showing", at):
            try:
                await self._root.directories.within(temporary, lambda: self._give(key, temporary))
                await self._root.directories.within(target, lambda: self._disk.rename(temporary, target))
                await self._sync_above(target)
            finally:
                with suppress(FileNotFoundError):  # it stays if the name is that of the same object already
                    await self._disk.unlink(temporary)

    async def hide_lone(self, at: str) -> None:
        """Remove the lone file `at`; a link stays. StoreError if it is a directory, which is somebody else's."""
        target = self._path(at)
        async with self._root.guard("hiding", at):
            with suppress(FileNotFoundError, NotADirectoryError, LinkMet):
                await self._disk.size(target)
                await self._disk.unlink(target)
            await self._sync_above(target)

    # --- comparisons ------------------------------------------------------------------------------------------

    async def changed(self, at: str, files: Mapping[str, str]) -> dict[str, str]:
        """The `files` (name to key) that are not in `at` as they were shown, each with "gone" or "changed"."""
        found = {}
        async with self._root.guard("comparing", at):
            for name, key in files.items():
                try:
                    shown = at if is_lone(at, files) else f"{at}/{name}"
                    same = await self._same(self._path(shown), f"{self._root.path}/{key}")
                except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    found[name] = "gone"
                else:
                    if not same:
                        found[name] = "changed"
        return found

    async def written_after(self, folder: str, names: Iterable[str], key: str) -> list[str]:
        """Which of the files `names` in `folder` were written after the object `key`."""
        async with self._root.guard("comparing", folder, reads=True):
            since = await self._status(f"{self._root.path}/{key}")
            found = {name: await self._status(f"{self._path(folder)}/{name}") for name in names}
        return [
            name for name, one in found.items() if since is not None and one is not None and one.changed_ns > since.changed_ns
        ]

    async def _same(self, shown: str, stored: str) -> bool:
        """Whether the file `shown` has the content of the object `stored`; FileNotFoundError if it does not exist."""
        one, other = await self._disk.status(shown), await self._disk.status(stored)
        # A clone has the object's time of change, so only files that somebody has touched need to be read.
        if one.number == other.number or (one.size, one.changed_ns) == (other.size, other.changed_ns):
            return True
        if one.size != other.size:
            return False
        parts = bytearray(_COMPARED_BYTES), bytearray(_COMPARED_BYTES)
        for offset in range(0, one.size, _COMPARED_BYTES):
            views = [memoryview(part)[: min(_COMPARED_BYTES, one.size - offset)] for part in parts]
            counts = [await self._disk.read_at(path, offset, view) for path, view in zip((shown, stored), views, strict=True)]
            if counts[0] != counts[1] or views[0] != views[1]:
                return False
        return True

    # --- latest -----------------------------------------------------------------------------------------------

    async def pointed(self, folder: str) -> str | None:
        """The content of the file `latest` in the directory `folder` ("": the root's directory); None if there is none."""
        async with self._root.guard("reading", LATEST, reads=True):
            try:
                data = await self._disk.read(f"{self._path(folder)}/{LATEST}", _LATEST_BYTES_MAX)
            except FileNotFoundError:
                return None
        return data.decode(errors="replace").strip()

    async def point(self, folder: str, text: str | None) -> None:
        """Write `text` to the file `latest` in `folder`; None removes the file."""
        target = f"{self._path(folder)}/{LATEST}"
        async with self._root.guard("replacing", LATEST):
            status = await self._status(target)
            if status is not None and status.is_link:
                raise LinkMet(target)
            if text is None:
                with suppress(FileNotFoundError):
                    await self._disk.unlink(target)
            else:
                async with self._root.temporary(text.encode()) as temporary:
                    await self._disk.rename(temporary, target)
            await self._disk.sync_directory(os.path.dirname(target))

    # ----------------------------------------------------------------------------------------------------------

    def _path(self, at: str) -> str:
        return f"{self._beside}/{at}".rstrip("/")

    async def _there(self, target: str) -> list[Child] | None:
        """The names in the directory; None if it does not exist. StoreError if a file or a link has its name."""
        try:
            return await self._disk.children(target, links=True)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise StoreError(f"{target} is a file: move it away, so that a checkpoint can be shown there") from error

    async def _is_directory(self, path: str) -> bool:
        try:
            await self._disk.children(path, links=True, sizes=False)
        except (FileNotFoundError, NotADirectoryError, LinkMet):
            return False
        return True

    async def _status(self, path: str) -> FileStatus | None:
        try:
            return await self._disk.status(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
