"""Unfinished directories: other programs fill them beside a save, and they get their names when the save commits.

The later directory `runs/checkpoint-8` beside the root is filled at `<root>/.checkpointd/unfinished/<name>/checkpoint-8`. The
files that Hugging Face's Trainer writes to `checkpoint-8` belong to the checkpoint like the engine's files. A user who finds a
directory of that name must be able to load it, so it gets the name only when it is whole.

Invariants
  UNFINISHED-1  An unfinished directory lies inside the root; `PlainFiles.reveal` moves it out by a rename.
  UNFINISHED-2  Its files are durable before the rank votes yes. If a crash interrupts a merge into a directory that exists
      already, the merge can be done again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Collection
from contextlib import suppress

from checkpointd.store.names import UNFINISHED, is_text
from checkpointd.store.posix.disk import FileStatus
from checkpointd.store.posix.rooted import Root

GOING = "going-"
"""Names that begin so are being removed; the next start removes the rest."""


class UnfinishedDirectories:
    """The unfinished directories of one root, each with a name."""

    def __init__(self, root: Root) -> None:
        self._root, self._disk = root, root.disk
        self._folder = f"{root.path}/{UNFINISHED}"

    def path(self, name: str, folder: str) -> str:
        """Where the directory `folder` is filled; `folder` is relative to the directory in which the root lies."""
        return f"{self._folder}/{name}/{os.path.basename(folder)}"

    async def names(self) -> list[str]:
        """The names of all unfinished directories, in use or left behind."""
        async with self._root.guard("listing", UNFINISHED, reads=True):
            return sorted(child.name for child in await self._root.children(self._folder) if child.is_directory)

    async def is_there(self, name: str, folder: str) -> bool:
        """Whether `folder` was filled as `name` and has not been revealed yet."""
        async with self._root.guard("looking at", f"{UNFINISHED}/{name}", reads=True):
            found = await self._root.children(f"{self._folder}/{name}") if name in await self.names() else []
            return any(child.is_directory and child.name == os.path.basename(folder) for child in found)

    async def files(self, name: str, folder: str) -> dict[str, FileStatus]:
        """The files filled for `folder`, by their relative paths. Leaves out names that UTF-8 cannot encode."""
        place = self.path(name, folder)
        async with self._root.guard("listing", f"{UNFINISHED}/{name}", reads=True):
            paths = [path async for path in self._files(place, "") if is_text(path)]
            return {path: await self._disk.status(f"{place}/{path}") for path in paths}

    async def _files(self, directory: str, prefix: str) -> AsyncIterator[str]:
        for child in await self._root.children(f"{directory}/{prefix}".rstrip("/"), links=True):
            if not child.is_directory:
                yield f"{prefix}{child.name}"
                continue
            async for path in self._files(directory, f"{prefix}{child.name}/"):
                yield path

    async def discard(self, name: str) -> None:
        """Remove all that was filled as `name`, unless that is a link: it leads to files that do not belong to checkpointd."""
        if name in await self.names():
            async with self._root.guard("removing", f"{UNFINISHED}/{name}"):
                await self.remove(f"{self._folder}/{name}")

    async def settle(self, name: str) -> None:
        """Make all files durable that were filled as `name` (UNFINISHED-2)."""
        async with self._root.guard("making durable", f"{UNFINISHED}/{name}"):
            await self.sync(f"{self._folder}/{name}")
            await self._root.directories.sync_names(f"{self._folder}/{name}")

    async def merge(self, source: str, target: str, leave: Collection[str] = ()) -> None:
        """Move everything in `source` to `target`, durably, except the names `leave` (UNFINISHED-2)."""
        taken = {child.name for child in await self._disk.children(target) if child.is_directory}
        for child in await self._disk.children(source, links=True):
            if child.name in leave:
                continue
            if child.is_directory and child.name in taken:
                await self.merge(f"{source}/{child.name}", f"{target}/{child.name}")
            else:
                await self._disk.rename(f"{source}/{child.name}", f"{target}/{child.name}")
        await self._disk.sync_directory(source)
        await self._disk.sync_directory(target)

    async def sync(self, directory: str) -> None:
        """Make a directory durable with all that is in it; its writer may not have done so."""
        for child in await self._disk.children(directory):
            path = f"{directory}/{child.name}"
            await (self.sync(path) if child.is_directory else self._disk.sync_file(path))
        await self._disk.sync_directory(directory)

    async def remove(self, directory: str) -> None:
        """Remove a directory with all that is in it, if it exists. Follows no links."""
        for child in await self._root.children(directory, links=True):
            path = f"{directory}/{child.name}"
            if child.is_directory:
                await self.remove(path)
            else:
                with suppress(FileNotFoundError):  # another process removes it, too
                    await self._disk.unlink(path)
        try:
            await self._disk.remove_directory(directory)
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                raise
