"""`checkpointd status --socket`: the state of a node's sidecar, once or continuously."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from checkpointd.bucket_urls import is_bucket_url, is_same_root
from checkpointd.cli.arguments import only_root
from checkpointd.cli.formatting import ABSENT, count, duration, part, size, speed
from checkpointd.cli.render import Bar, Bars, Block, Cell, Facts, Heading, Mood, Note, Table, show_answer
from checkpointd.cli.watching import watch
from checkpointd.commit.machine import FENCED, SUPERSEDED
from checkpointd.daemon.query import AsyncStatusClient
from checkpointd.daemon.status.changes import changes
from checkpointd.daemon.status.model import DaemonStatus, RootStatus, SaveStatus, SpoolStatus
from checkpointd.daemon.status.save_groups import DONE, SHOWN, SaveGroup, attempts_of, foremost, fraction, in_flight
from checkpointd.daemon.status.verdict import attention, members_of
from checkpointd.errors import NotFoundError
from checkpointd.export.progress import ExportProgress
from checkpointd.mirror.news import MirrorProgress
from checkpointd.phrases import rank_runs
from checkpointd.store.requests import Requests

BARS_SHOWN = 16
"""If there are more ranks, only those that are furthest behind are shown."""
FLIGHTS_SHOWN = 4
"""Saves in flight that are shown of a root; hundreds may wait in the spool."""
RECENT_SHOWN = 8
FAILURES_SHOWN = 4


def tell(socket: str, places: Sequence[str], *, sidecar_uid: int | None, interval_s: float | None, as_json: bool) -> None:
    """Print the status of the daemon at `socket`, or only that of the root in `places`: once, or every `interval_s` seconds.

    SidecarError if the daemon does not answer.
    """
    # The daemon knows a root by its path without symbolic links.
    given = only_root(tuple(places), "status") if places else None
    root = given if given is None or is_bucket_url(given) else os.path.realpath(given)
    client = AsyncStatusClient(socket, sidecar_uid=sidecar_uid)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_once(client, root, as_json) if interval_s is None else _watch(client, root, interval_s, as_json))


async def _once(client: AsyncStatusClient, root: str | None, as_json: bool) -> None:
    async with client:
        found = await _status(client, root)
    if root is not None and not found.roots:
        raise NotFoundError(f"the daemon at {client.socket_path} knows no root {root}, only those that a trainer has joined")
    show_answer(found, page, as_json=as_json)


async def _watch(client: AsyncStatusClient, root: str | None, interval_s: float, as_json: bool) -> None:
    async with client:
        look = partial(_status, client, root)
        await watch(look, interval_s, as_json=as_json, page=page, changes=changes, same=_is_same)


async def _status(client: AsyncStatusClient, root: str | None) -> DaemonStatus:
    found = await client.status()
    if root is None:
        return found
    return msgspec.structs.replace(found, roots=tuple(one for one in found.roots if is_same_root(one.root, root)))


def _is_same(before: DaemonStatus, after: DaemonStatus) -> bool:
    return msgspec.structs.replace(after, now=before.now) == before


# --- the page ------------------------------------------------------------------------------------------------


def page(found: DaemonStatus) -> Iterator[Block]:
    """The page for people."""
    yield Facts(
        [
            ("daemon", _daemon_cell(found)),
            ("memory", _memory_text(found)),
            ("serves", ", ".join(found.serves)),
            ("connections", f"{found.clients} of {found.clients_max}, {_refusals(found)}"),
            *([("bandwidth limit", speed(found.bandwidth_bps))] if found.bandwidth_bps is not None else []),
            *([("spool", _spool_cell(found.spool))] if found.spool is not None else []),
        ]
    )
    for words in found.left_out:
        yield Note(words, "doubt")
    if found.mirrors:
        yield Facts([("mirror", _mirror_cell(one, found.now)) for one in found.mirrors])
    if found.exports:
        yield Facts([("export", _export_cell(one, found.now)) for one in found.exports])
    if not found.roots:
        yield Note("no trainer has come yet", "quiet")
    if len(found.roots) > 1:
        yield Heading("roots")
        yield _roots_table(found)
        return
    for root in found.roots:
        yield from _root_blocks(root, found.now)


def _spool_cell(spool: SpoolStatus) -> Cell:
    """What waits in the spool, and what did not go through it."""
    parts = [spool.directory, f"{spool.waiting} shards wait ({size(spool.waiting_bytes)})"]
    if spool.used_bytes is not None and spool.free_bytes is not None:
        parts.append(f"{size(spool.used_bytes)} used, {size(spool.free_bytes)} free")
    counts = {
        "superseded": spool.superseded,
        "straight to the root, since it was full": spool.direct_full,
        "straight to the root, since its disk failed": spool.direct_failed,
    }
    parts += [f"{number} {words}" for words, number in counts.items() if number]
    return Cell(", ".join(parts), "bad" if spool.direct_failed else "doubt" if spool.direct_full else "")


_MOODS: dict[str, Mood] = {"bad": "bad", "doubt": "doubt", "good": "good", "quiet": "quiet"}


_MIRROR_MOODS: dict[str, Mood] = {"in step": "good", "failing": "bad", "over": "bad"}


def _mirror_cell(one: MirrorProgress, now: float) -> Cell:
    words = f"{one.origin} -> {one.mirror}: {one.state}"
    if one.state == "copying":
        words += f" {one.tag}, {part(one.done_bytes, one.total_bytes)}"
    if one.behind:
        words += f", {count(one.behind, 'checkpoint')} behind"
    if one.newest_tag is not None:
        words += f", newest {one.newest_tag}"
    if one.in_step_at is not None and one.state != "in step":
        words += f", in step {duration(now - one.in_step_at)} ago"
    if one.problem is not None:
        words += f": {one.problem.message}"
    return Cell(words, _MIRROR_MOODS.get(one.state, ""))


_EXPORT_MOODS: dict[str, Mood] = {"up to date": "good", "failing": "bad", "over": "bad"}


def _export_cell(one: ExportProgress, now: float) -> Cell:
    words = f"{one.root} -> {one.to}: {one.state}"
    if one.state == "waiting":
        words += f", since {one.holder} exports there"
    if one.state == "exporting":
        words += f" {one.tag}, {part(one.done_bytes, one.total_bytes)}"
    if one.due > 1:
        words += f", {count(one.due, 'checkpoint')} due"
    if one.newest_tag is not None:
        words += f", newest {one.newest_tag}"
    if one.last_s is not None:
        words += f", the last one took {duration(one.last_s)}"
    if one.up_to_date_at is not None and one.state != "up to date":
        words += f", up to date {duration(now - one.up_to_date_at)} ago"
    if one.problem is not None:
        words += f": {one.problem.message}"
    return Cell(words, _EXPORT_MOODS.get(one.state, ""))


def _roots_table(found: DaemonStatus) -> Table:
    """A line for each root; roots that need attention come first."""
    rows: list[list[str | Cell]] = [
        [
            Cell(root.verdict.state, _MOODS[root.verdict.mood]),
            _named(root),
            root.latest or ABSENT,
            ABSENT if root.newest_committed_at is None else duration(found.now - root.newest_committed_at),
            f"{sum(rank.connected for rank in members_of(root))}/{len(members_of(root))}" if root.ranks else ABSENT,
            _flying(root),
            root.verdict.reason,
        ]
        for root in sorted(found.roots, key=attention)
    ]
    titles = ("state", "root", "latest", "ago", "trainers", "in flight", "why")
    return Table(
        titles,
        rows,
        right=frozenset({"ago", "trainers"}),
        prose=frozenset({"root", "why"}),
        optional=("in flight", "trainers", "ago", "latest"),
    )


def _named(root: RootStatus) -> str:
    return f"{root.name} ({root.root})" if root.name else root.root


def _flying(root: RootStatus) -> str:
    shown, others = foremost(in_flight(root), 2)
    words = [f"{attempt.tag} {_progress_word(attempt)}" for attempt in shown]
    return ", ".join([*words, *([f"{len(others)} more"] if others else [])]) or ABSENT


def _progress_word(attempt: SaveGroup) -> str:
    if attempt.has_voted:
        return "voted"
    return f"{int(attempt.fraction * 100)}%{' uploaded' if attempt.goes_up else ''}"


def _refusals(found: DaemonStatus) -> str:
    reasons = ", ".join(f"{number} {reason}" for reason, number in found.refusals.items() if number)
    return f"{found.refused} refused so far{f' ({reasons})' if reasons else ''}"


def _daemon_cell(found: DaemonStatus) -> Cell:
    up = duration(found.now - found.started_at)
    state = "leaving: nothing new is taken" if found.leaving else "serving"
    text = f"{state}, checkpointd {found.release}, process {found.pid} on {found.host}, up {up}"
    return Cell(text, "doubt" if found.leaving else "good")


def _memory_text(found: DaemonStatus) -> str:
    memory = found.memory
    return (
        f"{size(memory.held)} of {size(memory.held_max)} held for restarts, "
        f"{size(memory.mapped)} of {size(memory.mapped_max)} mapped"
    )


def _root_blocks(root: RootStatus, now: float) -> Iterator[Block]:
    yield Heading(_named(root))
    yield Facts(
        [
            ("verdict", Cell(f"{root.verdict.state}: {root.verdict.reason}", _MOODS[root.verdict.mood])),
            ("latest", _latest_cell(root, now)),
            ("trainers", _trainers_cell(root)),
            ("in memory", _held_text(root)),
            *([("requests", _requests_text(root.requests))] if root.requests is not None else []),
        ]
    )
    inline = [save for save in root.recent if save.inline is not None]
    if inline and inline[-1].inline is not None:
        number = sum(rank.saves_inline for rank in root.ranks)
        last = inline[-1].inline
        yield Note(f"the trainers persisted {count(number, 'save')} themselves; the last one: {last.why}", "doubt")
    shown, others = foremost(in_flight(root), FLIGHTS_SHOWN)
    for attempt in shown:
        yield from _flight_blocks(attempt, now)
    if others:
        spooled = sum(all(save.phase == "spooled" for save in attempt.saves) for attempt in others)
        words = f"{count(len(others), 'more save')} in flight, the oldest for {duration(now - others[0].began_at)}"
        yield Note(f"{words}; {spooled} of them wait in the spool", "quiet")
    ended = [attempt for attempt in reversed(attempts_of(root)) if not attempt.live]
    if ended:
        yield Heading("last saves")
        yield _recent(ended[:RECENT_SHOWN], now)
    for attempt in [a for a in ended if a.causes][:FAILURES_SHOWN]:
        yield from _failure_blocks(attempt)


def _latest_cell(root: RootStatus, now: float) -> Cell:
    if root.latest is None:
        return Cell("none", "quiet")
    age = f", committed {duration(now - root.newest_committed_at)} ago" if root.newest_committed_at is not None else ""
    step = f", newest step {root.newest_step}" if root.newest_step is not None else ""
    return Cell(f"{root.latest}{step}{age}", "good")


def _trainers_cell(root: RootStatus) -> Cell:
    ranks = members_of(root)
    away = [rank for rank in ranks if not rank.connected]
    closed = [rank.rank for rank in away if rank.left_well]
    gone = [rank.rank for rank in away if not rank.left_well]
    text = f"{len(ranks) - len(away)} of {count(len(ranks), 'rank')} connected"
    text += f"; closed: {rank_runs(closed)}" if closed else ""
    return Cell(f"{text}; gone: {rank_runs(gone)}", "doubt") if gone else Cell(text)


def _held_text(root: RootStatus) -> str:
    tags: dict[str, list[int]] = {}
    for held in root.held:
        tags.setdefault(held.tag, []).append(held.rank)
    return "; ".join(f"{tag} of {rank_runs(ranks)}" for tag, ranks in tags.items()) or "nothing"


def _requests_text(requests: Requests) -> str:
    kinds = ", ".join(f"{number} {kind}" for kind, number in requests.by_kind().items() if number)
    return f"{requests.total} to the bucket ({kinds})" if kinds else "none to the bucket"


def _flight_blocks(attempt: SaveGroup, now: float) -> Iterator[Block]:
    yield Heading(f"{attempt.name}: in flight for {duration(now - attempt.began_at)}")
    missing = attempt.votes_missing
    if missing:
        yield Note(f"waiting for the vote{'s' if len(missing) > 1 else ''} of {rank_runs(missing)}")
    if attempt.absent:
        yield Note(f"{rank_runs(attempt.absent)} {'have' if len(attempt.absent) > 1 else 'has'} not called save() yet", "doubt")
    total = Bar("all", attempt.fraction, _total_text(attempt))
    shown = attempt.saves
    if len(shown) > BARS_SHOWN:
        shown = sorted(sorted(shown, key=fraction)[:BARS_SHOWN], key=lambda save: save.rank)
    yield Bars([total, *(Bar(f"rank {save.rank}", fraction(save), _save_text(save), _save_mood(save)) for save in shown)])
    if len(shown) < len(attempt.saves):
        yield Note(f"{len(attempt.saves) - len(shown)} more ranks are further", "quiet")


def _total_text(attempt: SaveGroup) -> str:
    parts = [f"{number} {phase}" for phase, number in attempt.counts.items()]
    if attempt.goes_up:
        return ", ".join([*parts, f"{part(attempt.uploaded, attempt.upload_total)} uploaded"])
    return ", ".join([*parts, *_pace(attempt.eta_s, attempt.speed_bps, attempt.raw_done, attempt.raw_total)])


def _pace(eta_s: float | None, speed_bps: float | None, raw_done: int, raw_total: int) -> Iterator[str]:
    """The most important part comes first, since a narrow terminal cuts off the end."""
    if eta_s is not None:
        yield f"{duration(eta_s)} left"
    if speed_bps is not None:
        yield speed(speed_bps)
    if raw_total:
        yield part(raw_done, raw_total)


def _save_text(save: SaveStatus) -> str:
    if save.error is not None:
        return f"{save.phase}: {save.error.message}"
    if save.phase == "uploading":
        return f"uploading, {part(save.uploaded, save.upload_total)}"
    if save.phase == "spooled":
        return f"spooled, {size(save.upload_total)} to upload"
    if save.phase != "persisting":
        return SHOWN.get(save.phase, save.phase)
    return ", ".join(_pace(save.eta_s, save.speed_bps, save.raw_done, save.raw_total)) or save.phase


def _save_mood(save: SaveStatus) -> Mood:
    return "bad" if save.error is not None else "good" if save.phase in DONE else ""


def _recent(ended: Sequence[SaveGroup], now: float) -> Table:
    rows: list[list[str | Cell]] = [
        [
            attempt.tag,
            attempt.attempt,
            _result_cell(attempt),
            duration((attempt.ended_at or attempt.began_at) - attempt.began_at),
            size(attempt.raw_total) if attempt.raw_total else ABSENT,
            size(attempt.stored) if attempt.stored else ABSENT,
            duration(now - (attempt.ended_at or now)),
        ]
        for attempt in ended
    ]
    titles = ("tag", "attempt", "ended as", "took", "bytes", "stored", "ago")
    right = frozenset({"took", "bytes", "stored", "ago"})
    return Table(titles, rows, right=right, optional=("attempt", "stored"))


def _result_cell(attempt: SaveGroup) -> Cell:
    words = ", ".join(f"{number} {phase}" for phase, number in attempt.counts.items())
    mood: Mood = "good" if set(attempt.counts) == {"committed"} else "doubt" if set(attempt.counts) == {SUPERSEDED} else "bad"
    return Cell(words, mood)


def _failure_blocks(attempt: SaveGroup) -> Iterator[Block]:
    yield Heading(f"{attempt.name}: not committed")
    for (phase, message), saves in attempt.causes.items():
        mood: Mood = "bad" if phase in ("failed", FENCED) else "doubt"
        yield Note(f"{rank_runs(save.rank for save in saves)} {phase}: {message}", mood)
    for advice in dict.fromkeys(save.advice for save in attempt.saves if save.advice):
        yield Note(f"what to do: {advice}")
