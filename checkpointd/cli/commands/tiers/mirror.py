"""`checkpointd mirror`: keep a second root in step with another one, by whole checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import check_root, check_used, root_around
from checkpointd.cli.formatting import count, printable, size
from checkpointd.cli.locating import locate
from checkpointd.cli.progress import progress_bar
from checkpointd.cli.render import Block, Cell, Facts, Heading, Mood, Note, Table, show_answer, show_json
from checkpointd.cli.retention_options import retention_options
from checkpointd.commands import command as command_line
from checkpointd.commit.retention import Retention
from checkpointd.errors import CheckpointdError, UsageError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.mirror.following import Follower, FollowPace
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring, error_of, run_once
from checkpointd.mirror.news import WORDS, CheckpointNews, Kind, MirrorReport, News
from checkpointd.phrases import byte_count, listed
from checkpointd.store import open_store
from checkpointd.store.base import Store

T = TypeVar("T")

MOODS: dict[Kind, Mood] = {
    "mirrored": "good",
    "left-out": "quiet",
    "removed": "quiet",
    "damaged": "bad",
    "unreadable": "doubt",
    "blocked": "bad",
    "damaged-here": "bad",
    "healed": "good",
}


@click.command("mirror", short_help="Keep a second root in step with a root.")
@places("SRC DST")
@click.option("--once/--follow", default=True, help="Copy what is there and end, or go on until Ctrl-C.  [default: --once]")
@click.option(
    "--interval", type=click.FloatRange(min=0.01), default=5.0, show_default=True, help="With --follow: seconds between looks."
)
@click.option("--limit", metavar="SIZE", help="The most bytes per second to write, such as 200MiB.")
@click.option("--verify", is_flag=True, help="Read each checkpoint back from DST after it was copied.")
@click.option("--all", "everything", is_flag=True, help="Copy checkpoints, too, that the rules would remove again at once.")
@retention_options()
@as_json()
def command(
    places: tuple[str, ...],
    once: bool,
    interval: float,
    limit: str | None,
    verify: bool,
    everything: bool,
    rules: Retention,
    as_json: bool,
) -> int:
    """Copy the checkpoints of the root SRC to the root DST, oldest first, and let `latest` there follow.

    Each checkpoint is copied whole, with what it needs of older ones, and every piece of it is compared with its digest. DST is
    a root like any other: a job can go on there if SRC is lost. An interrupted run goes on where it stopped. SRC is not
    written. DST must be empty, or a mirror of SRC; after a job has begun there, nothing more is copied to it.

    The rules say which checkpoints stay at DST; without rules all stay. What is removed at SRC stays at DST. A checkpoint that
    is damaged at SRC is named, the others are copied, and the command ends with code 5; with code 6 if one cannot be read now.
    One that `verify --record` found damaged at DST is copied again from SRC.
    """
    source, target = _both(places)
    config = MirrorConfig(
        rules=rules,
        everything=everything,
        verify=verify,
        limit_bps=None if limit is None else float(byte_count(limit, "--limit")),
    )
    if not once:
        _until_told(_with_stores(source, target, lambda a, b: _follow(a, b, config, interval, as_json=as_json)))
        return 0
    report = asyncio.run(_with_stores(source, target, lambda origin, mirror: _once(origin, mirror, config)))
    show_answer(report, page, as_json=as_json)
    error = error_of(report)
    return 0 if error is None else error.exit_code


def _both(places: tuple[str, ...]) -> tuple[str, str]:
    if len(places) != 2:
        example = command_line("mirror", "/mnt/ckpts/run1", "/mnt/archive/run1")
        raise UsageError(f"from where, and to where? Give two roots, as in {example}")
    place = locate(places[1])
    if place is not None and place.tag is not None:
        raise _lies_in(places[1], place.root)
    return only_root(places[:1], "mirror"), place.root if place is not None else places[1]


def _lies_in(place: str, root: str) -> UsageError:
    return UsageError(f"{place} lies in the root {root}: a mirror is a root of its own, beside others")


async def _with_stores(source: str, target: str, work: Callable[[Store, Store], Awaitable[T]]) -> T:
    async with open_store(source, read_only=True) as origin, open_store(target) as mirror:
        check_root(origin, source)
        await check_used(origin, source)
        if not mirror.capabilities.shared:
            raise UsageError(f"{mirror.url} exists only in the process that made it: nothing would be left of the mirror")
        if (outer := await root_around(mirror, target)) is not None:
            raise _lies_in(mirror.url, outer)
        return await work(origin, mirror)


async def _once(origin: Store, mirror: Store, config: MirrorConfig) -> MirrorReport:
    news: list[News] = []
    with progress_bar() as update:
        done, total = 0, 0

        def begins(checkpoint: LoggedAttempt, nbytes: int, behind: int) -> None:
            nonlocal total
            total = done + nbytes
            more = f", {behind} more" if behind else ""
            update(description=f"{printable(checkpoint.tag)}{more}", total=total)

        def passed(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            update(completed=done)

        mirroring = Mirroring(origin, mirror, config, tell=news.append, on_bytes=passed, on_copy=begins)
        return await run_once(mirroring, news)


# --- without end -------------------------------------------------------------------------------------------------


async def _follow(origin: Store, mirror: Store, config: MirrorConfig, interval_s: float, *, as_json: bool) -> None:
    def tell(news: News) -> None:
        if as_json:
            show_json(news)
        else:
            click.echo(f"{_now()}  {printable(_line(news))}")
        sys.stdout.flush()

    def fails(error: CheckpointdError) -> None:
        click.echo(f"{_now()}  {printable(str(error))}; trying again", err=True)

    await Follower(origin, mirror, config, FollowPace(poll_s=interval_s), tell=tell, fails=fails).run()


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _until_told(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends, or until Ctrl-C or SIGTERM."""

    async def run() -> None:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())


