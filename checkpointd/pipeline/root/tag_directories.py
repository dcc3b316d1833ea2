"""Shows files of checkpoints where other tools look for them: as `<directory>/<file>`, with `latest` beside the directory.

Invariants
  TAGDIR-1  A directory shows all files of exactly one commit. A newer commit replaces an older one, never the reverse. Files
      that somebody else has saved in the directory after the commit count as newer. If the commit's one file has the name of
      its directory, it is shown in place of that directory, as a lone file. For a state, an empty directory is shown, if the
      save asks for one. `latest` names neither.
  TAGDIR-2  `latest` names the newest directory beside it that is shown and whose save asked for it. If another program wrote
      `latest` after that commit, it stays.
  TAGDIR-3  A rank reports an attempt as committed only after its files are shown. If showing fails, the next start shows them.
  TAGDIR-4  Only removed checkpoints are hidden: the log has them as removed, durably, before the files go. A user who removes
      the directory of a checkpoint, or the directory in which it would be shown, removes the checkpoint; neither directory is
      made again. One look that does not find a directory proves nothing: it may be about to be replaced, or a file server may
      lag behind.
  TAGDIR-5  Checkpoints appear in the order of their saves. A writer shows a commit after its earlier attempts are decided and
      shown if they committed; a start shows the oldest first. A checkpoint never appears if it was removed before, or if its
      directory shows a newer one. A checkpoint that cannot be shown now does not delay later ones.
  TAGDIR-6  A directory that other programs fill for a save (`unfinished.py`) gets its name only after the save has committed
      and the directory is complete. If the save aborts, the directory goes; after a crash, the next start removes it.
  TAGDIR-7  Files of other programs go only with the checkpoint with which they appeared, only if they are unchanged, and only
      if this project removes the checkpoint. If a user has removed the checkpoint's own files (TAGDIR-4), they stay.
  TAGDIR-8  The record of a shown directory goes with the checkpoint, and the record's own directory with it; a start removes an
      empty one that a crash has left. So records take space for the checkpoints that are shown, not for all that ever were.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError, StoreFullError, UnreadableError
from checkpointd.layout.files import (
    WHOLE,
    by_directory,
    check_beside,
    check_leftovers,
    check_place,
    check_unfinished,
    is_lone,
    unfinished_folder,
    unfinished_start,
)
from checkpointd.layout.keys import (
    SERVICE,
    SHOWN,
    file_name,
    object_key,
    object_takeover,
    shown_key,
)
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import Shown, decode, encode
from checkpointd.phrases import listed
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.ballots import ballot_key, votes_of
from checkpointd.store.base import Entry, Store
from checkpointd.store.patient import Patience
from checkpointd.store.posix.plain import PlainFiles
from checkpointd.store.posix.unfinished import GOING
from checkpointd.store.showing import plain_files_of
from checkpointd.waits import ABSENCE_S

if TYPE_CHECKING:  # it brings in numpy, which no listing needs
    from checkpointd.pipeline.shard import AttemptInfo

log = logging.getLogger("checkpointd")

PATIENCE_S = 30.0
LOOK_S = 0.05
HIDE_S = 10.0
"""After an error, directories are hidden only for so long, since the root's lock is held. The next call hides the others."""


def leftover_test(outcome: CommitRecord) -> Callable[[str], bool]:
    """A test of file names: whether a file beside the files of the commit `outcome` is a leftover that must go."""
    ends = check_leftovers(outcome.leftovers)
    return lambda name: name.endswith(ends)


async def show(store: Store, outcome: CommitRecord, *, wait_s: float = 0.0) -> None:
    """Show the files of the commit `outcome`, unless the directory shows a newer commit. They are durable on return.

    `wait_s`: how long to wait first for another process that shows the same files. Raises StoreError if it fails.
    """
    if not outcome.shown_at:
        return
    plain, deadline = _plain(store), asyncio.get_running_loop().time() + wait_s
    while not await _is_shown(store, outcome):
        if asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(LOOK_S)
            continue
        async with _alone(store, plain):
            if not await root_view.is_checkpoint(store, outcome.attempt):
                log.info("%s was removed before it was shown", outcome.attempt)
                return
            if not await _is_shown(store, outcome):
                await _show(store, plain, outcome)


