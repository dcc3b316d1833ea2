"""Shows objects as plain files beside a POSIX store, for other tools.

A store whose root is a directory named `.checkpointd` can show objects in directories beside it. A shown file
`<root>/../<name>/<file>` has the content of an object, takes no space of its own, and stays when the object is removed. If the
file system can share blocks between files (Btrfs, XFS), it is a clone of the object; otherwise it is a second name of the
object, which becomes read-only.

Invariants
  PLAINDIR-1  A directory beside the root is whole at every moment, also after a power cut: it has the old files, or the new
      files, or it does not exist yet. It is built elsewhere and moved there by one rename. (If the file system cannot exchange
      two names, as on NFS, the directory is missing for a moment.)
  PLAINDIR-2  The user's own files, directories and symbolic links in a directory stay in it when the directory is replaced.
      If a crash leaves some of them outside, the next `finish` brings them back; every showing, start and sweep calls it first.
      If one cannot be brought back, it waits for a later `finish`, and other directories can still be shown.
      A lone file replaces an older one of its name by one rename.
  PLAINDIR-3  When a call returns, its changes are durable.
  PLAINDIR-4  A program that writes to a shown file changes no object. (The superuser may write to read-only files; `verify`
      finds that.)
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
from checkpointd.layout.files import by_directory, is_lone, unfinished_folder
from checkpointd.store.names import SERVICE, TEMPORARY
from checkpointd.store.posix.anchor import LinkMet
from checkpointd.store.posix.disk import Child, FileStatus
from checkpointd.store.posix.rooted import Root
from checkpointd.store.posix.unfinished import UnfinishedDirectories

log = logging.getLogger("checkpointd")

_LATEST_BYTES_MAX = 4096
_JOURNAL_BYTES_MAX = 64 * 1024 * 1024
_COMPARED_BYTES = 4 * 1024 * 1024

_LATEST = "latest"
_JOURNAL, _BUILT = "journal", "built"
_ASIDE = "aside"
"""The old directory goes here if the file system cannot exchange two names."""


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Describes an exchange, and is durable before the exchange begins.

    `at`: the directory, relative to the one in which the root lies. `ours`: the names of files that are or were shown.
    `linked`: the user's files that got a second name in the new directory, with their inode numbers.
    """

    at: str
    ours: tuple[str, ...]
    linked: dict[str, int]


def can_show(root: str) -> bool:
    """Whether a store at `root` shows objects beside itself."""
    return os.path.basename(root) == SERVICE


