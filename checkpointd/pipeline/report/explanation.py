"""Why each attempt at a tag is committed, aborted or in doubt, rank by rank, and what to do next."""

from __future__ import annotations

import difflib

import msgspec

from checkpointd.commit.retention import State
from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import DELETED, OUTCOME
from checkpointd.layout.manifest import Deleted, ErrorReport, Outcome, Writer, decode
from checkpointd.pipeline import catalog, epochs
from checkpointd.pipeline.catalog import AttemptView
from checkpointd.pipeline.report import advice
from checkpointd.pipeline.report.holder import Holder, holder_of, newest_holder
from checkpointd.pipeline.report.pointer import pointer
from checkpointd.pipeline.report.ranks import RankWord, RankWords, rank_words
from checkpointd.store.base import Store

RECOVERY = -1


class AttemptExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: what it is, why, and what to do; `job` is who ran its epoch, `decided` who put its outcome and when."""

    attempt: str
    state: State
    why: str
    next: str
    step: int | None
    world_size: int | None
    job: Holder | None
    decided_by: int | None
    decided: Writer | None
    error: ErrorReport | None
    ranks: tuple[RankWord, ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A tag, its attempts newest first, and how `latest` stands to it."""

    root: str
    tag: str
    is_checkpoint: bool
    latest: str
    attempts: tuple[AttemptExplanation, ...]


async def explanation(store: Store, tag: str) -> Explanation:
    """Explain every attempt at `tag`. NotFoundError where there is none, with the tags that look like it."""
    attempts = [attempt for attempt in await catalog.attempts_of(store, tag) if attempt.sizes]
    if not attempts:
        raise NotFoundError(await _no_such_tag(store, tag))
    newest = await _newest_holder(store)
    explained = [await _explain(store, attempt, attempts, newest) for attempt in reversed(attempts)]
    return Explanation(
        root=store.url,
        tag=tag,
        is_checkpoint=bool(catalog.checkpoints_of(attempts)),
        latest=await _latest_words(store, tag),
        attempts=tuple(explained),
    )


async def _no_such_tag(store: Store, tag: str) -> str:
    known = await catalog.tags(store)
    similar = difflib.get_close_matches(tag, known, n=3, cutoff=0.4) or [name for name in known if name.endswith(tag)][:3]
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    else:
        hint = "`checkpointd list --all` shows what is there" if known else "nothing is there at all"
    return f"nobody ever saved the tag {tag!r} at {store.url}, or it was removed whole: {hint}"


async def _newest_holder(store: Store) -> Holder | None:
    try:
        return await newest_holder(store)
    except DamagedError:
        return None


async def _job(store: Store, epoch: int) -> Holder | None:
    try:
        return holder_of(await epochs.read(store, epoch))
    except (NotFoundError, DamagedError):
        return None


async def _latest_words(store: Store, tag: str) -> str:
    checkpoints = await catalog.checkpoints(store)
    named = await pointer(store, checkpoints)
    own = next((c for c in checkpoints if c.tag == tag), None)
    if own is None:
        return f"latest names {named.tag}" if named.tag and not named.damage else named.problem or "there is no latest"
    if named.tag == tag:
        return f"latest names {tag}: a restart loads it"
    if not own.outcome.save_latest:
        return f"latest names {named.tag or 'nothing'}: {tag} was saved with save_latest=False, so it never becomes latest"
    newer = next((c for c in checkpoints if c.tag == named.tag and c.outcome.order > own.outcome.order), None)
    return f"latest names {newer.tag}, which was committed after {tag}" if newer else named.problem


async def _explain(
    store: Store, attempt: AttemptView, attempts: list[AttemptView], newest: Holder | None
) -> AttemptExplanation:
    job = await _job(store, attempt.attempt.epoch)
    words = await rank_words(store, attempt, job.world_size if job else None)
    why, then = await _reason(store, attempt, attempts, words, newest)
    outcome = attempt.outcome
    return AttemptExplanation(
        attempt=str(attempt.attempt),
        state=attempt.state,
        why=why,
        next=then,
        step=words.step,
        world_size=words.world_size,
        job=job,
        decided_by=outcome.decided_by if outcome else None,
        decided=outcome.writer if outcome else None,
        error=outcome.error if outcome else None,
        ranks=words.ranks,
    )


async def _reason(
    store: Store, attempt: AttemptView, attempts: list[AttemptView], words: RankWords, newest: Holder | None
) -> tuple[str, str]:
    """Why the attempt is what it is, and what to do."""
    outcome, key = attempt.outcome, f"{attempt.prefix}/{OUTCOME}"
    if attempt.state == "deleted":
        return await _deleted(store, attempt), "Nothing: what is left of it is a record."
    if attempt.state == "damaged":
        return f"its outcome cannot be read: {attempt.damage}", advice.after_damage(key)
    if outcome is None:
        return await _in_doubt(store, attempt, words, newest)
    if outcome.outcome == "abort":
        reason = outcome.error.message if outcome.error else "no reason was recorded"
        return f"{decider(outcome)} aborted it: {reason}", advice.after_abort(outcome.error, outcome.ranks)
    return _committed(attempt, attempts, outcome, words)


def decider(outcome: Outcome) -> str:
    """Who put the outcome, in words."""
    if outcome.decided_by == RECOVERY:
        return "recovery, after its job had ended,"
    if outcome.decided_by == 0:
        return "the coordinator (rank 0)"
    return f"rank {outcome.decided_by}, in the coordinator's place,"


def _committed(attempt: AttemptView, attempts: list[AttemptView], outcome: Outcome, words: RankWords) -> tuple[str, str]:
    why = f"every rank voted yes, and {decider(outcome)} committed it"
    [current] = catalog.checkpoints_of(attempts)
    if current.attempt != attempt.attempt:
        return f"{why}; attempt {current.attempt} of the same tag has replaced it", "Nothing: it is about to be collected."
    bad = [word.rank for word in words.ranks if word.vote != "yes"]
    if bad:
        return (
            f"{why}, but the vote of {advice.ranks_text(bad)} is gone or changed since: it does not load",
            f"`checkpointd verify {attempt.tag}` lists the damage. Load another one, or bring the objects back from a copy.",
        )
    return why, f"Nothing. `checkpointd verify {attempt.tag}` reads all of it and checks every byte."


async def _deleted(store: Store, attempt: AttemptView) -> str:
    key = f"{attempt.prefix}/{DELETED}"
    try:
        mark = decode(await store.get(key), Deleted, key)
    except (NotFoundError, DamagedError) as error:
        return f"it was removed; why cannot be read: {error}"
    who = mark.writer
    return f"it was a checkpoint, and process {who.pid} on {who.host} removed it at {who.time}: {mark.reason}"


async def _in_doubt(store: Store, attempt: AttemptView, words: RankWords, newest: Holder | None) -> tuple[str, str]:
    from checkpointd.pipeline.recover import judge  # brings in numpy, which no other question here needs

    expected = await judge(store, attempt)
    missing = words.missing()
    if words.world_size is None:
        why = "there is no outcome, and no vote that says how many ranks there were"
    elif missing:
        why = f"there is no outcome, and no vote of {advice.ranks_text(missing)}"
    else:
        why = "there is no outcome, although every rank has voted"
    then = advice.in_doubt(newest, attempt.attempt.epoch, store.url, would_commit=expected.outcome == "commit")
    return why, then
