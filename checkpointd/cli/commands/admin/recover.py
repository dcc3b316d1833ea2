"""`checkpointd recover`: decide the saves that a dead job left in doubt."""

from __future__ import annotations

from collections.abc import Iterator

import click

from checkpointd.admin.recovery import RecoveryReport, preview, recovery
from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import ask
from checkpointd.cli.attempts import STATE_MOODS, job_text
from checkpointd.cli.formatting import count
from checkpointd.cli.render import Block, Cell, Facts, Heading, Table, show_answer, warn
from checkpointd.phrases import listed
from checkpointd.report.listing import AttemptRow


@click.command("recover", short_help="Decide the saves that a dead job left in doubt.")
@places("[ROOT]")
@click.option("--dry-run", is_flag=True, help="Only print the decisions; write nothing.")
@click.option("--take-over", is_flag=True, help="Also if a job is alive at ROOT; every save of it fails from then on.")
@as_json()
def command(places: tuple[str, ...], dry_run: bool, take_over: bool, as_json: bool) -> None:
    """Decide the saves that a dead job left in doubt at ROOT, correct `latest` and remove leftovers.

    If the log of ROOT is damaged or gone, it is made again, from what can be read of it and from the directories of the saves.
    If objects of the newest checkpoint are gone, it is recorded as damaged, and loads go on with the one before.

    A job does this itself when it starts; use this command for roots where no job will start. It takes a new start without
    ranks, which would fence a running job, so it is refused while one runs. If the job ran on another machine and was not
    closed, the command watches for up to 30 seconds whether it is alive. It leaves saves alone that a daemon still works at.
    """
    act = preview if dry_run else recovery
    found = ask(only_root(places, "recover"), lambda store: act(store, take_over=take_over))
    show_answer(found, page, as_json=as_json)
    if found.refused and not as_json:
        warn(f"without --dry-run this is refused: {found.refused}")


def page(found: RecoveryReport) -> Iterator[Block]:
    """The page for people."""
    would = "would be " if found.dry_run else ""
    facts: list[tuple[str, str | Cell]] = [("job", job_text(found.holder) if found.holder else "none known")]
    if found.start is not None:
        facts.append(("taken", f"start {found.start}"))
    if found.log_damage:
        facts.append((f"{would}made again", Cell(f"the log: {found.log_damage}", "bad")))
    facts.append((f"{would}decided".strip(), count(len(found.decided), "attempt")))
    if found.surviving:
        facts.append((f"{would}surviving", f"{', '.join(found.surviving)}: a daemon works at it"))
    if found.damaged:
        facts.append((f"{would}recorded as damaged", Cell(f"{listed(found.damaged)}: objects are gone", "bad")))
    facts.append(("latest", _latest(found)))
    facts.append((f"{would}swept", count(found.swept, "attempt")))
    if found.strays is not None:
        facts.append(("removed", f"{count(found.strays, 'file')} of interrupted writes"))
    yield Facts(facts)
    if found.decided:
        yield Heading("would be decided" if found.dry_run else "decided")
        yield Table(("tag", "attempt", "decision", "why"), [_cells(row) for row in found.decided], prose=frozenset({"why"}))


def _latest(found: RecoveryReport) -> str:
    if found.latest_removed:
        return f"{'would be removed' if found.dry_run else 'removed'}: what it named is gone, and no checkpoint is left"
    if found.latest_moved_to:
        return f"{'would move' if found.dry_run else 'moved'} to {found.latest_moved_to}"
    return "stays"


def _cells(row: AttemptRow) -> tuple[str | Cell, ...]:
    why = row.why or "every rank had voted yes, and all objects that the votes name are there"
    return row.tag, row.attempt, Cell(row.state, STATE_MOODS[row.state]), why
