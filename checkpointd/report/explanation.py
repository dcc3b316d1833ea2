"""Explains rank by rank why each attempt at a tag is committed, aborted or in doubt, and gives advice."""

from __future__ import annotations

import difflib

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.commit.facts import STATES
from checkpointd.errors import NotFoundError
from checkpointd.layout.keys import check_tag
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt, LogState, RemoveRecord
from checkpointd.layout.manifest import ErrorReport, WriterIdentity
from checkpointd.phrases import rank_runs
from checkpointd.pipeline.root import leases, root_view
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.wholeness import Lost, lost_advice, lost_state, lost_text, seen_lost
from checkpointd.report import advice
from checkpointd.report.holder import Holder, holder_at, newest_holder
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.listing import LEFT_BEHIND_WORDS, RowState
from checkpointd.report.log import look
from checkpointd.report.votes import RankWord, RankWords, votes_of, words_of
from checkpointd.store.base import Store


class AttemptExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: its state, the reason, and advice. `job` ran its start; `decided` is the process that decided it."""

    attempt: str
    state: RowState
    why: str
    next: str
    step: int | None
    world_size: int | None
    job: Holder | None
    decided_by: int | None
    decided: WriterIdentity | None
    error: ErrorReport | None
    ranks: tuple[RankWord, ...]
    """Empty if the attempt was aborted or removed, and its votes went with its objects."""
    lost: tuple[Lost, ...] = ()
    """What is missing, if the state is `incomplete` or `removed`."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A tag and its attempts, newest first; `latest` says whether loads take the tag, and why not."""

    root: str
    tag: str
    is_checkpoint: bool
    latest: str
    attempts: tuple[AttemptExplanation, ...]
    log_damage: str = ""
    """Why the log could not be read to its end, so that newer attempts may be missing here; empty if it could."""


async def explanation(store: Store, tag: str) -> Explanation:
    """Explain every attempt at `tag`. NotFoundError, with similar tags, if there is none."""
    state, damage = await look(store)
    attempts = root_view.attempts_of(state, check_tag(tag))
    if not attempts:
        raise NotFoundError(await _no_such_tag(store, state, tag))
    newest = await newest_holder(store, state)
    return Explanation(
        root=store.url,
        tag=tag,
        is_checkpoint=bool(root_view.checkpoints_of(attempts)),
        latest=_latest_words(await pointer(store, state, damage), attempts, tag),
        attempts=tuple([await _explain(store, state, attempt, attempts, newest) for attempt in reversed(attempts)]),
        log_damage=damage,
    )


async def _no_such_tag(store: Store, state: LogState, tag: str) -> str:
    there = await root_view.tags(store)
    if tag in there:
        says = command("verify", store.url)
        return f"there is a directory {tag} at {store.url}, but the log knows no save of it: {says} says more"
    known = list(dict.fromkeys(one.tag for one in state.attempts.values()))
    similar = difflib.get_close_matches(tag, known, n=3, cutoff=0.4) or [name for name in known if name.endswith(tag)][:3]
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    else:
        hint = f"{command('list', '--all', store.url)} shows what is there" if known else "nothing is there at all"
    return f"nobody ever saved the tag {tag!r} at {store.url}, or it was removed long ago: {hint}"


def _latest_words(named: Pointer, attempts: list[LoggedAttempt], tag: str) -> str:
    own = next(iter(root_view.checkpoints_of(attempts)), None)
    if named.newest == tag:
        if named.tag is None and not named.note:
            return "a restart loads it, although another program has written latest"
        return named.note or f"latest names {tag}: a restart loads it"
    takes = f"a restart loads {named.newest}" if named.newest else "a restart finds no checkpoint"
    if own is None:
        return named.note or takes
    if own.left_behind:
        return f"{takes}: {tag} was left behind"
    if not own.commit.save_latest:
        return f"{takes}: {tag} was saved with save_latest=False"
    return named.note or f"{takes}, which was committed after {tag}"


async def _explain(
    store: Store, state: LogState, attempt: LoggedAttempt, attempts: list[LoggedAttempt], newest: Holder | None
) -> AttemptExplanation:
    job = await holder_at(store, state, attempt.id.start)
    if job is not None and not job.is_job:
        job = None  # a start of the same number, at a mirror: the attempt's own is at the origin
    sizes = await root_view.sizes_of(store, attempt.prefix)
    votes = await votes_of(store, attempt, sizes)
    words = words_of(attempt, sizes, votes, job.world_size if job else None)
    lost = await seen_lost(store, attempt)
    is_checkpoint = attempt.status == "checkpoint"
    why, then = await _reason(store, attempt, attempts, words, lost, newest)
    decided = attempt.decision
    return AttemptExplanation(
        attempt=str(attempt.id),
        state=lost_state(lost) if lost else "left-behind" if is_checkpoint and attempt.left_behind else STATES[attempt.status],
        why=why,
        next=then,
        step=words.step,
        world_size=words.world_size,
        job=job,
        decided_by=decided.decided_by if decided else None,
        decided=decided.writer if decided else None,
        error=attempt.abort.error if attempt.abort else None,
        ranks=words.ranks if votes or decided is None or is_checkpoint else (),
        lost=lost,
    )