class PlainFiles:
    """The directories beside the root, by their paths relative to the directory in which the root lies.

    A lone file (`is_lone`) lies beside the root itself, as `at`, and not in a directory `at`.
    Hold `alone` while you call `show`, `show_lone`, `reveal`, `hide` or `finish`.
    """

    def __init__(self, root: Root) -> None:
        self._root, self._disk = root, root.disk
        self._beside = os.path.dirname(root.path)
        self._temporary = f"{root.path}/{TEMPORARY}"
        self._count = itertools.count()
        self.unfinished = UnfinishedDirectories(root)
        self.unhidden: set[str] = set()
        """The directories that could not be hidden when it was tried last."""
        self._clones = True
        """Whether the file system clones files; True until it refused."""

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Keep every other process out."""
        return self._root.locked()

    async def is_there(self, at: str) -> bool:
        """Whether the directory or the lone file `at` exists. So does a symbolic link of that name, wherever it leads: a
        user may have moved the directory and left a link to it.
        """
        target = f"{self._beside}/{at}"
        async with self._root.guard("looking at", at, reads=True):
            try:
                await self._disk.children(target)
            except FileNotFoundError:
                return False
            except NotADirectoryError:
                return await self._status(target) is not None
            except LinkMet as met:
                if met.filename != target:
                    raise
        return True

    async def show(self, at: str, files: Mapping[str, str], leftover: Callable[[str], bool]) -> None:
        """Show `files` (name to key of the object) in the directory `at`, instead of the files that were shown there before.
        Directories within `at` are replaced one after the other, `at` itself first.

        Also removes files whose names are `leftover`, whoever wrote them: files of an earlier job with more ranks must not mix
        with the new checkpoint.
        """
        await self.finish()
        for directory, names in (by_directory(files) or {"": set[str]()}).items():
            own = {name: files[os.path.join(directory, name)] for name in names}
            await self._show(os.path.join(at, directory).rstrip("/"), own, leftover)

    async def _show(self, at: str, files: Mapping[str, str], leftover: Callable[[str], bool]) -> None:
        target = f"{self._beside}/{at}"
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

    async def show_lone(self, at: str, key: str) -> None:
        """Show the object `key` as the file `at`, in place of a file or link of that name. StoreError if it is a directory."""
        target, temporary = f"{self._beside}/{at}", self._root.temporary_path()
        async with self._root.guard("showing", at):
            try:
                await self._root.directories.within(temporary, lambda: self._give(f"{self._root.path}/{key}", temporary))
                await self._root.directories.within(target, lambda: self._disk.rename(temporary, target))
                await self._sync_above(target)
            finally:
                with suppress(FileNotFoundError):  # it stays if the name is that of the same object already
                    await self._disk.unlink(temporary)

    async def reveal(
        self, name: str, at: str, files: Mapping[str, str], latest: str | None, leftover: Callable[[str], bool]
    ) -> bool:
        """Make the directory that was filled as `name` appear by one rename (PLAINDIR-1), with `files` in `at`, which is that
        directory or one in it, and with a file `latest` if given.

        If the directory exists already, move the filled files into it one by one, replacing files of the same names, then show
        `files`. Returns False then, and the caller has to write `latest`.
        """
        folder = unfinished_folder(name, at)
        shown = at.removeprefix(folder).lstrip("/")
        filled, target = self.unfinished.path(name, folder), f"{self._beside}/{folder}"
        await self.finish()
        async with self._root.guard("showing", folder):
            if await self._there(target) is not None:
                await self.unfinished.merge(filled, target, leave={shown, _LATEST})
            else:
                if shown:
                    await self.unfinished.remove(f"{filled}/{shown}")  # of an earlier try
                await self._give_all(files, f"{filled}/{shown}".rstrip("/"))
                if latest is not None:
                    async with self._root.temporary(latest.encode()) as temporary:
                        await self._disk.rename(temporary, f"{filled}/{_LATEST}")
                await self.unfinished.sync(filled)
                await self._disk.rename(filled, target)
                # Sync the removal of the old name: if it came back beside the new one, a later removal would empty both.
                await self._disk.sync_directory(os.path.dirname(filled))
                await self._sync_above(target)
                return True
        await self.show(at, files, leftover)
        return False

    async def hide(self, at: str, files: Collection[str]) -> None:
        """Remove `files` from the directory `at`, and the directory itself if it is empty then; or the lone file `at`. Does
        nothing if `at` is a symbolic link, which leads to files that do not belong to checkpointd.
        """
        await self.finish()
        if is_lone(at, files):
            async with self._root.guard("hiding", at):
                await self._hide_lone(f"{self._beside}/{at}")
            return
        for directory, names in reversed((by_directory(files) or {"": set[str]()}).items()):
            await self._hide(os.path.join(at, directory).rstrip("/"), names)

    async def _hide(self, at: str, files: Collection[str]) -> None:
        target = f"{self._beside}/{at}"
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

    async def _hide_lone(self, target: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            if not await self._is_link(target):
                await self._disk.size(target)  # raises for a directory, which is somebody else's
                await self._disk.unlink(target)
        await self._sync_above(target)

    async def finish(self) -> int:
        """Finish showings that were interrupted: bring the user's files and directories back (PLAINDIR-2) and remove the rest.

        Returns how many were finished. A showing that cannot be finished now stays, with a line in the log; see `unsettled`.
        The caller is `alone`, so every showing found here was left by a crash or a failure.
        """
        finished = 0
        async with self._root.guard("finishing", TEMPORARY):
            for place in await self._places():
                try:
                    finished += await self._settle(place)
                except (OSError, StoreError) as error:
                    log.error("files that an interrupted showing left in %s stay there for now: %s", place, error)
        return finished

    async def unsettled(self) -> set[str]:
        """The directories that `finish` could not finish. If one is missing, an interrupted showing may be the reason."""
        async with self._root.guard("listing", TEMPORARY, reads=True):
            journals = [await self._journal(place) for place in await self._places()]
        return {journal.at for journal in journals if journal is not None}

    async def _places(self) -> list[str]:
        return [f"{self._temporary}/{child.name}" for child in await self._root.children(self._temporary) if child.is_directory]

    async def changed(self, at: str, files: Mapping[str, str]) -> dict[str, str]:
        """The `files` (name to key) that are not in `at` as they were shown, each with "gone" or "changed"."""
        found = {}
        async with self._root.guard("comparing", at):
            for name, key in files.items():
                try:
                    shown = at if is_lone(at, files) else f"{at}/{name}"
                    same = await self._same(f"{self._beside}/{shown}", f"{self._root.path}/{key}")
                except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    found[name] = "gone"
                else:
                    if not same:
                        found[name] = "changed"
        return found

    async def unchanged(self, folder: str, noted: Mapping[str, tuple[int, int]]) -> set[str]:
        """The paths of `noted` (path to bytes and time of change in ns) whose files in `folder` still have that size and time.
        Leaves out paths that lead through a symbolic link.
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
        """The content of the file `latest` in the directory `folder`; None if there is none."""
        async with self._root.guard("reading", "latest", reads=True):
            try:
                data = await self._disk.read(self._latest(folder), _LATEST_BYTES_MAX)
            except FileNotFoundError:
                return None
        return data.decode(errors="replace").strip()

    async def pointed_after(self, folder: str, key: str, *others: str) -> bool:
        """Whether the file `latest` in `folder` was written after the object `key`, and after those of `others` that exist."""
        async with self._root.guard("comparing", "latest", reads=True):
            try:
                latest = await self._disk.status(self._latest(folder))
                changed = [(await self._disk.status(f"{self._root.path}/{key}")).changed_ns]
            except FileNotFoundError:
                return False
            for other in others:
                with suppress(FileNotFoundError, NotADirectoryError):
                    changed.append((await self._disk.status(f"{self._root.path}/{other}")).changed_ns)
        return latest.changed_ns > max(changed)

    async def point(self, folder: str, text: str | None) -> None:
        """Write `text` to the file `latest` in `folder` ("": the root's directory); None removes the file."""
        target = self._latest(folder)
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

    def _latest(self, folder: str) -> str:
        return os.path.join(self._beside, folder, _LATEST)

    async def _there(self, target: str) -> list[Child] | None:
        """The names in the directory; None if it does not exist. StoreError if a file has its name."""
        try:
            return await self._disk.children(target, links=True)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise StoreError(f"{target} is a file: move it away, so that a checkpoint can be shown there") from error

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

    # --- building and exchanging -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _building(self, at: str, ours: Collection[str], others: Collection[Child]) -> AsyncIterator[str]:
        """A place with a journal and a new directory `built`, which has second names of the user's files (`others`) in `at`.

        Directories cannot have a second name, nor symbolic links everywhere; `_settle` moves them after the exchange. If the
        body fails, this call or the next `finish` finishes what the journal describes.
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

    async def _give_all(self, files: Mapping[str, str], directory: str) -> None:
        """`_give` each of `files` (name to key) in `directory`, in place of what an earlier try has left there."""
        for below, names in (by_directory(files) or {"": set[str]()}).items():
            place = f"{directory}/{below}".rstrip("/")
            with suppress(FileExistsError):
                await self._disk.make_directory(place)
            for name in names:
                with suppress(FileNotFoundError):
                    await self._disk.unlink(f"{place}/{name}")
                await self._give(f"{self._root.path}/{files[os.path.join(below, name)]}", f"{place}/{name}")

    async def _give(self, stored: str, shown: str) -> None:
        """Make the new file `shown` with the content of an object; writing to it does not change the object (PLAINDIR-4)."""
        if self._clones:
            self._clones = await self._disk.clone(stored, shown)
            if self._clones:
                await self._disk.sync_file(shown)
                return
        with suppress(PermissionError):  # the file of another user, and only that user's programs could write to it
            await self._disk.protect(stored)
        await self._disk.link(stored, shown)

    async def _ready(self, place: str) -> None:
        """Make the new directory and the journal durable before the exchange."""
        await self._disk.sync_directory(f"{place}/{_BUILT}")
        await self._disk.sync_directory(place)
        await self._root.directories.sync_names(place)

    async def _put(self, place: str, target: str) -> bool:
        """Give the directory its name; False if somebody else has just made one of that name."""
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
            with suppress(FileNotFoundError):  # somebody has just removed the folder, with all that was shown in it
                await self._disk.sync_directory(directory)
            directory = os.path.dirname(directory)

    async def _exchange(self, place: str, target: str) -> None:
        """Exchange the new directory and `target`. If the file system cannot, move `target` to `aside` first."""
        if await self._disk.exchange(f"{place}/{_BUILT}", target):
            return
        await self._disk.rename(target, f"{place}/{_ASIDE}")
        # Sync the old name first: the old directory must not come back there once the new one has taken its name.
        await self._disk.sync_directory(os.path.dirname(target))
        await self._disk.sync_directory(place)
        await self._disk.rename(f"{place}/{_BUILT}", target)

    # --- what an exchange leaves -----------------------------------------------------------------------------

    async def _settle(self, place: str, leftover: Callable[[str], bool] = lambda _: False) -> bool:
        """Make the exchange durable, bring the user's files back from `place` and remove it; False if some must stay."""
        journal, stays = await self._journal(place), False
        if journal is not None:
            await self._make_durable(place, f"{self._beside}/{journal.at}")
        for old in (f"{place}/{_ASIDE}", f"{place}/{_BUILT}"):
            stays |= not await self._emptied(old, journal, leftover)
        if not stays:
            with suppress(OSError):  # the next `finish` tries again
                with suppress(FileNotFoundError):
                    await self._disk.unlink(f"{place}/{_JOURNAL}")
                await self._disk.remove_directory(place)
        return not stays

    async def _journal(self, place: str) -> Journal | None:
        """The journal; None if it is missing or torn, because then nothing has been exchanged yet."""
        try:
            return msgspec.json.decode(await self._disk.read(f"{place}/{_JOURNAL}", _JOURNAL_BYTES_MAX), type=Journal)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    async def _make_durable(self, place: str, target: str) -> None:
        """Sync `place` before the target: if only the target's new names were durable, the files in `place` could be lost."""
        aside = f"{place}/{_ASIDE}"
        if await self._there(target) is None and await self._there(aside) is not None:
            await self._disk.rename(aside, target)  # interrupted between the two renames
        await self._disk.sync_directory(place)
        await self._sync_above(target)

    async def _emptied(self, old: str, journal: Journal | None, leftover: Callable[[str], bool]) -> bool:
        """Bring the user's files back from the directory `old` and remove it with the rest; False if some must stay."""
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
            log.error("%s/%s cannot be put back, because its name is taken: move it where it belongs", old, child.name)
        if not theirs:
            with suppress(FileNotFoundError):
                await self._disk.remove_directory(old)
        return not theirs

    async def _is_users(self, old: str, target: str, child: Child, journal: Journal, leftover: Callable[[str], bool]) -> bool:
        """Whether `child` of the old directory is the user's and not in the new one yet."""
        if child.is_directory:
            return True
        linked = journal.linked.get(child.name)
        if linked is None:  # it came after the directory was listed
            return child.name not in journal.ours and not leftover(child.name)
        # Replaced after it got its second name, so the new directory has the old version.
        return await self._number(f"{old}/{child.name}") != linked and await self._number(f"{target}/{child.name}") == linked

    async def _brought_back(self, path: str, target: str, journal: Journal) -> bool:
        """Give the user's file, link or directory its old name `target` back; False if the name is taken."""
        if os.path.basename(target) not in journal.linked and await self._number(target) is not None:
            return False
        await self._root.directories.within(target, lambda: self._disk.rename(path, target))
        return True

    async def _number(self, path: str) -> int | None:
        """The inode number; None if nothing has this name."""
        status = await self._status(path)
        return None if status is None else status.number

    async def _is_link(self, path: str) -> bool:
        status = await self._status(path)
        return status is not None and status.is_link

    async def _status(self, path: str) -> FileStatus | None:
        try:
            return await self._disk.status(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
