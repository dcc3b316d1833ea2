"""Hidden directories inside the root, which get their places beside it by one rename (`plain.py`).

The later directory `runs/checkpoint-8` beside the root is hidden at `<root>/.checkpointd/unfinished/<name>/checkpoint-8`.
Other programs fill some of them beside a save. This project makes the others, and moves old directories here.

Invariants
  UNFINISHED-1  What other programs have filled is durable before the rank votes yes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import suppress

from checkpointd.store.names import UNFINISHED, is_text
from checkpointd.store.posix.disk import FileStatus
from checkpointd.store.posix.rooted import Root

GOING = "going-"
"""Names that begin so are being removed; the next start removes the rest."""


class UnfinishedDirectories:
    """The hidden directories of one root, each with a name."""

    def __init__(self, root: Root) -> None:
        self._root, self._disk = root, root.disk
        self._folder = f"{root.path}/{UNFINISHED}"

    def path(self, name: str, folder: str) -> str:
        """Where the directory `folder` is hidden; `folder` is relative to the directory in which the root lies."""
        return f"{self._folder}/{name}/{os.path.basename(folder)}"

    async def names(self) -> list[str]:
        """The names of all hidden directories, in use or left behind."""
        async with self._root.guard("listing", UNFINISHED, reads=True):
            return sorted(child.name for child in await self._root.children(self._folder) if child.is_directory)

    async def files(self, name: str, folder: str) -> dict[str, FileStatus]:
        """The files and symbolic links of `folder`, as it is hidden under `name`, by their relative paths. Leaves out names
        that UTF-8 cannot encode.
        """
        place = self.path(name, folder)
        async with self._root.guard("listing", f"{UNFINISHED}/{name}", reads=True):
            if name not in await self.names():  # a link of that name leads elsewhere
                return {}
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
        """Remove all that is hidden under `name`, durably. A link of that name stays: it leads to somebody else's files."""
        if name in await self.names():
            async with self._root.guard("removing", f"{UNFINISHED}/{name}"):
                await self._remove(f"{self._folder}/{name}")
                await self._disk.sync_directory(self._folder)

    async def settle(self, name: str) -> None:
        """Make all files durable that were filled as `name` (UNFINISHED-1)."""
        async with self._root.guard("making durable", f"{UNFINISHED}/{name}"):
            await self.sync(f"{self._folder}/{name}")
            await self._root.directories.sync_names(f"{self._folder}/{name}")

    async def sync(self, directory: str, *, files: bool = True) -> None:
        """Make a directory durable with the names in it and below, and the content of its `files`."""
        for child in await self._disk.children(directory):
            path = f"{directory}/{child.name}"
            if child.is_directory:
                await self.sync(path, files=files)
            elif files:
                await self._disk.sync_file(path)
        await self._disk.sync_directory(directory)

    async def _remove(self, directory: str) -> None:
        for child in await self._root.children(directory, links=True):
            path = f"{directory}/{child.name}"
            if child.is_directory:
                await self._remove(path)
            else:
                with suppress(FileNotFoundError):  # another process removes it, too
                    await self._disk.unlink(path)
        try:
            await self._disk.remove_directory(directory)
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                raise
