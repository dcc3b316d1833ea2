"""`checkpointd doctor`: whether this machine, a root and a sidecar's socket are fit, and what to do where they are not."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from checkpointd.cli.arguments import as_json, maybe_root, places
from checkpointd.cli.render import Block, Cell, Mood, Note, Table, show
from checkpointd.cli.words import count
from checkpointd.errors import UsageError

if TYPE_CHECKING:
    from checkpointd.doctor.finding import Diagnosis, Finding, Level

UNFIT = 1
MOODS: dict[Level, Mood] = {"ok": "good", "note": "quiet", "warn": "doubt", "fail": "bad"}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}


@click.command("doctor", short_help="Whether this machine is fit, and what to fix.")
@places("[ROOT]")
@click.option("--socket", metavar="PATH", help="Also the sidecar that listens there.")
@click.option("--state-bytes", metavar="N", help="Size of the state over all ranks, as in 80GiB.  [default: newest checkpoint]")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines that the state is spread over.")
@click.option("--keep", type=click.IntRange(min=1), default=2, show_default=True, help="Checkpoints that must fit at once.")
@as_json()
def command(
    places: tuple[str, ...], socket: str | None, state_bytes: str | None, nodes: int | None, keep: int, as_json: bool
) -> int:
    """Check this machine, ROOT and the sidecar's socket, and say what to fix.

    Everything is really tried, in a directory below ROOT/.checkpointd that is removed afterwards. Run it as the user that
    trains, on each kind of node. Ends with code 1 where a check failed, else 0: a warning is no failure.
    """
    found = _found(
        root=maybe_root(places),
        socket=None if socket is None else os.path.abspath(socket),
        state_bytes=None if state_bytes is None else _bytes(state_bytes),
        nodes=nodes,
        copies=keep,
    )
    _show_json(found) if as_json else show(page(found))
    return 0 if found.fit else UNFIT


def _found(**asked: Any) -> Diagnosis:
    """What `examine` finds; where libraries are so broken that it cannot be loaded, that."""
    try:
        from checkpointd.doctor.examine import Question, examine  # with numpy and the daemon, only where it is called
    except ImportError:
        from checkpointd.doctor.software import only_libraries

        return only_libraries()
    return examine(Question(**asked))


def _show_json(found: Diagnosis) -> None:
    """As `asking.show_json`, which brings in the very libraries that may be broken."""
    data = msgspec.json.encode(found)
    click.echo(msgspec.json.format(data, indent=2) if sys.stdout.isatty() else data)


def _bytes(text: str) -> int:
    """`80GiB`, `80G` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?", text.strip().lower())
    value = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if value <= 0:
        raise UsageError(f"--state-bytes is {text!r}: give a number of bytes, or one with a unit, such as 80GiB")
    return value


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