def _line(news: News) -> str:
    """One line for people."""
    if not isinstance(news, CheckpointNews):
        tags = listed(news.retired)
        return f"deleted at the mirror: {tags}, {size(news.freed_bytes)} freed"
    if news.kind == "mirrored":
        there = f", {size(news.found_bytes)} were there" if news.found_bytes else ""
        read = ", read back whole" if news.verified else ""
        return f"{news.tag} (step {news.step}) mirrored: {size(news.copied_bytes)} copied{there}{read}"
    if news.kind == "healed":
        return f"{news.tag} (step {news.step}) was damaged at the mirror, and is whole again: {size(news.copied_bytes)} copied"
    return f"{news.tag} {WORDS[news.kind]}: {news.why}"


# --- the page ----------------------------------------------------------------------------------------------------


def page(report: MirrorReport) -> Iterator[Block]:
    """The page for people: what was copied and what was not, then why not."""
    mirrored, left_out, healed = report.of("mirrored"), report.of("left-out"), report.of("healed")
    facts: list[tuple[str, str | Cell]] = [
        ("mirrored", f"{count(len(mirrored), 'checkpoint')}, {size(sum(one.copied_bytes for one in mirrored))} copied"),
        ("latest", report.latest or Cell("none", "quiet")),
    ]
    if healed:
        again = size(sum(one.copied_bytes for one in healed))
        facts.append(("healed", f"{count(len(healed), 'checkpoint')}, damaged at the mirror before, {again} copied again"))
    if left_out:
        tags = listed([one.tag for one in left_out])
        facts.append(("left out", f"{count(len(left_out), 'checkpoint')} that the rules would remove again: {tags}"))
    if report.retired:
        facts.append(("deleted", f"{count(len(report.retired), 'checkpoint')}, {size(report.freed_bytes)} freed"))
    yield Heading(f"{report.origin} -> {report.mirror}")
    yield Facts(facts)
    shown = [one for one in report.checkpoints if one.kind != "left-out"]
    if shown:
        yield Table(
            ("tag", "step", "state", "copied", "there"),
            [
                (
                    one.tag,
                    str(one.step) if one.step >= 0 else "-",
                    Cell(WORDS[one.kind], MOODS[one.kind]),
                    size(one.copied_bytes),
                    size(one.found_bytes),
                )
                for one in shown
            ],
            right=frozenset({"step", "copied", "there"}),
        )
    for one in shown:
        if one.why:
            yield Note(f"{one.tag}: {one.why}", MOODS[one.kind])
