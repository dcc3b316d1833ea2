"""Shows files of checkpoints where other tools look for them: as `<directory>/<file>`, with `latest` beside the directory.

The log says which checkpoints are to be shown, and the record of a directory (`shown_key`) which one it shows. A directory is
made under a hidden name and renamed (`plain.py`). Everything that a crash leaves can be told from the names, so what comes
next just does the work again: `show` after a commit, `hide` after a removal, and `settle` both at a start.

Invariants
  TAGDIR-1  A directory shows all files of exactly one commit. A newer commit replaces an older one, never the reverse. Files
      that somebody else has saved in the directory after the commit count as newer. If the commit's one file has the name of
      its directory, it is shown in place of that directory, as a lone file. For a state, an empty directory is shown, if the
      save asks for one. `latest` names neither.
  TAGDIR-2  `latest` names the newest directory beside it that is shown and whose save asked for it. If another program wrote
      `latest` after that commit, it stays.
  TAGDIR-3  A rank reports an attempt as committed only after its files are shown. If showing fails, the next save, load or
      start shows them.
  TAGDIR-4  Only removed checkpoints are hidden: the log has them as removed, durably, before the files go. A user who removes
      the directory of a checkpoint, or the directory in which it would be shown, removes the checkpoint; neither directory is
      made again. One look that does not find a directory proves nothing: a file server may lag behind.
  TAGDIR-5  Checkpoints appear in the order of their saves, oldest first. (`Turns` keeps those that are not decided yet in that
      order.) One that cannot be shown now does not delay later ones.
  TAGDIR-6  A directory that other programs fill for a save appears only after the save has committed, with the save's files in
      it. If the save aborts, the directory goes; after a crash, the next start removes it.
  TAGDIR-7  Files of other programs go only with the checkpoint with which they appeared, only if they are unchanged, and only
      if this project removes the checkpoint. If a user has removed the checkpoint's own files (TAGDIR-4), they stay.
  TAGDIR-8  The record of a directory is put after all else, and goes after all else. So it names what the old directory holds
      for as long as that lies under a hidden name.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError, StoreFullError, UnreadableError
from checkpointd.layout.files import (
    WHOLE,
    check_place,
    check_unfinished,
    is_lone,
    numberless,
    unfinished_folder,
    unfinished_start,
)
from checkpointd.layout.keys import SERVICE, file_name, object_key, shown_key
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import BesideFile, Shown, decode, encode
from checkpointd.phrases import listed
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.ballots import ballot_key, votes_of
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience
from checkpointd.store.posix.disk import FileStatus
from checkpointd.store.posix.plain import ASIDE, LATEST, PlainFiles
from checkpointd.store.posix.unfinished import GOING
from checkpointd.store.showing import plain_files_of
from checkpointd.waits import ABSENCE_S

log = logging.getLogger("checkpointd")

PATIENCE_S = 30.0
LOOK_S = 0.05
_HIDDEN = "hidden-"
"""Begins the hidden names that this project gives; the order of the commit follows, whose directory is made or goes."""


# --- showing ------------------------------------------------------------------------------------------------------


async def show(store: Store, commit: CommitRecord, *, wait_s: float = 0.0) -> None:
    """Show the files of `commit`, unless the directory shows a newer commit. They are durable on return. Older commits that
    could not be shown, newer than the last one that is, are tried first.

    `wait_s`: how long to wait first for another process that shows the same files. Raises StoreError if it fails.
    """
    if not commit.shown_at:
        return
    plain, deadline = _plain(store), asyncio.get_running_loop().time() + wait_s
    while not await _is_shown(store, commit):
        if asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(LOOK_S)
            continue
        late = await _late(store, commit)
        await _tried(store, plain, late)
        await _show_alone(store, plain, commit)
        return


async def settle(store: Store, before: int = 0) -> None:
    """Let all directories show what the log says, for a start: show the commits that are not shown, oldest first, and hide
    removed checkpoints. What fails is left to the next start.

    `before`: directories that were filled for starts before this one are removed, since nobody fills them any more.
    """
    plain = plain_files_of(store)
    if plain is None:
        return
    attempts = (await root_view.state_of(store)).attempts.values()
    try:
        async with _alone(store, plain):
            await _emptied(store, plain)
    except StoreError as error:
        log.error("directories whose replacement was interrupted cannot be put back: %s; the next start tries again", error)
    await _tried(store, plain, [one.commit for one in reversed(root_view.checkpoints_of(attempts)) if one.commit.shown_at])
    for prefix, fault in (await hide(store, {one.prefix for one in attempts if one.status == "removed"})).items():
        log.error("%s was removed, and its files cannot be: %s; the next start tries again", prefix, fault)
    await _drop_filled(store, plain, attempts, before)


async def _late(store: Store, commit: CommitRecord) -> list[CommitRecord]:
    """The commits before `commit` that are not shown, back to the newest that is; oldest first."""
    late: list[CommitRecord] = []
    for one in await root_view.checkpoints(store):
        if one.order < commit.order and one.commit.shown_at:
            if await _is_shown(store, one.commit):
                break
            late.insert(0, one.commit)
    return late


async def _tried(store: Store, plain: PlainFiles, commits: Iterable[CommitRecord]) -> None:
    """Show those of `commits` that are not shown. One that cannot be shown delays no other (TAGDIR-5)."""
    for commit in commits:
        try:
            await _show_alone(store, plain, commit)
        except CheckpointdError as error:
            log.error("%s is committed, and cannot be shown: %s", commit.attempt, error)


async def _show_alone(store: Store, plain: PlainFiles, commit: CommitRecord) -> None:
    if await _is_shown(store, commit):
        return
    async with _alone(store, plain):
        if not await root_view.is_checkpoint(store, commit.attempt):
            log.info("%s was removed before it was shown", commit.attempt)
        elif not await _is_shown(store, commit):
            await _emptied(store, plain, _folder_of(commit))
            await _show(store, plain, commit)


async def _show(store: Store, plain: PlainFiles, commit: CommitRecord) -> None:
    at, folder, files = check_place(commit.shown_at), _folder_of(commit), await files_of(store, commit)
    above, beside = os.path.dirname(folder), dict[str, FileStatus]()
    if above and await is_gone(plain, above):
        log.warning("%s is not shown: %s has been removed meanwhile, and the checkpoint goes with it", commit.tag, above)
    elif is_lone(at, files):
        await plain.show_lone(at, files[os.path.basename(at)])
    elif files or commit.unfinished or not await plain.is_there(at):
        if commit.unfinished:
            beside = await plain.unfinished.files(commit.unfinished, folder)
        await _check_not_overtaken(plain, commit, files, beside)
        names_itself = _is_pointed_at(commit) and bool(files)
        is_deep = names_itself and folder != at
        name = _hidden_name(commit)
        filled = {path: f"{plain.unfinished.path(commit.unfinished, folder)}/{path}" for path in beside}
        await plain.publish(name, folder, _within(folder, at, files), filled, os.path.basename(at) if is_deep else None)
        await _empty(store, plain, commit)
        if names_itself and not is_deep:
            await _point(store, plain, above, commit)
    record = Shown(
        tag=commit.tag,
        attempt=str(commit.id),
        order=commit.order,
        files=tuple(sorted(files)),
        beside=tuple(BesideFile(path, one.size, one.changed_ns) for path, one in sorted(beside.items())),
    )
    await store.put(shown_key(at), encode(record))
    if commit.unfinished:
        await plain.unfinished.discard(commit.unfinished)


async def _check_not_overtaken(
    plain: PlainFiles, commit: CommitRecord, files: Mapping[str, str], beside: Iterable[str]
) -> None:
    """Raise StoreError if somebody else has saved in the directory since `commit`, which was never shown (TAGDIR-1)."""
    at, folder = commit.shown_at, _folder_of(commit)
    if await plain.written_after(folder, [*_within(folder, at, files), *beside], ballot_key(commit)):
        raise StoreError(
            f"another program has saved in {folder} after {commit.tag} was committed, so {commit.tag} is not shown: move "
            f"{folder} away, and the next start shows {commit.tag}; or delete {commit.tag}"
        )


# --- hiding -------------------------------------------------------------------------------------------------------


async def hide(store: Store, prefixes: Collection[str]) -> dict[str, StoreError]:
    """Hide the files of the removed attempts `prefixes` (`<tag>/<attempt>`). Returns the errors of those that cannot be hidden,
    by prefix.
    """
    plain, failed = plain_files_of(store), dict[str, StoreError]()
    if plain is None or not prefixes:
        return {}
    attempts = (await root_view.state_of(store)).attempts
    for commit in [one.committed for prefix in sorted(prefixes) if (one := attempts.get(prefix)) is not None]:
        if commit is None or not commit.shown_at or not await _is_of(store, commit):
            continue
        try:
            async with _alone(store, plain):
                await _hide(store, plain, commit)
        except StoreFullError:
            raise  # `reserve.on_full_disk` makes room
        except (StoreError, DamagedError) as error:
            failed[commit.attempt] = error if isinstance(error, StoreError) else StoreError(str(error))
    return failed


async def _hide(store: Store, plain: PlainFiles, commit: CommitRecord) -> None:
    at, folder, record = commit.shown_at, _folder_of(commit), await _record(store, commit.shown_at)
    if record is None or record.prefix != commit.attempt or await _is_awaited(store, commit):
        return
    await _emptied(store, plain, folder)
    if is_lone(at, record.files):
        await plain.hide_lone(at)
    elif not await is_gone(plain, at):  # else somebody removed it, and what was filled beside it stays (TAGDIR-7)
        await plain.withdraw(_hidden_name(commit), folder)
        await _empty(store, plain, commit)
    if record.files and not is_lone(at, record.files) and await plain.is_there(os.path.dirname(at)):
        await _point(store, plain, os.path.dirname(at))
    await store.delete(shown_key(at))


async def _is_awaited(store: Store, commit: CommitRecord) -> bool:
    """Whether a newer commit will be shown in the same directory. Until then the old files stay (TAGDIR-1)."""
    found = root_view.attempts_of(await root_view.state_of(store), commit.tag)
    newest = next(iter(root_view.checkpoints_of(found)), None)
    return newest is not None and newest.order > commit.order and newest.commit.shown_at == commit.shown_at


async def _drop_filled(store: Store, plain: PlainFiles, attempts: Collection[LoggedAttempt], before: int) -> None:
    """Remove directories that were filled for starts before `before`, except those of commits that still have to be shown."""
    names = await plain.unfinished.names()
    if not names:
        return
    needed = {
        one.commit.unfinished for one in attempts if one.status == "checkpoint" and not await _is_shown(store, one.commit)
    }
    unsure = {one.id.start for one in attempts if one.status == "undecided"}
    for name in names:
        start = unfinished_start(name)
        if name.startswith(GOING) or (start is not None and start < before and start not in unsure and name not in needed):
            await plain.unfinished.discard(name)


# --- what lies under hidden names ---------------------------------------------------------------------------------


def _hidden_name(commit: CommitRecord) -> str:
    return f"{_HIDDEN}{commit.order[0]}-{commit.order[1]}"


def _folder_of(commit: CommitRecord) -> str:
    """The directory that appears for `commit`, and goes with it."""
    at = commit.shown_at
    return (unfinished_folder(check_unfinished(commit.unfinished), at) if commit.unfinished else at) or at


def _within(folder: str, at: str, files: Mapping[str, str]) -> dict[str, str]:
    """`files` by their paths in `folder`: they are shown in `at`, which is that directory or one in it."""
    return {os.path.join(at.removeprefix(folder).lstrip("/"), name): key for name, key in files.items()}


async def _hidden(store: Store, plain: PlainFiles) -> list[CommitRecord]:
    """The commits whose directory was being shown or hidden when that was interrupted."""
    names = {name.removeprefix(ASIDE) for name in await plain.unfinished.names()}
    if not any(name.startswith(_HIDDEN) for name in names):
        return []
    found = [one.committed for one in (await root_view.state_of(store)).attempts.values()]
    return [one for one in found if one is not None and one.shown_at and _hidden_name(one) in names]


async def _emptied(store: Store, plain: PlainFiles, folder: str | None = None) -> None:
    """Empty what interrupted work has left under hidden names. What cannot be emptied stays, with a line in the log; if it is
    of the directory `folder`, the error is raised.
    """
    for commit in await _hidden(store, plain):
        try:
            await _empty(store, plain, commit)
        except (StoreError, DamagedError) as error:
            log.error("files of %s lie under a hidden name for now: %s", _folder_of(commit), error)
            if _folder_of(commit) == folder:
                raise


async def _empty(store: Store, plain: PlainFiles, commit: CommitRecord) -> None:
    """Empty the hidden directory of `commit`: what is neither of this commit nor of the record goes back to its place."""
    at, folder, record = commit.shown_at, _folder_of(commit), await _record(store, commit.shown_at)
    names = set[str]() if record is None else set(record.files)
    if record is None or record.prefix != commit.attempt:
        names |= (await files_of(store, commit)).keys()
    own = _within(folder, at, dict.fromkeys(names, "")).keys()
    numbered = {one for name in own if (one := numberless(name)) != name}
    noted = {} if record is None else {one.path: (one.size, one.changed_ns) for one in record.beside}
    filled = await plain.unfinished.files(commit.unfinished, folder) if commit.unfinished else {}

    def is_ours(path: str, status: FileStatus) -> bool:
        if path in own or (path == LATEST and folder != at and _is_pointed_at(commit)):
            return True
        if numberless(path) in numbered:
            return True  # of a rank of a larger job: it must not mix with this checkpoint
        is_filled = path in filled and filled[path].number == status.number
        return is_filled or noted.get(path) == (status.size, status.changed_ns)

    await plain.empty(_hidden_name(commit), folder, is_ours)


# --- latest -------------------------------------------------------------------------------------------------------


def _is_pointed_at(commit: CommitRecord) -> bool:
    """Whether the `latest` beside the directory may name it. Programs that fill it themselves (`WHOLE`) know no such file, and
    may take it for a checkpoint.
    """
    return commit.save_latest and not commit.unfinished.endswith(WHOLE)


async def point_at(store: Store, commit: CommitRecord) -> None:
    """Let the `latest` beside the directory of a commit name it, after somebody went back to that commit."""
    plain, at = plain_files_of(store), commit.shown_at
    if plain is None or not at or not _is_pointed_at(commit):
        return
    async with _alone(store, plain):
        if await _has_files(store, commit):
            await plain.point(os.path.dirname(at), os.path.basename(at))


async def _point(store: Store, plain: PlainFiles, folder: str, newly: CommitRecord | None = None) -> None:
    """Let the `latest` in `folder` name the newest directory that is shown there and whose save asked for it: after `newly` was
    shown, or one was hidden.

    If `latest` names no directory of the log, another program wrote it. Then it stays if nothing is shown newly, or if its
    directory exists and it was written after that commit.
    """
    attempts = (await root_view.state_of(store)).attempts.values()
    here = [one for one in attempts if one.committed is not None and os.path.dirname(one.commit.shown_at) == folder]
    pointed = await plain.pointed(folder)
    is_theirs = pointed is not None and pointed not in {os.path.basename(one.commit.shown_at) for one in here}
    if pointed is not None and is_theirs and (newly is None or await _is_later(plain, folder, pointed, newly)):
        return
    for one in root_view.checkpoints_of(here):
        if one.commit == newly or (one.may_be_latest and _is_pointed_at(one.commit) and await _has_files(store, one.commit)):
            await plain.point(folder, os.path.basename(one.commit.shown_at))
            return
    await plain.point(folder, None)


async def _is_later(plain: PlainFiles, folder: str, pointed: str, commit: CommitRecord) -> bool:
    is_name = pointed not in {"", ".", ".."} and "/" not in pointed
    if not is_name or not await plain.is_there(os.path.join(folder, pointed)):
        return False
    return bool(await plain.written_after(folder, [LATEST], ballot_key(commit)))


async def _has_files(store: Store, commit: CommitRecord) -> bool:
    """Whether a directory of files shows `commit`, as those that `latest` names."""
    record = await _record(store, commit.shown_at)
    return (
        record is not None
        and record.prefix == commit.attempt
        and bool(record.files)
        and not is_lone(commit.shown_at, record.files)
    )


# --- looks --------------------------------------------------------------------------------------------------------


async def unseen_of(store: Store, commit: CommitRecord) -> str | None:
    """Show the files of `commit` if they are not shown yet, and put back those that are gone. Returns why they are not there,
    or None if they are.

    Raises UnreadableError if they cannot be shown, since the stored files may be whole.
    """
    if not commit.shown_at:
        return None
    plain, at = _plain(store), commit.shown_at
    try:
        await show(store, commit)
        if await _hidden(store, plain):
            async with _alone(store, plain):
                await _emptied(store, plain, _folder_of(commit))
    except StoreError as error:
        raise UnreadableError(f"its files cannot be shown: {error}") from error
    if not await _is_of(store, commit):
        return f"{at} shows the files of another save"
    if await is_gone(plain, at):
        return f"the directory {at} has been removed, and the checkpoint goes with it"
    files = await files_of(store, commit)
    changed = await plain.changed(at, files)
    if changed and set(changed.values()) == {"gone"}:
        async with _alone(store, plain):
            if await _is_of(store, commit):  # else a newer save has taken its place
                for name in changed:
                    await plain.show_lone(os.path.join(at, name), files[name])
        changed = await plain.changed(at, files)
    if not changed:
        return None
    return (
        f"{listed(sorted(changed), 3)} in {at} changed since the checkpoint was committed. The stored files are "
        "kept: move the changed files away and load again, and the stored ones take their place"
    )


async def unlike(store: Store, commit: CommitRecord, absence_s: float) -> str | None:
    """The files of `commit` that its directory does not show as they were stored, in words; None if it shows all.
    Looks only: a job may be showing or replacing it, so a difference counts if looks spread over `absence_s` seconds find it.
    """
    plain = plain_files_of(store)
    if plain is None or not commit.shown_at:
        return None
    files = await files_of(store, commit)
    with Patience(absence_s, absence_s).looks() as looks:
        while changed := await plain.changed(commit.shown_at, files):
            if await looks.is_lost(commit.shown_at):
                named = listed([f"{name} ({what})" for name, what in sorted(changed.items())], 3)
                return f"{commit.shown_at} does not show what was committed: {named}"
    return None


async def files_of(store: Store, commit: CommitRecord) -> dict[str, str]:
    """The keys of a commit's files, by the names under which they are shown."""
    found: dict[str, str] = {}
    for rank, vote in (await votes_of(store, commit)).items():
        if isinstance(vote, DamagedError):
            raise vote
        for number, name in enumerate(vote.files or ()):
            found[name] = object_key(commit.attempt, file_name(rank, number))
    return found