class Queue:
    """The attempts of one writer in the order of their saves. Each is shown in its turn (TAGDIR-5). Use it on one loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._undecided: dict[str, tuple[int, asyncio.Event]] = {}
        """The attempts whose turn is not over, by prefix: the number of the save, and the event that ends the turn."""
        self._late: list[CommitRecord] = []
        """Commits that could not be shown, oldest first. They are tried again once, before the next one is shown."""

    def expect(self, info: AttemptInfo) -> None:
        """Note that a save has begun. Its turn lasts until `end`, which must be called however the save ends."""
        self._undecided[info.prefix] = info.n, asyncio.Event()

    def end(self, info: AttemptInfo) -> None:
        """Note that the writer has shown the attempt, or will not show it."""
        _, over = self._undecided.pop(info.prefix, (0, asyncio.Event()))
        over.set()

    async def show(self, info: AttemptInfo, outcome: CommitRecord | None, *, wait_s: float = 0.0) -> None:
        """`show` in the attempt's turn, if it has committed. If it raises, the files are tried again before the next attempt is
        shown.
        """
        if outcome is None or not outcome.shown_at:
            return
        await self._turn(info)
        late, self._late = self._late, []
        for older in late:
            with suppress(CheckpointdError):  # logged when it failed first; the next start tries again
                await show(self._store, older)
        try:
            await show(self._store, outcome, wait_s=wait_s)
        except CheckpointdError:
            self._late.append(outcome)
            raise

    async def _turn(self, info: AttemptInfo) -> None:
        """Return when every earlier save has had its turn."""
        for number, over in list(self._undecided.values()):
            if number < info.n:
                await over.wait()


async def _show(store: Store, plain: PlainFiles, outcome: CommitRecord) -> None:
    at, files = check_place(outcome.shown_at), await files_of(store, outcome)
    leftover = leftover_test(outcome)
    check_beside([file.path for file in outcome.beside])
    folder, is_pointed = os.path.dirname(at), _is_pointed_at(outcome)
    filled = await _is_filled(plain, outcome)
    above = os.path.dirname(unfinished_folder(outcome.unfinished, at)) if filled else folder
    newest = (outcome.order, at) if is_pointed else None
    if above and await is_gone(plain, above):
        log.warning("%s is not shown: %s has been removed meanwhile, and the checkpoint goes with it", outcome.tag, above)
    elif await _is_overtaken(store, plain, outcome, at, files):
        raise StoreError(
            f"another program has saved in {at} after {outcome.tag} was committed, so {outcome.tag} is not shown: move "
            f"{unfinished_folder(outcome.unfinished, at) if filled else at} away, and the next start shows {outcome.tag}; or "
            f"delete {outcome.tag}"
        )
    elif is_lone(at, files):
        await plain.show_lone(at, files[os.path.basename(at)])
    elif not filled:
        await plain.show(at, files, leftover)
        if files:
            await _point(store, plain, folder, newest, since=ballot_key(outcome))
    elif not await plain.reveal(outcome.unfinished, at, files, os.path.basename(at) if newest else None, leftover):
        await _point(store, plain, folder, newest, since=ballot_key(outcome))
    record = Shown(
        tag=outcome.tag,
        attempt=str(outcome.id),
        order=outcome.order,
        save_latest=is_pointed,
        files=tuple(sorted(files)),
        beside=outcome.beside,
    )
    await store.put(shown_key(at), encode(record))
    if outcome.unfinished:
        await plain.unfinished.discard(outcome.unfinished)


async def _is_overtaken(store: Store, plain: PlainFiles, outcome: CommitRecord, at: str, files: Mapping[str, str]) -> bool:
    """Whether somebody else has saved in the directory `at` since the commit `outcome`, which was never shown (TAGDIR-1)."""
    folder, name = os.path.split(at)
    # This project moves `latest` before it writes the record; another program that saves moves `latest` later.
    if await plain.pointed(folder) != name or not await plain.pointed_after(folder, ballot_key(outcome), shown_key(at)):
        return False
    if not await plain.is_there(at) or not await plain.changed(at, files):
        return False
    record = await _record(store, at)
    return record is None or await _has_changed(store, plain, at, record)


async def _has_changed(store: Store, plain: PlainFiles, at: str, record: Shown) -> bool:
    """Whether the directory `at` shows other files than its `record` says. True if the attempt of the record was removed."""
    one = (await root_view.state_of(store)).attempts.get(record.prefix)
    return one is None or one.status != "checkpoint" or bool(await plain.changed(at, await files_of(store, one.commit)))


def _is_pointed_at(outcome: CommitRecord) -> bool:
    """Whether the `latest` beside the directory may name it. Programs that fill it themselves (`WHOLE`) know no such file, and
    may take it for a checkpoint.
    """
    return outcome.save_latest and not outcome.unfinished.endswith(WHOLE)


async def point_at(store: Store, outcome: CommitRecord) -> None:
    """Let the `latest` beside the directory of a commit name it, after somebody went back to that commit."""
    plain = plain_files_of(store)
    if plain is None or not outcome.shown_at or not _is_pointed_at(outcome):
        return
    async with _alone(store, plain):
        record = await _record(store, outcome.shown_at)
        if record is not None and record.prefix == outcome.attempt and _has_files(outcome.shown_at, record):
            await plain.point(os.path.dirname(outcome.shown_at), os.path.basename(outcome.shown_at))


async def _is_filled(plain: PlainFiles, outcome: CommitRecord) -> bool:
    """Whether other programs filled a directory for the files, and it has not got its name yet (TAGDIR-6)."""
    if not outcome.unfinished:
        return False
    name = check_unfinished(outcome.unfinished)
    return await plain.unfinished.is_there(name, unfinished_folder(name, outcome.shown_at))


async def unseen_of(store: Store, outcome: CommitRecord) -> str | None:
    """Show the files of the commit `outcome` if they are not shown yet. Returns why they are not there, or None if they are.

    Raises UnreadableError if they cannot be shown, since the stored files may be whole.
    """
    if not outcome.shown_at:
        return None
    try:
        await show(store, outcome)
    except StoreError as error:
        raise UnreadableError(f"its files cannot be shown: {error}") from error
    if not await _is_of(store, outcome):
        return f"{outcome.shown_at} shows the files of another save"
    plain, files = _plain(store), await files_of(store, outcome)
    if await is_gone(plain, outcome.shown_at):
        if outcome.shown_at in await plain.unsettled():
            raise UnreadableError(f"{outcome.shown_at} was about to be replaced, and cannot be put back now: see the log")
        return f"the directory {outcome.shown_at} has been removed, and the checkpoint goes with it"
    changed = await plain.changed(outcome.shown_at, files)
    if changed and set(changed.values()) == {"gone"}:
        async with _alone(store, plain):
            if await _is_of(store, outcome):  # else a newer save has taken its place
                await plain.show(outcome.shown_at, files, leftover_test(outcome))
        changed = await plain.changed(outcome.shown_at, files)
    if not changed:
        return None
    return (
        f"{listed(sorted(changed), 3)} in {outcome.shown_at} changed since the checkpoint was committed. The stored files are "
        "kept: move the changed files away and load again, and the stored ones take their place"
    )


async def unlike(store: Store, outcome: CommitRecord, absence_s: float) -> str | None:
    """The files of the commit `outcome` that its directory does not show as they were stored, in words; None if it shows all.
    Looks only: a job may be showing or replacing it, so a difference counts if looks spread over `absence_s` seconds find it.
    """
    plain = plain_files_of(store)
    if plain is None or not outcome.shown_at:
        return None
    files = await files_of(store, outcome)
    with Patience(absence_s, absence_s).looks() as looks:
        while changed := await plain.changed(outcome.shown_at, files):
            if await looks.is_lost(outcome.shown_at):
                named = listed([f"{name} ({what})" for name, what in sorted(changed.items())], 3)
                return f"{outcome.shown_at} does not show what was committed: {named}"
    return None


async def files_of(store: Store, outcome: CommitRecord) -> dict[str, str]:
    """The keys of a commit's files, by the names under which they are shown."""
    found: dict[str, str] = {}
    for rank, vote in (await votes_of(store, outcome)).items():
        if isinstance(vote, DamagedError):
            raise vote
        takeover = object_takeover(vote.index.name) if vote.index is not None else None
        for number, name in enumerate(vote.files or ()):
            found[name] = object_key(outcome.attempt, file_name(rank, number, takeover or 0))
    return found


