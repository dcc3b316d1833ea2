"""Objects shown as plain files beside a POSIX store, for tools that know nothing of it.

A store whose root is a directory named `.checkpointd` can show objects in directories beside it: `<root>/../<name>/<file>` is
then a second name of an object, so that it costs no space, and stays when the object goes.

Invariants
  W1  A directory beside the root is whole at every moment, also after a power cut: what was shown there before, what is shown
      now, or nothing where nothing was. It is built elsewhere and put there by one rename. (A file system that cannot exchange
      two names, as NFS cannot, shows nothing there for a moment.)
  W2  What else lies in a directory that is replaced (files and directories that were not shown) stays in it.
  W3  When a call returns, what it did is durable.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial

from checkpointd.errors import StoreError
from checkpointd.store.disk import Child
from checkpointd.store.names import SERVICE, TEMPORARY
from checkpointd.store.rooted import Root

_LATEST_BYTES_MAX = 4096


def can_show(root: str) -> bool:
    """Whether a store at `root` shows objects beside itself."""
    return os.path.basename(root) == SERVICE


class PlainFiles:
    """The directories beside the root, by their paths relative to the one in which it lies.

    Whoever shows or hides holds `alone` for it.
    """

    def __init__(self, root: Root) -> None:
        self._root, self._disk = root, root.disk
        self._beside = os.path.dirname(root.path)
        self._count = itertools.count()

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Keep every other process out."""
        return self._root.locked()

    async def is_there(self, at: str) -> bool:
        """Whether there is such a directory."""
        async with self._root.guard("looking at", at):
            return await self._there(f"{self._beside}/{at}") is not None

    async def show(self, at: str, files: Mapping[str, str], stale: Callable[[str], bool]) -> None:
        """Let the directory `at` hold `files` (by name, the keys of the objects) instead of what was shown there before.

        Files whose names are `stale` go, whoever put them there: left-overs of a larger job are none of the new checkpoint's.
        """
        target = f"{self._beside}/{at}"
        async with self._root.guard("showing", at):
            there = await self._there(target)
            others = [c for c in there or () if c.name not in files and (c.is_directory or not stale(c.name))]
            links = {file: f"{self._root.path}/{key}" for file, key in files.items()}
            links.update((child.name, f"{target}/{child.name}") for child in others if not child.is_directory)
            async with self._building(links) as built:
                if there is None and await self._put(built, target):
                    return
                await self._disk.exchange(built, target)
            await self._sync_both(target)
            known = {*files, *(child.name for child in there or ())}
            await self._bring_back(built, target, lambda name: name not in known and not stale(name))
            await self._remove(built)

    @asynccontextmanager
    async def _building(self, links: Mapping[str, str]) -> AsyncIterator[str]:
        """A new directory that holds `links` (by name, the paths), durably, for a body that gives it away or fails."""
        built = await self._make_directory()
        try:
            for name, path in links.items():
                await self._disk.link(path, f"{built}/{name}")
            await self._disk.sync_directory(built)
            yield built
        except BaseException:
            await self._remove(built)
            raise

    async def _put(self, built: str, target: str) -> bool:
        """Give the directory its name; False where somebody else has just made one."""
        try:
            await self._root.directories.within(target, lambda: self._disk.rename(built, target))
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                return False
            raise
        await self._sync_both(target)
        return True

    async def hide(self, at: str, files: Collection[str]) -> None:
        """Let nothing of `files` be in the directory `at`, which goes where nothing else is in it."""
        target = f"{self._beside}/{at}"
        async with self._root.guard("hiding", at):
            there = await self._there(target)
            if there is None:
                return
            others = [child for child in there if child.name not in files]
            async with self._building({c.name: f"{target}/{c.name}" for c in others if not c.is_directory}) as built:
                if others:
                    await self._disk.exchange(built, target)
                else:
                    await self._disk.remove_directory(built)
                    await self._disk.rename(target, built)
            await self._sync_both(target)
            known = {*files, *(child.name for child in there)}
            await self._bring_back(built, target, lambda name: name not in known)
            await self._remove(built)

    async def pointed(self, folder: str) -> str | None:
        """What the file `latest` in the directory `folder` names; None where there is none."""
        async with self._root.guard("reading", "latest"):
            try:
                data = await self._disk.read(os.path.join(self._beside, folder, "latest"), _LATEST_BYTES_MAX)
            except FileNotFoundError:
                return None
        return data.decode(errors="replace").strip()

    async def point(self, folder: str, text: str | None) -> None:
        """Let the file `latest` in the directory `folder` ("": that of the root) hold `text`, or not be there."""
        target = os.path.join(self._beside, folder, "latest")
        async with self._root.guard("replacing", "latest"):
            if text is None:
                with suppress(FileNotFoundError):
                    await self._disk.unlink(target)
            else:
                async with self._root.temporary(text.encode()) as temporary:
                    await self._disk.rename(temporary, target)
            await self._disk.sync_directory(os.path.dirname(target))

    async def _there(self, target: str) -> list[Child] | None:
        """What is in the directory; None where there is none. StoreError where something else has its name."""
        try:
            return await self._disk.children(target)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise StoreError(f"{target} is a file: move it away, so that a checkpoint can be shown there") from error

    async def _make_directory(self) -> str:
        built = f"{self._root.path}/{TEMPORARY}/{self._root.writer}.shown{next(self._count)}"
        await self._root.directories.within(built, lambda: self._disk.make_directory(built))
        return built

    async def _bring_back(self, source: str, target: str, is_late: Callable[[str], bool]) -> None:
        """Let directories, and files that somebody has put there meanwhile, go where they were (W2)."""
        back = [child for child in await self._disk.children(source) if child.is_directory or is_late(child.name)]
        for child in back:
            await self._root.directories.within(f"{target}/{child.name}", partial(self._rename_in, source, target, child.name))
        if back:
            await self._disk.sync_directory(target)

    async def _rename_in(self, source: str, target: str, name: str) -> None:
        await self._disk.rename(f"{source}/{name}", f"{target}/{name}")

    async def _sync_both(self, target: str) -> None:
        """The names of `target` and of all directories above it that are not the root's."""
        directory = os.path.dirname(target)
        while len(directory) >= len(self._beside):
            await self._disk.sync_directory(directory)
            directory = os.path.dirname(directory)
        await self._disk.sync_directory(f"{self._root.path}/{TEMPORARY}")

    async def _remove(self, built: str) -> None:
        """Remove what is no longer shown. What cannot be removed goes with the next sweep."""
        with suppress(OSError):
            for child in await self._disk.children(built):
                await self._disk.unlink(f"{built}/{child.name}")
            await self._disk.remove_directory(built)
