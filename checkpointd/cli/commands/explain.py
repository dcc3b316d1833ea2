"""`checkpointd explain`: explains why a tag is, or is not, a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import click

from checkpointd.cli.arguments import as_json, places, root_and_tag
from checkpointd.cli.asking import ask_about_tag
from checkpointd.cli.attempts import STATE_MOODS, job_text, process_text, seconds_table, votes_table
from checkpointd.cli.formatting import moment, number
from checkpointd.cli.render import Block, Cell, Facts, Heading, Note, show_answer
from checkpointd.report.explanation import AttemptExplanation, Explanation, explanation


@click.command("explain", short_help="Why a tag is, or is not, a checkpoint.")
@places("[ROOT] TAG")
@as_json()
def command(places: tuple[str, ...], as_json: bool) -> None:
    """Explain why TAG is committed, aborted or in doubt: rank by rank, who decided and why, and what to do next.

    TAG may be `latest`. Every attempt at the tag is explained, the newest first.
    """
    root, tag = root_and_tag(places, "explain")
    show_answer(ask_about_tag(root, tag, explanation), page, as_json=as_json)


def page(found: Explanation) -> Iterator[Block]:
    """The page for people."""
    states = {attempt.state for attempt in found.attempts}
    if "removed" in states:
        yield Note(f"{found.tag} was committed, and its directory was removed since; {found.latest}.", "bad")
    elif "incomplete" in states:
        yield Note(f"{found.tag} was committed, and is not whole any more; {found.latest}.", "bad")
    elif found.is_checkpoint:
        yield Note(f"{found.tag} is a checkpoint; {found.latest}.", "good")
    else:
        yield Note(f"{found.tag} is not a checkpoint; {found.latest}.", "bad")
    if found.log_damage:
        yield Note(found.log_damage, "bad")
    for attempt in found.attempts:
        yield from _attempt_blocks(attempt)


def _attempt_blocks(attempt: AttemptExplanation) -> Iterator[Block]:
    yield Heading(f"attempt {attempt.attempt}: {attempt.state}")
    facts: list[tuple[str, str | Cell]] = [
        ("why", Cell(attempt.why, STATE_MOODS[attempt.state])),
        ("next", attempt.next),
        ("step", number(attempt.step)),
        ("job", job_text(attempt.job) if attempt.job else "unknown: the log does not tell of its start any more"),
    ]
    if attempt.decided:
        facts.append(("decided", f"{moment(attempt.decided.time)} by process {process_text(attempt.decided)}"))
    yield Facts(facts)
    if attempt.ranks:
        times = seconds_table(attempt.ranks)
        if times is not None:
            yield times
        yield votes_table(attempt.ranks)