async def _reason(
    store: Store,
    attempt: LoggedAttempt,
    attempts: list[LoggedAttempt],
    words: RankWords,
    lost: tuple[Lost, ...],
    newest: Holder | None,
) -> tuple[str, str]:
    """Why the attempt is in its state, and advice."""
    abort, removal = attempt.abort, attempt.removal
    if attempt.status == "undecided":
        return await _in_doubt(store, attempt, words, newest)
    if removal is not None:
        return _removed(removal), "Nothing: it is gone, but for objects that others still need."
    if abort is not None:
        who = f" (at fault: {rank_runs(abort.ranks)})" if abort.ranks else ""
        why = f"{decider(abort.decided_by)} aborted it{who}: {abort.error.message}"
        return why, advice.after_abort(abort.error, abort.ranks)
    if attempt.committed is None:
        return "the log of this mirror keeps it, since checkpoints refer to objects of it", "Nothing: it is no checkpoint here."
    return _committed(store, attempt, attempts, words, lost)


def decider(rank: int) -> str:
    """The process that decided an attempt, in words."""
    if rank < 0:
        return "a later start, a daemon or a command"
    if rank == 0:
        return "the coordinator (rank 0)"
    return f"rank {rank}, in the coordinator's place,"


def _committed(
    store: Store, attempt: LoggedAttempt, attempts: list[LoggedAttempt], words: RankWords, lost: tuple[Lost, ...]
) -> tuple[str, str]:
    commit = attempt.commit
    why = f"every rank voted yes, and {decider(commit.decided_by)} committed it"
    if commit.rebuilt:
        why = "it was found whole when the log was made again, which did not know any more what had become of it"
    if attempt.passed_over:
        why += f"; load() took an older checkpoint, so retention keeps this one: {attempt.passed_over}"
    if attempt.damaged:
        why += f"; it was read since, and is damaged: {attempt.damaged}"
    verify = command("verify", *at_tag(store.url, attempt.tag))
    if lost:
        remedy = lost_advice(store.url, attempt.tag, lost)
        return f"{why}; {lost_text(lost)}", f"{remedy[0].upper()}{remedy[1:]}."
    bad = [word.rank for word in words.ranks if word.vote != "yes"]
    if bad:
        why = f"{why}, but the vote of {rank_runs(bad)} is gone or changed since: it does not load"
    if bad or attempt.damaged or attempt.passed_over:
        return why, f"{verify} lists the damage. Load another one, or bring the objects back from a copy."
    if attempt.left_behind:
        back = command("rollback", *at_tag(store.url, attempt.tag), "--attempt", str(attempt.id))
        return f"{why}; {LEFT_BEHIND_WORDS}", f"Nothing. {back} goes back to it."
    [current] = root_view.checkpoints_of(attempts)
    if current.id != attempt.id:
        return f"{why}; attempt {current.id} of the same tag has replaced it", "Nothing: it is about to be collected."
    return why, f"Nothing. {verify} reads all of it and checks every byte."


def _removed(removal: RemoveRecord) -> str:
    who = removal.writer
    by = f"retention of start {removal.start}" if removal.start else f"user {removal.user}"
    return f"it was a checkpoint, and {by} removed it at {who.time} (process {who.pid} on {who.host}): {removal.reason}"


async def _in_doubt(store: Store, attempt: LoggedAttempt, words: RankWords, newest: Holder | None) -> tuple[str, str]:
    from checkpointd.pipeline.outcome.recover import judge  # brings in numpy, which no other question here needs

    expected = (await judge(store, attempt.tag, attempt.id)).record
    missing = words.missing()
    if words.world_size is None:
        why = "it is not decided, and no vote gives the number of ranks"
    elif missing:
        why = f"it is not decided, and there is no vote of {rank_runs(missing)}"
    else:
        why = "it is not decided, although every rank has voted"
    worker = await leases.worker_of(store, attempt.prefix, Sight())
    if worker is not None:
        who = worker.writer
        return why, f"Wait: the daemon (process {who.pid} on {who.host}) works at it and will decide it."
    then = advice.in_doubt(newest, attempt.id.start, store.url, would_commit=isinstance(expected, CommitRecord))
    return why, then
