"""`checkpointd status`: the job at a root, saves in flight, and failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import click

from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import ask
from checkpointd.cli.attempts import job_text, votes_table
from checkpointd.cli.formatting import count, moment, size
from checkpointd.cli.locating import is_used, suggestion
from checkpointd.cli.render import Block, Cell, Facts, Heading, Note, show_answer, warn
from checkpointd.cli.watching import watch
from checkpointd.commands import at_tag
from checkpointd.commands import command as command_line
from checkpointd.phrases import listed, rank_runs
from checkpointd.pipeline.root.wholeness import in_words
from checkpointd.report.status import Flight, Standing, standing
from checkpointd.store.base import Store

INTERVAL_S, SOCKET_INTERVAL_S = 2.0, 0.5
RANKS_SHOWN = 16
"""A larger job shows only ranks without a yes vote, and at most this many."""


@click.command("status", short_help="The job at a root, saves in flight, and failures.")
@places("[ROOT]")
@click.option("--socket", help="Ask the sidecar that listens at this socket, instead of the store.")
@click.option("--sidecar-uid", type=click.IntRange(min=0), help="The user of that sidecar, if not you.")
@click.option(
    "--watch", "keep_watching", is_flag=True, help="Keep watching until Ctrl-C; in a pipe, print a line for every change."
)
@click.option("--interval", type=click.FloatRange(min=0.01), help="Seconds between two looks.  [default: 2; 0.5 with --socket]")
@as_json()
def command(
    places: tuple[str, ...],
    socket: str | None,
    sidecar_uid: int | None,
    keep_watching: bool,
    interval: float | None,
    as_json: bool,
) -> None:
    """Show the job at ROOT, `latest`, the saves in flight and the last failures, as the store has them.

    An object that is being written counts with the space reserved for it. --watch --json prints a document for every change.

    With --socket: the state of this node's sidecar, for all its roots or for ROOT alone, with bytes, speed and time left.
    """
    if socket is not None:
        from checkpointd.cli.commands import daemon_status  # with the protocol, only where a daemon is asked

        interval_s = (interval or SOCKET_INTERVAL_S) if keep_watching else None
        daemon_status.tell(socket, places, sidecar_uid=sidecar_uid, interval_s=interval_s, as_json=as_json)
        return
    root = only_root(places, "status")
    if not keep_watching:
        found = ask(root, standing, unused=True, read_only=True)
        show_answer(found, page, as_json=as_json)
        if not (as_json or is_used(found.root)):
            warn(f"no job ever saved at {found.root}: {suggestion(found.root, root)}")
        return

    async def follow(store: Store) -> None:
        look = partial(standing, store)
        await watch(look, interval or INTERVAL_S, as_json=as_json, page=page, changes=changes)

    with contextlib.suppress(KeyboardInterrupt):
        ask(root, follow, unused=True, read_only=True)


# --- the page ------------------------------------------------------------------------------------------------


def page(found: Standing) -> Iterator[Block]:
    """The page for people."""
    yield Facts(
        [
            ("root", found.root),
            ("job", _job_cell(found)),
            ("latest", _latest_cell(found)),
            ("checkpoints", _checkpoints_text(found)),
            ("in flight", str(len([flight for flight in found.flights if not flight.orphaned]))),
        ]
    )
    if found.log_damage:
        yield Note(found.log_damage, "bad")
    for name in found.damaged:
        says = command_line("explain", *at_tag(found.root, name.rpartition("/")[0]))
        yield Note(f"{name} was read, and is damaged: {says} says more", "bad")
    for line in in_words(found.root, found.missing):
        yield Note(line, "bad")
    for flight in found.flights:
        yield from _flight_blocks(flight)
    if found.failures:
        yield Heading("last failures")
        yield Facts([(row.tag, f"{row.brief}, {moment(row.time)}: {row.why}") for row in found.failures])


def _job_cell(found: Standing) -> Cell:
    if found.holder is None:
        return Cell("none ever ran here", "quiet")
    mood = {"running": "good", "ended": "quiet", "unknown": ""}
    return Cell(job_text(found.holder), mood[found.holder.life])  # type: ignore[arg-type]  # values of Mood


def _latest_cell(found: Standing) -> Cell:
    if found.latest.note:
        return Cell(found.latest.note, "doubt")
    if found.latest.tag is None:
        return Cell("none", "quiet")
    known = next((c for c in found.commits if c.tag == found.latest.tag), None)
    details = f", step {known.step}, committed {moment(known.time)}" if known else ""
    return Cell(f"{found.latest.tag}{details}", "good")


def _checkpoints_text(found: Standing) -> str:
    if not found.left_behind:
        return str(found.checkpoints)
    return f"{found.checkpoints}, of which {len(found.left_behind)} were left behind ({listed(found.left_behind)})"


def _flight_blocks(flight: Flight) -> Iterator[Block]:
    what = "left in doubt by a job that has ended" if flight.orphaned else "in flight"
    of = f" of {flight.world_size}" if flight.world_size else ""
    yield Heading(f"{flight.tag} (attempt {flight.attempt}): {what}, {flight.votes}{of} voted, {size(flight.object_bytes)}")
    shown = flight.ranks
    if len(shown) > RANKS_SHOWN:
        waiting = [word for word in shown if word.vote != "yes"]
        shown = tuple(waiting[:RANKS_SHOWN])
        yield Note(f"{count(len(flight.ranks) - len(waiting), 'rank')} voted yes; {len(waiting)} did not, the first of them:")
    if shown:
        yield votes_table(shown)


def changes(before: Standing | None, after: Standing) -> Iterator[str]:
    """One line for each difference of `after` from `before`; if `before` is None, a line for everything in `after`."""
    if after.log_damage and (before is None or before.log_damage != after.log_damage):
        yield f"log: {after.log_damage}"
    if before is None or before.holder != after.holder:
        yield _job(after)
    if before is None:
        yield f"checkpoints: {after.checkpoints}"
    failed = {row.prefix for row in before.failures} if before else set()
    yield from (f"aborted: {row.named}: {row.brief}: {row.why}" for row in reversed(after.failures) if row.prefix not in failed)
    # If a checkpoint is removed, an older one enters the list, and is no news.
    newest = max((row.order for row in before.commits), default=(0, -1)) if before else (0, -1)
    yield from (f"committed: {row.named}, step {row.step}" for row in reversed(after.commits) if row.order > newest)
    said = in_words(before.root, before.missing) if before else []
    yield from (line for line in in_words(after.root, after.missing) if line not in said)
    if before is None or before.latest != after.latest:
        yield f"latest: {after.latest.note or after.latest.tag or 'none'}"
    yield from (_flight(flight) for flight in after.flights if before is None or flight not in before.flights)


def _job(found: Standing) -> str:
    holder = found.holder
    if holder is None:
        return "job: none ever ran here"
    return f"job: start {holder.start}, {holder.world_size} ranks, {holder}, {holder.life}"


def _flight(flight: Flight) -> str:
    missing = [word.rank for word in flight.ranks if word.vote == "missing"]
    waiting = f", waiting for {rank_runs(missing)}" if missing else ""
    state = "in doubt" if flight.orphaned else "in flight"
    of = f" of {flight.world_size}" if flight.world_size else ""
    return f"{state}: {flight.named}: {flight.votes}{of} voted{waiting}, {flight.object_bytes} bytes"