_Newest = tuple[tuple[int, int], str]
"""The order of a commit, and its directory."""


async def _point(
    store: Store, plain: PlainFiles, folder: str, candidate: _Newest | None, *, hidden: str = "", since: str = ""
) -> None:
    """Let the `latest` in `folder` name the newest directory that is shown there and whose save asked for it, or `candidate`.

    If `latest` names neither a directory shown there nor the directory just `hidden`, another program wrote it. Then it stays
    if there is no candidate, or if its directory exists and it was written after the object `since`, the candidate's outcome.
    """
    prefix = f"{SHOWN}/{folder}".rstrip("/")
    newest, names = candidate, {hidden}
    for entry in await store.list(prefix):
        at = os.path.join(folder, entry.name)
        record = await _record(store, at) if entry.is_prefix and entry.name != hidden else None
        if record is not None:
            names.add(entry.name)
        if record is not None and not _has_files(at, record):
            continue
        is_newer = record is not None and record.save_latest and (newest is None or record.order > newest[0])
        if record is not None and is_newer and not await _is_left(store, record):
            newest = record.order, at
    pointed = await plain.pointed(folder)
    if pointed not in {None, *names} and (candidate is None or await _is_later(plain, folder, str(pointed), since)):
        return
    await plain.point(folder, os.path.basename(newest[1]) if newest is not None else None)


