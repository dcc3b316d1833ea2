"""`checkpointd doctor`: tests whether this machine, a root and a sidecar's socket are fit, and says what to fix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from checkpointd.cli.arguments import as_json, maybe_root, places
from checkpointd.cli.formatting import count
from checkpointd.cli.render import Block, Cell, Mood, Note, Table, show_answer
from checkpointd.phrases import byte_count

if TYPE_CHECKING:
    from checkpointd.doctor.finding import Diagnosis, Finding, Level

UNFIT = 1
MOODS: dict[Level, Mood] = {"ok": "good", "note": "quiet", "warn": "doubt", "fail": "bad"}


@click.command("doctor", short_help="Test this machine and a root, and say what to fix.")
@places("[ROOT]")
@click.option("--socket", metavar="PATH", help="Also test the sidecar that listens there.")
@click.option("--sidecar-uid", metavar="UID", type=click.IntRange(min=0), help="The user of that sidecar, if not you.")
@click.option("--state-bytes", metavar="N", help="Size of the state over all ranks, as in 80GiB.  [default: newest checkpoint]")
@click.option("--nodes", type=click.IntRange(min=1), help="Over how many machines the state is spread.")
@click.option("--keep", type=click.IntRange(min=1), default=2, show_default=True, help="Checkpoints that must fit at once.")
@as_json()
def command(
    places: tuple[str, ...],
    socket: str | None,
    sidecar_uid: int | None,
    state_bytes: str | None,
    nodes: int | None,
    keep: int,
    as_json: bool,
) -> int:
    """Check this machine, ROOT and the sidecar's socket, and say what to fix.

    The checks really try everything, in a directory below ROOT/.checkpointd that is removed afterwards. Run it as the user that
    trains, on each kind of node. Ends with code 1 if a check failed, otherwise 0: a warning is not a failure.
    """
    found = _found(
        root=maybe_root(places),
        socket=None if socket is None else os.path.abspath(socket),
        sidecar_uid=sidecar_uid,
        state_bytes=None if state_bytes is None else byte_count(state_bytes, "--state-bytes"),
        nodes=nodes,
        copies=keep,
    )
    show_answer(found, page, as_json=as_json)
    return 0 if found.fit else UNFIT


def _found(**asked: Any) -> Diagnosis:
    """The result of `examine`. If broken libraries prevent its import, the result names these libraries."""
    try:
        from checkpointd.doctor.examine import Question, examine  # with numpy and the daemon, only where it is called
    except ImportError:
        from checkpointd.doctor.software import only_libraries

        return only_libraries()
    return examine(Question(**asked))


def page(found: Diagnosis) -> Iterator[Block]:
    """The page for people: a line for each check, then what to do, the worst first."""
    yield Table(
        ("check", "result", "seen"),
        [(f"{f.topic}/{f.check}", Cell(f.level, MOODS[f.level]), f.seen) for f in found.findings],
        prose=frozenset({"seen"}),
    )
    for level in ("fail", "warn", "note"):
        for finding in found.findings:
            if finding.level == level and finding.fix:
                yield Note(f"{level}: {finding.check}: {finding.fix}", MOODS[finding.level])
    yield _verdict(found.findings)


def _verdict(findings: tuple[Finding, ...]) -> Note:
    failed, warned = (sum(f.level == level for f in findings) for level in ("fail", "warn"))
    if failed:
        return Note(f"not fit: {count(failed, 'check')} failed, {count(warned, 'warning')}", "bad")
    return Note(f"fit: no check failed, {count(warned, 'warning')}", "doubt" if warned else "good")
