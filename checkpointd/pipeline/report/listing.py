"""The attempts at a root, one row each."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from checkpointd.commit.retention import State
from checkpointd.layout.manifest import Outcome
from checkpointd.pipeline import catalog
from checkpointd.pipeline.catalog import AttemptView
from checkpointd.pipeline.report.advice import ranks_text
from checkpointd.pipeline.report.pointer import Pointer, pointer
from checkpointd.pipeline.report.ranks import rank_words
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Store

RowState: TypeAlias = State | Literal["superseded"]
"""`superseded`: committed, but the same tag was committed again since, and it is about to be collected."""

ROWS = 8
"""Attempts whose votes are read at once."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. Sizes in bytes: of the tensors before and after encoding, and of all objects as they lie there."""

    tag: str
    attempt: str
    state: RowState
    latest: bool
    step: int | None
    world_size: int | None
    raw_bytes: int | None
    stored_bytes: int | None
    object_bytes: int
    time: str | None
    """When it was decided, by the clock of the machine that did."""
    why: str = ""
    """Why it is not a checkpoint; empty where it is one."""
    brief: str = ""
    """The same for an aborted one in two words: the class of the error and the ranks at fault."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The rows, newest first."""

    root: str
    latest: Pointer
    rows: tuple[Row, ...]


async def listing(store: Store, *, everything: bool = False) -> Listing:
    """The checkpoints of `store` and those whose outcome is damaged; with `everything` all other attempts as well."""
    attempts = [attempt for attempt in await catalog.scan(store) if attempt.sizes]
    checkpoints = catalog.checkpoints_of(attempts)
    current = {(c.tag, c.attempt) for c in checkpoints}
    named = await pointer(store, checkpoints)
    shown = [a for a in attempts if everything or a.state == "damaged" or (a.tag, a.attempt) in current]
    rows: dict[str, Row] = {}

    async def add(attempt: AttemptView) -> None:
        is_current = (attempt.tag, attempt.attempt) in current
        rows[attempt.prefix] = await _row(store, attempt, is_current, is_current and attempt.tag == named.tag)

    await run_workers([partial(add, attempt) for attempt in shown], ROWS, lambda: None)
    ordered = sorted(shown, key=newest_last, reverse=True)
    return Listing(root=store.url, latest=named, rows=tuple(rows[a.prefix] for a in ordered))


def newest_last(attempt: AttemptView) -> tuple[int, float, int]:
    """Sorts attempts by their order; what has none yet is the newest of its epoch."""
    outcome = attempt.outcome
    n = outcome.order[1] if outcome else math.inf
    return (attempt.attempt.epoch, n, attempt.attempt.k)


async def _row(store: Store, attempt: AttemptView, is_current: bool, is_latest: bool) -> Row:
    words = await rank_words(store, attempt)
    state: RowState = "superseded" if attempt.state == "committed" and not is_current else attempt.state
    return Row(
        tag=attempt.tag,
        attempt=str(attempt.attempt),
        state=state,
        latest=is_latest,
        step=words.step,
        world_size=words.world_size,
        raw_bytes=words.raw_bytes(),
        stored_bytes=words.stored_bytes(),
        object_bytes=sum(attempt.sizes.values()),
        time=attempt.outcome.writer.time if attempt.outcome else None,
        why=_why(attempt, state, words.missing()),
        brief=_brief(attempt.outcome),
    )


def _why(attempt: AttemptView, state: RowState, missing: list[int]) -> str:
    error = attempt.outcome.error if attempt.outcome else None
    match state:
        case "committed":
            return ""
        case "superseded" | "deleted":
            return error.message if error else "the tag was saved again since"
        case "aborted":
            return error.message if error else "no reason was recorded"
        case "damaged":
            return attempt.damage or ""
        case "in-doubt":
            return f"no outcome; no vote of {ranks_text(missing)}" if missing else "no outcome, although every vote is there"


def _brief(outcome: Outcome | None) -> str:
    if outcome is None or outcome.error is None:
        return ""
    return f"{outcome.error.code}, {ranks_text(outcome.ranks)}" if outcome.ranks else outcome.error.code