def _has_files(at: str, record: Shown) -> bool:
    """Whether `at` is a directory of files, as those that `latest` names."""
    return bool(record.files) and not is_lone(at, record.files)


async def _is_later(plain: PlainFiles, folder: str, pointed: str, since: str) -> bool:
    is_name = pointed not in {"", ".", ".."} and "/" not in pointed
    return is_name and await plain.is_there(os.path.join(folder, pointed)) and await plain.pointed_after(folder, since)


async def hide(store: Store, prefixes: Collection[str]) -> dict[str, StoreError]:
    """Hide the files of the removed attempts `prefixes` (`<tag>/<attempt>`). Files of other programs stay if somebody has
    removed the directory before (TAGDIR-7). Returns the errors of those that cannot be hidden, by prefix.
    """
    plain = plain_files_of(store)
    if plain is None:
        return {}
    failed: dict[str, StoreError] = {}
    async with _alone(store, plain):
        records = await _records(store)
        going = [
            (at, record) for at, record in records if record.prefix in prefixes and not await _is_awaited(store, at, record)
        ]
        if not going:
            return {}
        await plain.finish()  # puts back a directory whose replacement was interrupted
        unsettled = await plain.unsettled()
        gone = await asyncio.gather(*(_is_removed_by_others(plain, at, record) for at, record in going))
        of_others = {at: {file.path for file in record.beside} for at, record in records if (at, record) not in going}
        loop = asyncio.get_running_loop()
        until = loop.time() + HIDE_S
        # Those that failed before come last, so that they keep no other from going.
        for (at, record), by_others in sorted(zip(going, gone, strict=True), key=lambda one: one[0][0] in plain.unhidden):
            if failed and loop.time() >= until:
                failed[record.prefix] = next(iter(failed.values()))
                continue  # the storage fails slowly, and others wait for the lock
            if at in unsettled and not await plain.is_there(at):
                continue  # the next start hides it
            try:
                await _hide_one(store, plain, at, record, of_others, by_others=by_others)
                plain.unhidden.discard(at)
            except StoreFullError:
                raise  # `reserve.on_full_disk` makes room
            except (StoreError, DamagedError) as error:
                failed[record.prefix] = error if isinstance(error, StoreError) else StoreError(str(error))
                plain.unhidden.add(at)
    return failed


