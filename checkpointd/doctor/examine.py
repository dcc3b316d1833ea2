"""Runs all checks, one after another. A check that fails does not stop the others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from checkpointd import __version__
from checkpointd.bucket_urls import is_bucket_url, parse
from checkpointd.doctor import machine, memory, mounts, sidecar, software, space, trials
from checkpointd.doctor.finding import Diagnosis, Finding, StateSize, Topic
from checkpointd.doctor.scratch import scratch
from checkpointd.errors import CheckpointdError, UsageError
from checkpointd.report.listing import listing
from checkpointd.store import open_store
from checkpointd.system_errors import explained

TRIALS: tuple[tuple[str, Callable[[str], Finding]], ...] = (
    ("direct-io", trials.direct_io),
    ("hard-links", trials.hard_links),
    ("rename", trials.rename),
    ("fsync-file", trials.sync_file),
    ("fsync-directory", trials.sync_directory),
    ("locks", trials.locks),
    ("names", trials.names),
    ("clock", trials.clock),
)

RETRY_S: Final = 10.0
"""How long the doctor waits for a server that does not answer, unless the root's URL says otherwise. A job waits longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to check. If `state_bytes` is None, the newest checkpoint gives the size. `nodes`: how many share the state."""

    root: str | None = None
    socket: str | None = None
    sidecar_uid: int | None = None
    state_bytes: int | None = None
    nodes: int | None = None
    copies: int = 2


def examine(question: Question) -> Diagnosis:
    """Run every check that `question` asks for. UsageError if other processes cannot see the root."""
    root = None if question.root is None else _path_of(question.root)
    state = _state_size(question, root)
    findings = [*_root(root, state, question.copies), *_memory(state), *machine.here(), *software.here()]
    if question.socket is not None:
        findings += sidecar.here(question.socket, state, question.sidecar_uid)
    return Diagnosis(
        release=__version__,
        root=root,
        socket=question.socket,
        state_bytes=state.total_bytes if state else None,
        state_source=state.source if state else "not known",
        fit=all(finding.level != "fail" for finding in findings),
        findings=tuple(findings),
    )


def _path_of(root: str) -> str:
    store = open_store(root)
    if not store.capabilities.shared:
        raise UsageError(f"{store.url} exists only in the process that made it: there is nothing to examine")
    return store.url


def _state_size(question: Question, root: str | None) -> StateSize | None:
    total, source = question.state_bytes, "as you say"
    if total is None and root is not None:
        total, source = _newest_size(root)
    if not total:
        return None
    share = -(-total // (question.nodes or 1))
    return StateSize(total_bytes=total, node_bytes=share, source=source, share_known=question.nodes is not None)


def _newest_size(root: str) -> tuple[int | None, str]:
    """The raw bytes of the newest checkpoint at `root` that records them, and words that name the checkpoint."""

    async def newest() -> tuple[int | None, str]:
        place = parse(root).trying_for(RETRY_S).url if is_bucket_url(root) else root
        async with open_store(place) as store:
            for row in (await listing(store)).rows:
                if row.state == "committed" and row.raw_bytes:
                    return row.raw_bytes, f"as {row.tag} has"
        return None, ""

    try:
        return asyncio.run(newest())
    except CheckpointdError:
        return None, ""  # the checks of the root report the error


# --- the parts ---------------------------------------------------------------------------------------------------


def _root(root: str | None, state: StateSize | None, copies: int) -> Iterator[Finding]:
    if root is not None and is_bucket_url(root):
        from checkpointd.doctor.bucket import examine as bucket  # with obstore, which only buckets need

        yield from bucket.here(parse(root).trying_for(RETRY_S), state)
        return
    if root is None:
        advice = "name the root, or set CHECKPOINTD_ROOT: most failures come from the root's file system"
        yield Finding("root", "root", "note", "no root was given", advice)
        return
    there = os.path.lexists(root)
    real = os.path.realpath(root)
    mount = mounts.mount_of(real, Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))
    yield mounts.file_system(mount)
    if mount is not None:
        yield mounts.mount_options(mount)
    try:
        with scratch(root) as place:
            found = space.room(place)  # before the trials take some of it
            yield _writable(root, real, there)
            for check, trial in TRIALS:
                yield _made("root", check, partial(trial, place))
            yield space.free_space(found, state, copies)
            yield space.inodes(found, copies)
            volatile = mount is not None and mount.kind in mounts.VOLATILE
            yield _made("space", "reservation", partial(space.reservation, place, found, state, volatile=volatile))
    except OSError as error:
        yield _failed("root", "root", error, root)


def _writable(root: str, real: str, there: bool) -> Finding:
    seen = "a directory that this user can write to" if there else "not there yet; this user can make it"
    if root != real:
        seen = f"{seen}; it leads to {real}"
    return Finding("root", "root", "ok", seen)


def _memory(state: StateSize | None) -> list[Finding]:
    return [
        memory.fits(memory.measured(), state),
        memory.memfd(),
        memory.populate(),
        memory.locked(state),
        memory.overcommit(memory.overcommit_mode()),
    ]


def _made(topic: Topic, check: str, trial: Callable[[], Finding]) -> Finding:
    """The finding of `trial`. An error that `trial` did not expect becomes a finding, too."""
    try:
        return trial()
    except OSError as error:
        return _failed(topic, check, error, "")


def _failed(topic: Topic, check: str, error: OSError, root: str) -> Finding:
    """The finding for `error`, in the words that a save would use for the same error."""
    seen, fix = explained(error, "root", root)
    where = f"{error.filename}: " if isinstance(error.filename, str) else ""
    return Finding(topic, check, "fail", f"{where}{seen}", fix or "look at the kernel log")
