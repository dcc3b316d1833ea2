"""Shows objects as plain files beside a POSIX store, for other tools.

A store whose root is a directory named `.checkpointd` can show objects in directories beside it: `<root>/../<name>/<file>` has
the content of an object and takes no space of its own, and it stays when the object goes. It is a clone of the object where the
file system can share blocks between files (Btrfs, XFS); elsewhere it is a second name of the object, which is made read-only.

Invariants
  PLAINDIR-1  A directory beside the root is whole at every moment, also after a power cut: what was shown there before, what is
      shown now, or nothing where nothing was. It is built elsewhere and put there by one rename. (A file system that cannot
      exchange two names, as NFS cannot, shows nothing there for a moment.)
  PLAINDIR-2  What else lies in a directory that is replaced (files, directories and symbolic links that were not shown) stays
      in it. What a crash has left outside it is back there after the next `finish`, which every showing, every start and every
      sweep begins with. What cannot be brought back waits for a later one, and keeps nothing else from being shown.
  PLAINDIR-3  When a call returns, what it did is durable.
  PLAINDIR-4  Writing to what is shown, as any program does that opens a file of that name, changes no object. (The superuser
      may write to read-only files: `verify` finds that.)
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import msgspec

from checkpointd.errors import StoreError
from checkpointd.store.names import SERVICE, TEMPORARY
from checkpointd.store.posix.anchor import LinkMet
from checkpointd.store.posix.disk import Child
from checkpointd.store.posix.rooted import Root
from checkpointd.store.posix.unfinished import UnfinishedDirectories

log = logging.getLogger("checkpointd")

_LATEST_BYTES_MAX = 4096
_JOURNAL_BYTES_MAX = 64 * 1024 * 1024
_COMPARED_BYTES = 4 * 1024 * 1024

_LATEST = "latest"
_JOURNAL, _BUILT = "journal", "built"
_ASIDE = "aside"
"""Where the old directory goes on a file system that cannot exchange two names."""


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """What is about to be exchanged, durable before it is: the directory `at`, relative to the one in which the root lies.

    `ours`: the names of files that are shown or were. `linked`: those of the user's files that were given a second name in the
    new directory, with their inode numbers.
    """

    at: str
    ours: tuple[str, ...]
    linked: dict[str, int]


def can_show(root: str) -> bool:
    """Whether a store at `root` shows objects beside itself."""
    return os.path.basename(root) == SERVICE


class PlainFiles:
    """The directories beside the root, by their paths relative to the one in which it lies.

    Whoever shows, hides or finishes holds `alone` for it.
    """

    def __init__(self, root: Root) -> None:
        self._root, self._disk = root, root.disk
        self._beside = os.path.dirname(root.path)
        self._temporary = f"{root.path}/{TEMPORARY}"
        self._count = itertools.count()
        self.unfinished = UnfinishedDirectories(root)
        self._clones = True
        """Whether the file system clones files, as far as was tried."""

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Keep every other process out."""
        return self._root.locked()

    async def is_there(self, at: str) -> bool:
        """Whether there is such a directory."""
        async with self._root.guard("looking at", at, reads=True):
            return await self._there(f"{self._beside}/{at}") is not None

    async def show(self, at: str, files: Mapping[str, str], leftover: Callable[[str], bool]) -> None:
        """Let the directory `at` hold `files` (by name, the keys of the objects) instead of what was shown there before.

        Files whose names are `leftover` go, whoever put them there: leftovers of a larger job are none of the new
        checkpoint's.
        """
        target = f"{self._beside}/{at}"
        await self.finish()
        async with self._root.guard("showing", at):
            if await self._is_link(target):
                raise LinkMet(target)
            there = await self._there(target)
            others = [c for c in there or () if not c.is_directory and c.name not in files and not leftover(c.name)]
            ours = {*files, *(c.name for c in there or () if not c.is_directory)}.difference(c.name for c in others)
            async with self._building(at, ours, others) as place:
                for name, key in files.items():
                    await self._give(f"{self._root.path}/{key}", f"{place}/{_BUILT}/{name}")
                await self._ready(place)
                if there is not None or not await self._put(place, target):
                    await self._exchange(place, target)
                await self._settle(place, leftover)

    async def reveal(
        self, name: str, at: str, files: Mapping[str, str], latest: str | None, leftover: Callable[[str], bool]
    ) -> bool:
        """Let the directory above `at` appear, whole, by one rename (PLAINDIR-1): with what was filled as `name` in it, with
        `files` in `at`, and with a file `latest`, if that is given. Where there is such a directory already, what was filled
        goes into it first, file by file, each in the place of what had its name; then this is False, and `latest` is left to
        the caller.
        """
        folder, shown = os.path.split(at)
        filled, target = self.unfinished.path(name, folder), f"{self._beside}/{folder}"
        await self.finish()
        async with self._root.guard("showing", folder):
            if await self._there(target) is not None:
                await self.unfinished.merge(filled, target, leave={shown, _LATEST})
            else:
                await self.unfinished.remove(f"{filled}/{shown}")  # an earlier try's
                await self._disk.make_directory(f"{filled}/{shown}")
                for file, key in files.items():
                    await self._give(f"{self._root.path}/{key}", f"{filled}/{shown}/{file}")
                if latest is not None:
                    async with self._root.temporary(latest.encode()) as temporary:
                        await self._disk.rename(temporary, f"{filled}/{_LATEST}")
                await self.unfinished.sync(filled)
                await self._disk.rename(filled, target)
                # The name that it had first: it must not come back beside the new one, and be removed with what it holds.
                await self._disk.sync_directory(os.path.dirname(filled))
                await self._sync_above(target)
                return True
        await self.show(at, files, leftover)
        return False

    async def hide(self, at: str, files: Collection[str]) -> None:
        """Let nothing of `files` be in the directory `at`, which goes where nothing else is in it. Nothing where `at` is a
        symbolic link: it leads into somebody else's house.
        """
        target = f"{self._beside}/{at}"
        await self.finish()
        async with self._root.guard("hiding", at):
            there = None if await self._is_link(target) else await self._there(target)
            if there is None:
                return
            others = [child for child in there if child.name not in files]
            if there and len(others) == len(there):
                return
            async with self._building(at, files, others) as place:
                await self._ready(place)
                if others:
                    await self._exchange(place, target)
                else:
                    await self._disk.remove_directory(f"{place}/{_BUILT}")
                    await self._disk.rename(target, f"{place}/{_BUILT}")
                await self._settle(place)

    async def finish(self) -> int:
        """Finish what showings that were cut off have left: the user's files and directories go back to where they were
        (PLAINDIR-2), the rest goes. How many were finished. One that cannot be finished now stays, and the log says so:
        `unsettled`.

        Nobody shows anything meanwhile, as the caller is `alone`: whatever is found was left by a crash or a failure.
        """
        finished = 0
        async with self._root.guard("finishing", TEMPORARY):
            for place in await self._places():
                try:
                    finished += await self._settle(place)
                except (OSError, StoreError) as error:
                    log.error("what showing files has left in %s stays there until it can be put back: %s", place, error)
        return finished

    async def unsettled(self) -> set[str]:
        """The directories of which `finish` had to leave something: where one is missing, nobody need have removed it."""
        async with self._root.guard("listing", TEMPORARY, reads=True):
            journals = [await self._journal(place) for place in await self._places()]
        return {journal.at for journal in journals if journal is not None}

    async def _places(self) -> list[str]:
        return [f"{self._temporary}/{child.name}" for child in await self._root.children(self._temporary) if child.is_directory]

    async def changed(self, at: str, files: Mapping[str, str]) -> dict[str, str]:
        """Those of `files` (by name, the objects' keys) that `at` does not hold as they were shown: "gone" or "changed"."""
        found = {}
        async with self._root.guard("comparing", at):
            for name, key in files.items():
                try:
                    same = await self._same(f"{self._beside}/{at}/{name}", f"{self._root.path}/{key}")
                except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    found[name] = "gone"
                else:
                    if not same:
                        found[name] = "changed"
        return found

    async def unchanged(self, folder: str, noted: Mapping[str, tuple[int, int]]) -> set[str]:
        """Those of `noted` (by path: bytes, and time of change in ns) that are in the directory `folder` as they were noted.
        None to which a symbolic link in it leads.
        """
        place, found = f"{self._beside}/{folder}", set()
        async with self._root.guard("comparing", folder, reads=True):
            for path, known in noted.items():
                with suppress(FileNotFoundError, NotADirectoryError, LinkMet):
                    status = await self._disk.status(f"{place}/{path}")
                    if (status.size, status.changed_ns) == known:
                        found.add(path)
        return found

    async def pointed(self, folder: str) -> str | None:
        """What the file `latest` in the directory `folder` names; None where there is none."""
        async with self._root.guard("reading", "latest", reads=True):
            try:
                data = await self._disk.read(os.path.join(self._beside, folder, "latest"), _LATEST_BYTES_MAX)
            except FileNotFoundError:
                return None
        return data.decode(errors="replace").strip()

    async def pointed_after(self, folder: str, key: str, *others: str) -> bool:
        """Whether the file `latest` in the directory `folder` was written after the object `key`, and after those of `others`
        that are there.
        """
        async with self._root.guard("comparing", "latest", reads=True):
            try:
                latest = await self._disk.status(os.path.join(self._beside, folder, "latest"))
                changed = [(await self._disk.status(f"{self._root.path}/{key}")).changed_ns]
            except FileNotFoundError:
                return False
            for other in others:
                with suppress(FileNotFoundError, NotADirectoryError):
                    changed.append((await self._disk.status(f"{self._root.path}/{other}")).changed_ns)
        return latest.changed_ns > max(changed)

    async def point(self, folder: str, text: str | None) -> None:
        """Let the file `latest` in the directory `folder` ("": that of the root) hold `text`, or not be there."""
        target = os.path.join(self._beside, folder, "latest")
        async with self._root.guard("replacing", "latest"):
            if await self._is_link(target):
                raise LinkMet(target)
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
            return await self._disk.children(target, links=True)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise StoreError(f"{target} is a file: move it away, so that a checkpoint can be shown there") from error

    async def _same(self, shown: str, stored: str) -> bool:
        """Whether the file `shown` has the content of the object `stored`; FileNotFoundError where it is not there."""
        one, other = await self._disk.status(shown), await self._disk.status(stored)
        # A clone is given the object's time of change, so that content need be read only of what somebody has touched.
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

    # --- building and exchanging -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _building(self, at: str, ours: Collection[str], others: Collection[Child]) -> AsyncIterator[str]:
        """A place with a journal and a new directory `built`, which has the user's files of `others` in the directory `at`.
        Their directories cannot have a second name, nor symbolic links everywhere: they come when the two have changed places.

        Whatever becomes of the body: what the journal says is finished then, or by the next `finish`.
        """
        place = f"{self._temporary}/{self._root.writer}.shown{next(self._count)}"
        built = f"{place}/{_BUILT}"
        try:
            await self._root.directories.within(built, lambda: self._disk.make_directory(built))
            linked = {}
            for name in (child.name for child in others if not child.is_directory and not child.is_link):
                with suppress(FileNotFoundError):  # the user has just removed it
                    await self._disk.link(f"{self._beside}/{at}/{name}", f"{built}/{name}")
                    linked[name] = (await self._disk.status(f"{built}/{name}")).number
            journal = msgspec.json.encode(Journal(at=at, ours=tuple(sorted(ours)), linked=linked))
            file = await self._disk.create(f"{place}/{_JOURNAL}")
            try:
                await file.write_at(0, journal)
                await file.sync()
            finally:
                await file.close()
            yield place
        except BaseException:
            with suppress(OSError):
                await self._settle(place)
            raise

    async def _give(self, stored: str, shown: str) -> None:
        """Let the new file `shown` have the content of an object, so that writing to it does not change the
        object (PLAINDIR-4).
        """
        if self._clones:
            self._clones = await self._disk.clone(stored, shown)
            if self._clones:
                await self._disk.sync_file(shown)
                return
        with suppress(PermissionError):  # it belongs to another user, whose programs alone could write to it
            await self._disk.protect(stored)
        await self._disk.link(stored, shown)

    async def _ready(self, place: str) -> None:
        """Make durable what the exchange rests on: the new directory, and the journal."""
        await self._disk.sync_directory(f"{place}/{_BUILT}")
        await self._disk.sync_directory(place)
        await self._root.directories.sync_names(place)

    async def _put(self, place: str, target: str) -> bool:
        """Give the directory its name; False where somebody else has just made one."""
        try:
            await self._root.directories.within(target, lambda: self._disk.rename(f"{place}/{_BUILT}", target))
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                return False
            raise
        return True

    async def _sync_above(self, target: str) -> None:
        directory = os.path.dirname(target)
        while len(directory) >= len(self._beside):
            await self._disk.sync_directory(directory)
            directory = os.path.dirname(directory)

    async def _exchange(self, place: str, target: str) -> None:
        """Let the new directory take the place of `target`, and that one the place of the new one, or `aside`."""
        if await self._disk.exchange(f"{place}/{_BUILT}", target):
            return
        await self._disk.rename(target, f"{place}/{_ASIDE}")
        # The name that it had first: a directory must not come back there once another one has taken it.
        await self._disk.sync_directory(os.path.dirname(target))
        await self._disk.sync_directory(place)
        await self._disk.rename(f"{place}/{_BUILT}", target)

    # --- what an exchange leaves -----------------------------------------------------------------------------

    async def _settle(self, place: str, leftover: Callable[[str], bool] = lambda _: False) -> bool:
        """Make the exchange durable, bring the user's things back from `place`, and remove it; False where some must stay."""
        journal, stays = await self._journal(place), False
        if journal is not None:
            await self._make_durable(place, f"{self._beside}/{journal.at}")
        for old in (f"{place}/{_ASIDE}", f"{place}/{_BUILT}"):
            stays |= not await self._emptied(old, journal, leftover)
        if not stays:
            with suppress(OSError):  # what cannot be removed now goes with the next `finish`
                with suppress(FileNotFoundError):
                    await self._disk.unlink(f"{place}/{_JOURNAL}")
                await self._disk.remove_directory(place)
        return not stays

    async def _journal(self, place: str) -> Journal | None:
        """None where there is none, or one that was cut off: then nothing has been exchanged yet."""
        try:
            return msgspec.json.decode(await self._disk.read(f"{place}/{_JOURNAL}", _JOURNAL_BYTES_MAX), type=Journal)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    async def _make_durable(self, place: str, target: str) -> None:
        """The names in `place` first: an exchange that only its target knew of could lose what is in `place`."""
        aside = f"{place}/{_ASIDE}"
        if await self._there(target) is None and await self._there(aside) is not None:
            await self._disk.rename(aside, target)  # cut off between two renames
        await self._disk.sync_directory(place)
        directory = os.path.dirname(target)
        while len(directory) >= len(self._beside):
            with suppress(FileNotFoundError):  # nothing is shown in a folder that somebody has removed
                await self._disk.sync_directory(directory)
            directory = os.path.dirname(directory)

    async def _emptied(self, old: str, journal: Journal | None, leftover: Callable[[str], bool]) -> bool:
        """Bring back what is the user's in the directory `old`, and remove the rest with it; False where some must stay."""
        children = await self._root.children(old, links=True)
        theirs = [c for c in children if journal is None and c.is_directory]
        if journal is not None:
            target = f"{self._beside}/{journal.at}"
            users = [child for child in children if await self._is_users(old, target, child, journal, leftover)]
            theirs = [c for c in users if not await self._brought_back(f"{old}/{c.name}", f"{target}/{c.name}", journal)]
            if len(users) > len(theirs):
                await self._disk.sync_directory(old)
                await self._disk.sync_directory(target)
                await self._disk.sync_directory(os.path.dirname(target))
            children = [child for child in children if child not in users]
        for child in children:
            if not child.is_directory:
                await self._disk.unlink(f"{old}/{child.name}")
        for child in theirs:
            log.error("%s/%s cannot go back to where it was, as that name is taken: move it where it belongs", old, child.name)
        if not theirs:
            with suppress(FileNotFoundError):
                await self._disk.remove_directory(old)
        return not theirs

    async def _is_users(self, old: str, target: str, child: Child, journal: Journal, leftover: Callable[[str], bool]) -> bool:
        """Whether `child` of the old directory is the user's, and is not in the new one."""
        if child.is_directory:
            return True
        linked = journal.linked.get(child.name)
        if linked is None:  # one that came after the directory had been looked at
            return child.name not in journal.ours and not leftover(child.name)
        # Replaced after it had been given its second name: the new directory has what it was before.
        return await self._number(f"{old}/{child.name}") != linked and await self._number(f"{target}/{child.name}") == linked

    async def _brought_back(self, path: str, target: str, journal: Journal) -> bool:
        """Let the user's file, link or directory have its old name `target` again; False where that is taken."""
        if os.path.basename(target) not in journal.linked and await self._number(target) is not None:
            return False
        await self._root.directories.within(target, lambda: self._disk.rename(path, target))
        return True

    async def _number(self, path: str) -> int | None:
        """The inode number; None where there is nothing."""
        try:
            return (await self._disk.status(path)).number
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def _is_link(self, path: str) -> bool:
        try:
            return (await self._disk.status(path)).is_link
        except (FileNotFoundError, NotADirectoryError):
            return False