async def _hide_one(
    store: Store, plain: PlainFiles, at: str, record: Shown, of_others: Mapping[str, Collection[str]], *, by_others: bool
) -> None:
    folder, name = os.path.split(at)
    if not by_others:
        staying = [paths for other, paths in of_others.items() if os.path.dirname(other) == folder]
        await _hide(store, plain, at, record, set[str]().union(*staying))
    if _has_files(at, record) and await plain.is_there(folder):
        await _point(store, plain, folder, None, hidden=name)
        if record.beside and not by_others:
            await plain.hide(folder, ())  # removes the folder if it is empty
    await store.delete(shown_key(at))  # last, so that after a crash the next start repeats all this


async def _hide(store: Store, plain: PlainFiles, at: str, record: Shown, staying: Collection[str]) -> None:
    """Hide the files of `record`, and remove the unchanged files of other programs beside them, except `staying`."""
    if record.beside and not record.going:
        # Recorded before the directory goes, so that after a crash nobody takes it for removed by somebody else.
        await store.put(shown_key(at), encode(msgspec.structs.replace(record, going=True)))
    await plain.hide(at, record.files)
    folder, noted = os.path.dirname(at), {file.path: (file.size, file.changed_ns) for file in record.beside}
    own = await plain.unchanged(folder, {path: noted[path] for path in check_beside(noted) if path not in staying})
    for directory, names in reversed(by_directory(noted).items()):
        await plain.hide(os.path.join(folder, directory).rstrip("/"), {n for n in names if os.path.join(directory, n) in own})


async def _is_removed_by_others(plain: PlainFiles, at: str, record: Shown) -> bool:
    """Whether somebody else removed the directory `at`. It matters only if there are files of other programs beside it."""
    return bool(record.beside) and not record.going and await is_gone(plain, at)


async def _is_awaited(store: Store, at: str, record: Shown) -> bool:
    """Whether a newer commit will be shown at `at`. Until then the old files stay, so that the directory is complete
    (TAGDIR-1)."""
    attempts = root_view.attempts_of(await root_view.state_of(store), record.tag)
    newest = next(iter(root_view.checkpoints_of(attempts)), None)
    return newest is not None and newest.order > record.order and newest.commit.shown_at == at


async def abandoned(store: Store, *, restores: bool = True) -> set[str]:
    """The attempts (`<tag>/<attempt>`) whose directory somebody has removed since it was shown (TAGDIR-4).

    `restores`: first put back directories whose replacement was interrupted. If not, this writes nothing, and leaves them out.
    """
    plain = plain_files_of(store)
    if plain is None:
        return set()
    away = [(at, record) for at, record in await _records(store) if not await plain.is_there(at)]
    # While a file system is not mounted, everything is gone, this root as well.
    if not away or not await plain.is_there(SERVICE):
        return set()
    if restores:
        async with _alone(store, plain):
            await plain.finish()
    unsettled = await plain.unsettled()
    away = [(at, record) for at, record in away if at not in unsettled]
    gone = await asyncio.gather(*(is_gone(plain, at) for at, _ in away))
    found = {record.prefix for (_, record), missing in zip(away, gone, strict=True) if missing}
    return found if await plain.is_there(SERVICE) else set()


async def is_gone(plain: PlainFiles, at: str) -> bool:
    """Whether looks spread over ABSENCE_S seconds agree that there is no directory `at`."""
    with Patience(ABSENCE_S, ABSENCE_S).looks() as looks:
        while not await plain.is_there(at):
            if await looks.is_lost(at):
                return True
    return False


