"""Explains rank by rank why each attempt at a tag is committed, aborted or in doubt, and gives advice."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.errors import DamagedError, NotFoundError, UnreadableError
from checkpointd.layout.keys import LEFT_BEHIND, OUTCOME
from checkpointd.layout.manifest import ErrorReport, LeftBehind, Outcome, WriterIdentity, decode
from checkpointd.phrases import rank_runs
from checkpointd.pipeline.root import catalog, leases
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.wholeness import Lost, Wholeness, directory_of, lost_advice, lost_state, lost_text
from checkpointd.report import advice
from checkpointd.report.holder import Holder, holder_at, newest_holder
from checkpointd.report.latest import pointer
from checkpointd.report.listing import LEFT_BEHIND_WORDS, RowState, passed_over, removal
from checkpointd.report.votes import RankWord, RankWords, votes_of, words_of
from checkpointd.store.base import Store

RECOVERY = -1


class AttemptExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: its state, the reason, and advice. `job` ran its start; `decided` is the process that put its outcome."""

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
    lost: tuple[Lost, ...] = ()
    """What is missing, if the state is `incomplete` or `removed`."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A tag and its attempts, newest first; `latest` says whether the pointer names the tag, and why not."""

    root: str
    tag: str
    is_checkpoint: bool
    latest: str
    attempts: tuple[AttemptExplanation, ...]


async def explanation(store: Store, tag: str) -> Explanation:
    """Explain every attempt at `tag`. NotFoundError, with similar tags, if there is none."""
    attempts = [attempt for attempt in await catalog.attempts_of(store, tag) if attempt.sizes]
    if not attempts:
        raise NotFoundError(await _no_such_tag(store, tag))
    newest = await _or_none(newest_holder(store))
    explained = [await _explain(store, attempt, attempts, newest) for attempt in reversed(attempts)]
    return Explanation(
        root=store.url,
        tag=tag,
        is_checkpoint=bool(catalog.checkpoints_of(attempts)),
        latest=await _latest_words(store, tag),
        attempts=tuple(explained),
    )


async def _no_such_tag(store: Store, tag: str) -> str:
    log = CatalogLog(store)
    await log.refresh()
    known_of = [log.state.entries[prefix] for prefix in log.state.by_tag.get(tag, ())] if not log.fault else []
    if known_of and all(entry.removed for entry in known_of):
        return f"{tag} was a checkpoint at {store.url}, and was removed: {known_of[-1].removed}"
    if known_of:
        return (
            f"{tag} was saved at {store.url}, and somebody has removed its directory, or it was lost: "
            f"{lost_advice(store.url, tag, (directory_of(tag),))}"
        )
    known = await catalog.tags(store)
    similar = difflib.get_close_matches(tag, known, n=3, cutoff=0.4) or [name for name in known if name.endswith(tag)][:3]
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    else:
        hint = f"{command('list', '--all', store.url)} shows what is there" if known else "nothing is there at all"
    return f"nobody ever saved the tag {tag!r} at {store.url}, or it was removed whole: {hint}"


async def _or_none(holder: Awaitable[Holder | None]) -> Holder | None:
    """The holder; None if its record is gone or damaged."""
    try:
        return await holder
    except (NotFoundError, DamagedError):
        return None


async def _latest_words(store: Store, tag: str) -> str:
    checkpoints = await catalog.checkpoints(store)
    named = await pointer(store, checkpoints, Wholeness(store, ()))
    own = next((c for c in checkpoints if c.tag == tag), None)
    if own is None:
        return f"latest names {named.tag}" if named.tag and not named.damage else named.problem or "there is no latest"
    if named.tag == tag:
        loads = "an older one that is whole, or none" if named.damage else "it"
        return f"latest names {tag}: a restart loads {loads}"
    if own.left_behind:
        return f"latest names {named.tag or 'nothing'}: {tag} was left behind"
    if not own.outcome.save_latest:
        return f"latest names {named.tag or 'nothing'}: {tag} was saved with save_latest=False, so it never becomes latest"
    newer = next((c for c in checkpoints if c.tag == named.tag and c.outcome.order > own.outcome.order), None)
    if newer and not named.damage:
        return f"latest names {newer.tag}, which was committed after {tag}"
    return named.problem or "another program has written latest"


def _state_of(attempt: AttemptView, lost: tuple[Lost, ...]) -> RowState:
    if lost:
        return lost_state(lost)
    if attempt.is_copy:
        return "copied"
    return "left-behind" if attempt.left_behind and attempt.state == "committed" else attempt.state


async def _explain(
    store: Store, attempt: AttemptView, attempts: list[AttemptView], newest: Holder | None
) -> AttemptExplanation:
    job = await _or_none(holder_at(store, attempt.attempt.start))
    if job is not None and not job.is_job:
        job = None  # a start of the same number, at a mirror: the attempt's own is at the origin
    votes = await votes_of(store, attempt)
    words = words_of(attempt, votes, job.world_size if job else None)
    lost = await Wholeness(store, attempts).lost(attempt, votes) if attempt.state == "committed" else ()
    why, then = await _reason(store, attempt, attempts, words, lost, newest)
    if attempt.is_left_checkpoint:
        why += f"; {await _left_behind(store, attempt)}"
    if over := await passed_over(store, attempt):
        why += f"; load() took an older checkpoint, so retention keeps this one: {over}"
    outcome = attempt.outcome
    return AttemptExplanation(
        attempt=str(attempt.attempt),
        state=_state_of(attempt, lost),
        why=why,
        next=then,
        step=words.step,
        world_size=words.world_size,
        job=job,
        decided_by=outcome.decided_by if outcome else None,
        decided=outcome.writer if outcome else None,
        error=outcome.error if outcome else None,
        ranks=words.ranks,
        lost=lost,
    )


