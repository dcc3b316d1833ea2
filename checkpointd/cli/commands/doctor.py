"""`checkpointd doctor`: tests whether this machine, a root and a sidecar's socket are fit, and says what to fix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from checkpointd import arguments
from checkpointd.cli.arguments import as_json, maybe_root, places
from checkpointd.cli.formatting import count, speed
from checkpointd.cli.render import Block, Cell, Facts, Mood, Note, Table, show_answer
from checkpointd.commands import install
from checkpointd.errors import UsageError
from checkpointd.phrases import byte_count

if TYPE_CHECKING:
    from checkpointd.doctor.finding import DeviceReport, Diagnosis, Figure, Finding, Level

UNFIT = 1
MOODS: dict[Level, Mood] = {"ok": "good", "note": "quiet", "warn": "doubt", "fail": "bad"}


@click.command("doctor", short_help="Test this machine and a root, and say what to fix.")
@places("[ROOT]")
@click.option("--socket", metavar="PATH", help="Also test the sidecar that listens there.")
@click.option("--sidecar-uid", metavar="UID", type=click.IntRange(min=0), help="The user of that sidecar, if not you.")
@click.option("--state-bytes", metavar="N", help="Size of the state over all ranks, as in 80GiB.  [default: newest checkpoint]")
@click.option("--nodes", type=click.IntRange(min=1), help="Over how many machines the state is spread.")
@click.option("--keep", type=click.IntRange(min=1), default=2, show_default=True, help="Checkpoints that must fit at once.")
@click.option("--device", is_flag=True, help="Also test and measure the accelerator, for about a minute.")
@click.option(
    "--device-bytes", metavar="N", help="Device memory to use.  [default: a quarter of the free memory, at most 1GiB]"
)
@as_json()
def command(
    places: tuple[str, ...],
    socket: str | None,
    sidecar_uid: int | None,
    state_bytes: str | None,
    nodes: int | None,
    keep: int,
    device: bool,
    device_bytes: str | None,
    as_json: bool,
) -> int:
    """Check this machine, ROOT and the sidecar's socket, and say what to fix.

    The checks really try everything, in a directory or prefix below ROOT/.checkpointd that is removed afterwards. ROOT may be
    the URL of a bucket. Run it as the user that trains, on each kind of node. Ends with code 1 if a check failed, otherwise 0:
    a warning is not a failure.

    --device also tests staging and loading on the accelerator, with planted mistakes, and measures them. Attach this report
    to an issue. Without an accelerator, it ends with code 2.
    """
    if device_bytes is not None and not device:
        raise UsageError("--device-bytes is for --device, which is missing")
    tested = _device_report(None if device_bytes is None else byte_count(device_bytes, "--device-bytes")) if device else None
    found = _found(
        root=maybe_root(places),
        socket=None if socket is None else os.path.abspath(arguments.expanded(socket)),
        sidecar_uid=sidecar_uid,
        state_bytes=None if state_bytes is None else byte_count(state_bytes, "--state-bytes"),
        nodes=nodes,
        copies=keep,
    )
    if tested is not None:
        found = _with_device(found, tested)
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


def _device_report(nbytes: int | None) -> DeviceReport:
    """What the client finds on the accelerator. UsageError without torch, or without an accelerator."""
    try:
        test = import_module("checkpointd_client.selftest.examine")
    except ImportError as error:
        raise UsageError(f"--device needs torch, which cannot be imported ({error}): {install('torch')}") from error
    report: DeviceReport = test.examine(nbytes)
    return report


def _with_device(found: Diagnosis, tested: DeviceReport) -> Diagnosis:
    return replace(
        found,
        fit=found.fit and all(finding.level != "fail" for finding in tested.findings),
        findings=found.findings + tested.findings,
        device_facts=tested.facts,
        device_figures=tested.figures,
    )


def page(found: Diagnosis) -> Iterator[Block]:
    """The page for people: a line for each check, then what to do, the worst first."""
    if found.device_facts:
        yield Facts([(fact.name, fact.value) for fact in found.device_facts])
        yield Table(
            ("measured on the device", ""), [(f.name, _measured(f)) for f in found.device_figures], right=frozenset({""})
        )
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


def _measured(figure: Figure) -> str:
    return speed(figure.value) if figure.unit == "B/s" else f"{figure.value * 1e3:.2f}ms"


def _verdict(findings: tuple[Finding, ...]) -> Note:
    failed, warned = (sum(f.level == level for f in findings) for level in ("fail", "warn"))
    if failed:
        return Note(f"not fit: {count(failed, 'check')} failed, {count(warned, 'warning')}", "bad")
    return Note(f"fit: no check failed, {count(warned, 'warning')}", "doubt" if warned else "good")