async def mend(store: Store, before: int = 0) -> None:
    """Show the commits that are not shown, and hide removed checkpoints, for a start. A failure is left to the next start.

    `before`: unfinished directories of starts before this one are removed, since nobody fills them any more (TAGDIR-6).
    """
    plain = plain_files_of(store)
    if plain is None:
        return
    try:
        async with _alone(store, plain):
            await plain.finish()
    except StoreError as error:
        log.error("directories whose replacement was interrupted cannot be put back: %s; the next start tries again", error)
    attempts = (await root_view.state_of(store)).attempts.values()
    for checkpoint in reversed(root_view.checkpoints_of(attempts)):  # oldest first (TAGDIR-5)
        try:
            await show(store, checkpoint.commit)
        except CheckpointdError as error:
            log.error("%s is committed, and cannot be shown: %s", checkpoint.prefix, error)
    # Only attempts that the log has as removed are hidden (TAGDIR-4).
    for prefix, fault in (await hide(store, {one.prefix for one in attempts if one.status == "removed"})).items():
        log.error("%s was removed, and its files cannot be: %s; the next start tries again", prefix, fault)
    for folder, entries in await _record_folders(store):
        if not entries:  # a crash came between the removal of the record and that of its directory
            await store.delete(shown_key(folder))
    await _drop_unfinished(store, plain, attempts, before)


async def _drop_unfinished(store: Store, plain: PlainFiles, attempts: Iterable[LoggedAttempt], before: int) -> None:
    """Remove unfinished directories of starts before `before`, except those of commits that still have to be shown."""
    names = await plain.unfinished.names()
    if not names:
        return
    committed = [one.commit for one in attempts if one.status == "checkpoint"]
    needed = {outcome.unfinished for outcome in committed if outcome.unfinished and not await _is_shown(store, outcome)}
    unsure = {one.id.start for one in attempts if one.status == "undecided"}
    for name in names:
        if name.startswith(GOING):
            await plain.unfinished.discard(name)
            continue
        start = unfinished_start(name)
        if start is None or start >= before or start in unsure or name in needed:
            continue
        log.info("%s was filled for a save that did not commit, and is removed", name)
        await plain.unfinished.discard(name)


@asynccontextmanager
async def _alone(store: Store, plain: PlainFiles) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(PATIENCE_S):  # only for the lock; the files of thousands of ranks may take longer
                await stack.enter_async_context(plain.alone())
        except TimeoutError as error:
            raise StoreError(
                f"another process has held the lock of {store.url} for {PATIENCE_S:g} s; is one stopped there?"
            ) from error
        yield


def _plain(store: Store) -> PlainFiles:
    plain = plain_files_of(store)
    if plain is None:
        raise StoreError(f"{store.url} cannot show files beside it: the root of such a job is a directory named .checkpointd")
    return plain


async def _is_shown(store: Store, outcome: CommitRecord) -> bool:
    record = await _record(store, outcome.shown_at)
    return record is not None and record.order >= outcome.order


async def _is_left(store: Store, record: Shown) -> bool:
    one = (await root_view.state_of(store)).attempts.get(record.prefix)
    return one is not None and one.left_behind


async def _is_of(store: Store, outcome: CommitRecord) -> bool:
    """Whether the directory of the commit `outcome` shows this commit."""
    record = await _record(store, outcome.shown_at)
    return record is not None and record.prefix == outcome.attempt


async def _records(store: Store) -> list[tuple[str, Shown]]:
    """Every directory that shows a commit, with its record."""
    found: list[tuple[str, Shown]] = []
    for folder, entries in await _record_folders(store):
        record = await _record(store, folder) if any(not entry.is_prefix for entry in entries) else None
        if record is not None:
            found.append((folder, record))
    return found


async def _record_folders(store: Store) -> list[tuple[str, list[Entry]]]:
    """The directories below `shown`, with what is in them."""
    found, level = list[tuple[str, list[Entry]]](), [""]
    while level:
        folders = [(folder, await store.list(f"{SHOWN}/{folder}".rstrip("/"))) for folder in level]
        level = [os.path.join(folder, entry.name) for folder, entries in folders for entry in entries if entry.is_prefix]
        found += [(folder, entries) for folder, entries in folders if folder]
    return found


async def _record(store: Store, at: str) -> Shown | None:
    """The record of the directory `at`; None if there is none, or if it is damaged."""
    key = shown_key(at)
    try:
        return decode(await store.get(key), Shown, key)
    except NotFoundError:
        return None
    except DamagedError as error:
        log.error("%s; its files are shown again", error)
        return None