async def _reason(
    store: Store,
    attempt: AttemptView,
    attempts: list[AttemptView],
    words: RankWords,
    lost: tuple[Lost, ...],
    newest: Holder | None,
) -> tuple[str, str]:
    """Why the attempt is in its state, and advice."""
    outcome, key = attempt.outcome, f"{attempt.prefix}/{OUTCOME}"
    if attempt.state == "deleted":
        return await _deleted(store, attempt), "Nothing: the objects that are left are its record."
    if attempt.is_copy:
        return attempt.damage or "", "Nothing is damaged: no command and no load uses this directory."
    if attempt.state == "damaged":
        return f"its outcome is damaged: {attempt.damage}", advice.after_damage(key, store.url)
    if attempt.state == "unreadable":
        return f"its outcome cannot be read now: {attempt.unreadable}", advice.UNREADABLE
    if outcome is None:
        return await _in_doubt(store, attempt, words, newest)
    if outcome.outcome == "abort":
        reason = outcome.error.message if outcome.error else "no reason was recorded"
        return f"{decider(outcome)} aborted it: {reason}", advice.after_abort(outcome.error, outcome.ranks)
    return _committed(store, attempt, attempts, words, lost)


async def _left_behind(store: Store, attempt: AttemptView) -> str:
    """By whom, and how to go back to it."""
    key = f"{attempt.prefix}/{LEFT_BEHIND}"
    back = command("rollback", *at_tag(store.url, attempt.tag), "--attempt", str(attempt.attempt))
    try:
        record = decode(await store.get(key), LeftBehind, key)
    except (DamagedError, NotFoundError, UnreadableError) as error:
        return f"{LEFT_BEHIND_WORDS} (the record that says why cannot be read: {error}). {back} goes back to it"
    return f"{LEFT_BEHIND_WORDS}: {record.by}, by user {record.user}, at {record.writer.time}. {back} goes back to it"


def decider(outcome: Outcome) -> str:
    """The process that put the outcome, in words."""
    if outcome.decided_by == RECOVERY:
        return "recovery, after its job had ended,"
    if outcome.decided_by == 0:
        return "the coordinator (rank 0)"
    return f"rank {outcome.decided_by}, in the coordinator's place,"


def _committed(
    store: Store, attempt: AttemptView, attempts: list[AttemptView], words: RankWords, lost: tuple[Lost, ...]
) -> tuple[str, str]:
    assert attempt.outcome is not None
    why = f"every rank voted yes, and {decider(attempt.outcome)} committed it"
    [current] = catalog.checkpoints_of(attempts)
    if current.attempt != attempt.attempt and not attempt.left_behind:
        return f"{why}; attempt {current.attempt} of the same tag has replaced it", "Nothing: it is about to be collected."
    verify = command("verify", *at_tag(store.url, attempt.tag))
    bad = [word.rank for word in words.ranks if word.vote != "yes"]
    if bad:
        why = f"{why}, but the vote of {rank_runs(bad)} is gone or changed since: it does not load"
    if lost:
        remedy = lost_advice(store.url, attempt.tag, lost)
        return f"{why}; {lost_text(lost)}", f"{remedy[0].upper()}{remedy[1:]}."
    if bad:
        return why, f"{verify} lists the damage. Load another one, or bring the objects back from a copy."
    return why, f"Nothing. {verify} reads all of it and checks every byte."


async def _deleted(store: Store, attempt: AttemptView) -> str:
    mark = await removal(store, attempt)
    if isinstance(mark, str):
        return f"it was removed; the reason cannot be read: {mark}"
    who = mark.writer
    by = f"user {mark.user}, with process" if mark.user else "process"
    return f"it was a checkpoint, and {by} {who.pid} on {who.host} removed it at {who.time}: {mark.reason}"


async def _in_doubt(store: Store, attempt: AttemptView, words: RankWords, newest: Holder | None) -> tuple[str, str]:
    from checkpointd.pipeline.outcome.recover import judge  # brings in numpy, which no other question here needs

    expected = (await judge(store, attempt)).outcome
    missing = words.missing()
    if words.world_size is None:
        why = "there is no outcome, and no vote that gives the number of ranks"
    elif missing:
        why = f"there is no outcome, and no vote of {rank_runs(missing)}"
    else:
        why = "there is no outcome, although every rank has voted"
    worker = await leases.worker_of(store, attempt.prefix, Sight())
    if worker is not None:
        who = worker.writer
        return why, f"Wait: the daemon (process {who.pid} on {who.host}) works at it and will decide it."
    then = advice.in_doubt(newest, attempt.attempt.start, store.url, would_commit=expected.outcome == "commit")
    return why, then
