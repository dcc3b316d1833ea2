"""Explains rank by rank why each attempt at a tag is committed, aborted or in doubt, and gives advice."""

from __future__ import annotations

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.errors import NotFoundError
from checkpointd.layout.keys import check_tag
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt, LogState
from checkpointd.layout.manifest import WriterIdentity
from checkpointd.phrases import rank_runs
from checkpointd.pipeline.root import leases, root_view
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.wholeness import missing_of
from checkpointd.report import advice
from checkpointd.report.holder import Holder, holder_at, newest_holder
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.listing import AttemptRow, row_of
from checkpointd.report.log import look
from checkpointd.report.votes import RankWord, rank_words
from checkpointd.store.base import Store


class AttemptExplanation(AttemptRow, frozen=True, kw_only=True):
    """One attempt, with advice. `job` ran its start; `decided` is the process that decided it."""

    next: str
    job: Holder | None
    decided: WriterIdentity | None
    ranks: tuple[RankWord, ...]
    """Empty if the attempt was aborted or removed, and its votes went with its objects."""


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
    if not attempts and tag in await root_view.tags(store):
        says = command("verify", store.url)
        raise NotFoundError(f"there is a directory {tag} at {store.url}, but the log knows no save of it: {says} says more")
    if not attempts:
        known = list(dict.fromkeys(one.tag for one in state.attempts.values()))
        raise root_view.no_such_tag(state, tag, store.url, known)
    newest = await newest_holder(store, state)
    return Explanation(
        root=store.url,
        tag=tag,
        is_checkpoint=bool(root_view.checkpoints_of(attempts)),
        latest=_latest_words(await pointer(store, state, damage), attempts, tag),
        attempts=tuple([await _explain(store, state, attempt, attempts, newest) for attempt in reversed(attempts)]),
        log_damage=damage,
    )


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
    words = await rank_words(store, attempt, job.world_size if job else None)
    is_current = attempt.id in [one.id for one in root_view.checkpoints_of(attempts)]
    is_undecided = attempt.status == "undecided"
    row = row_of(attempt, await missing_of(store, attempt), words if is_undecided else None, is_current=is_current)
    bad = [word.rank for word in words.ranks if word.vote != "yes"]
    if is_undecided:
        why, then = row.why, await _fate(store, attempt, newest)
    elif attempt.status == "checkpoint":
        why, then = _committed(store.url, attempt, row, bad)
    else:
        why, then = _over(attempt)
    decided = attempt.decision
    return AttemptExplanation(
        **msgspec.structs.asdict(msgspec.structs.replace(row, why=why)),
        next=then,
        job=job,
        decided=decided.writer if decided else None,
        ranks=() if decided is not None and attempt.status != "checkpoint" and not words.has_votes() else words.ranks,
    )


def _over(attempt: LoggedAttempt) -> tuple[str, str]:
    """Why an attempt is no checkpoint and will be none, and advice."""
    abort, removal = attempt.abort, attempt.removal
    if removal is not None:
        remover = removal.writer
        by = f"retention of start {removal.start}" if removal.start else f"user {removal.user}"
        at = f"at {remover.time} (process {remover.pid} on {remover.host})"
        why = f"it was a checkpoint, and {by} removed it {at}: {removal.reason}"
        return why, "Nothing: it is gone, but for objects that others still need."
    if abort is not None:
        who = f" (at fault: {rank_runs(abort.ranks)})" if abort.ranks else ""
        why = f"{_decider(abort.decided_by)} aborted it{who}: {abort.error.message}"
        return why, advice.after_abort(abort.error, abort.ranks)
    return "the log of this mirror keeps it, since checkpoints refer to objects of it", "Nothing: it is no checkpoint here."


def _decider(rank: int) -> str:
    """The process that decided an attempt, in words."""
    if rank < 0:
        return "a later start, a daemon or a command"
    if rank == 0:
        return "the coordinator (rank 0)"
    return f"rank {rank}, in the coordinator's place,"


def _committed(root: str, attempt: LoggedAttempt, row: AttemptRow, bad: list[int]) -> tuple[str, str]:
    """How a checkpoint came about and what is the matter with it, and advice. `bad`: the ranks whose votes cannot be read."""
    why = f"every rank voted yes, and {_decider(attempt.commit.decided_by)} committed it"
    if attempt.commit.rebuilt:
        why = "it was found whole when the log was made again, which did not know any more what had become of it"
    if row.why:
        why += f"; {row.why}"
    if row.missing is not None:
        remedy = row.missing.advice(root, attempt.tag)
        return why, f"{remedy[0].upper()}{remedy[1:]}."
    verify = command("verify", *at_tag(root, attempt.tag))
    if bad:
        why += f", but the vote of {rank_runs(bad)} is gone or changed since: it does not load"
    if bad or attempt.damaged or attempt.passed_over:
        return why, f"{verify} lists the damage. Load another one, or bring the objects back from a copy."
    back = command("rollback", *at_tag(root, attempt.tag), "--attempt", row.attempt)
    if row.state == "left-behind":
        return why, f"Nothing. {back} goes back to it."
    if row.state == "replaced":
        return why, f"Nothing: it will be collected, but not before the job has loaded. Until then, {back} goes back to it."
    return why, f"Nothing. {verify} reads all of it and checks every byte."


async def _fate(store: Store, attempt: LoggedAttempt, newest: Holder | None) -> str:
    """What becomes of an undecided attempt."""
    from checkpointd.pipeline.outcome.recover import judge  # brings in numpy, which no other question here needs

    worker = await leases.worker_of(store, attempt.prefix, Sight())
    if worker is not None:
        who = worker.writer
        return f"Wait: the daemon (process {who.pid} on {who.host}) works at it and will decide it."
    expected = (await judge(store, attempt.tag, attempt.id)).record
    return advice.in_doubt(newest, attempt.id.start, store.url, would_commit=isinstance(expected, CommitRecord))