async def abandoned(store: Store) -> set[str]:
    """The attempts (`<tag>/<attempt>`) whose directory somebody has removed since it was shown (TAGDIR-4). Leaves out those
    that may lie under a hidden name. Writes nothing.
    """
    plain = plain_files_of(store)
    if plain is None:
        return set()
    shown = [one.commit for one in await root_view.checkpoints(store) if one.commit.shown_at]
    away = [one for one in shown if not await plain.is_there(one.shown_at) and await _is_of(store, one)]
    # While a file system is not mounted, everything is gone, this root as well.
    if not away or not await plain.is_there(SERVICE):
        return set()
    hidden = [f"{_folder_of(one)}/" for one in await _hidden(store, plain)]
    away = [one for one in away if not f"{one.shown_at}/".startswith(tuple(hidden))]
    gone = await asyncio.gather(*(is_gone(plain, one.shown_at) for one in away))
    found = {one.attempt for one, is_removed in zip(away, gone, strict=True) if is_removed}
    return found if await plain.is_there(SERVICE) else set()


async def is_gone(plain: PlainFiles, at: str) -> bool:
    """Whether looks spread over ABSENCE_S seconds agree that there is no directory `at`."""
    with Patience(ABSENCE_S, ABSENCE_S).looks() as looks:
        while not await plain.is_there(at):
            if await looks.is_lost(at):
                return True
    return False


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


async def _is_shown(store: Store, commit: CommitRecord) -> bool:
    """Whether the directory of `commit` shows it, or a newer one."""
    record = await _record(store, commit.shown_at) if commit.shown_at else None
    return record is not None and record.order >= commit.order


async def _is_of(store: Store, commit: CommitRecord) -> bool:
    """Whether the directory of `commit` shows this commit."""
    record = await _record(store, commit.shown_at)
    return record is not None and record.prefix == commit.attempt


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
