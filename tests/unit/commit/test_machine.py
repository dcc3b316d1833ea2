"""PHASE-1 to PHASE-4 of commit/machine.py: the table, and every run that it allows."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.commit.machine import FINAL, ORDER, TABLE, Event, Phase, reached, shown, step
from checkpointd.errors import ProtocolError

ROOT = Path(__file__).parents[3]
LEVEL = {
    Phase.STAGING: 0,
    Phase.STAGED: 1,
    Phase.PERSISTING: 2,
    Phase.SPOOLED: 3,
    Phase.UPLOADING: 4,
    Phase.FAILING: 5,
    Phase.SKIPPING: 5,
    Phase.PREPARED: 6,
    **dict.fromkeys(FINAL, 7),
}
EVERY_PAIR = list(product(Phase, Event))


def runs() -> list[list[tuple[Phase, Event]]]:
    """Every way through the table from staging to an end, each pair at most once in it."""
    found: list[list[tuple[Phase, Event]]] = []

    def go(phase: Phase, way: list[tuple[Phase, Event]]) -> None:
        if phase in FINAL:
            found.append(way)
        for event in Event:
            if (phase, event) in TABLE and (phase, event) not in way:
                go(TABLE[phase, event], [*way, (phase, event)])

    go(Phase.STAGING, [])
    return found


RUNS = runs()


@pytest.mark.parametrize(("phase", "event"), EVERY_PAIR)
def test_every_pair_is_in_the_table_or_a_breach_of_the_protocol(phase: Phase, event: Event) -> None:
    if (phase, event) in TABLE:
        assert step(phase, event) == TABLE[phase, event]
        return
    with pytest.raises(ProtocolError, match=f"{event} while {phase}") as caught:
        step(phase, event)
    assert "keep the root as it is, and report this" in str(caught.value)
    assert caught.value.exit_code == 12


def test_phase_1_phases_only_move_forward_and_the_last_ones_are_final() -> None:
    for (phase, _), after in TABLE.items():
        assert phase not in FINAL
        assert LEVEL[after] > LEVEL[phase] or after is phase


def votes_no(phase: Phase, event: Event) -> bool:
    """A rank votes no when it enters `failing` or `skipping`."""
    after = TABLE[phase, event]
    return after in (Phase.FAILING, Phase.SKIPPING) and after is not phase


def test_phase_2_no_run_votes_twice() -> None:
    for run in RUNS:
        yes = sum(event in (Event.VOTED_YES, Event.VOTE_UNCERTAIN) for _, event in run)
        no = sum(votes_no(*pair) for pair in run)
        assert yes + no <= 1


def test_phase_3_committed_is_entered_on_seeing_a_commit_and_on_nothing_else() -> None:
    assert {pair for pair, after in TABLE.items() if after is Phase.COMMITTED} == {(Phase.PREPARED, Event.SAW_COMMIT)}


def test_phase_5_a_yes_that_is_found_prepares_a_process_that_goes_on_for_a_lost_one() -> None:
    going_on = {Phase.STAGING, Phase.SPOOLED, Phase.UPLOADING, Phase.FAILING}
    for phase in going_on:
        assert step(phase, Event.YES_FOUND) is Phase.PREPARED
    for phase in set(Phase) - going_on:
        with pytest.raises(ProtocolError):
            step(phase, Event.YES_FOUND)


def test_an_abort_or_a_lost_outcome_ends_an_attempt_in_any_phase() -> None:
    for phase in set(Phase) - FINAL:
        assert step(phase, Event.SAW_ABORT) in (Phase.ABORTED, Phase.FAILED, Phase.SKIPPED)
        assert step(phase, Event.LOG_LOST) in (Phase.FAILED, Phase.SKIPPED)
        assert step(phase, Event.DEADLINE) is phase


@given(st.lists(st.sampled_from(Event), max_size=12))
def test_whatever_happens_a_run_commits_only_after_its_yes(events: list[Event]) -> None:
    phase, votes, found = Phase.STAGING, [], 0
    for event in events:
        try:
            before, phase = phase, step(phase, event)
        except ProtocolError:
            continue
        found += event is Event.YES_FOUND
        votes += ["yes"] if event in (Event.VOTED_YES, Event.VOTE_UNCERTAIN) else ["no"] if votes_no(before, event) else []
    assert len(votes) <= 1
    if phase is Phase.COMMITTED:
        assert votes == ["yes"] or found == 1


@pytest.mark.parametrize(("phase", "until"), list(product(Phase, ORDER)))
def test_a_phase_is_reached_when_it_or_a_later_one_is(phase: Phase, until: Phase) -> None:
    assert reached(phase, until) == (phase in ORDER and LEVEL[phase] >= LEVEL[until])


def test_a_save_that_a_newer_start_ended_is_shown_as_fenced_and_no_other() -> None:
    for phase in Phase:
        fenced = shown(phase, "FencedError")
        assert fenced == ("committed" if phase is Phase.COMMITTED else "fenced")
        assert shown(phase, "AbortedError") == shown(phase) != "fenced"
    assert (shown(Phase.FAILING), shown(Phase.SKIPPING), shown(Phase.ABORTED)) == ("failed", "skipped", "aborted")


def generated(code: str) -> subprocess.CompletedProcess[str]:
    """Run docs/generate.py --check as a program, after `code`, which may change the module."""
    program = f"import sys, generate\nsys.argv[1:] = ['--check']\n{code}\nsys.exit(generate.main())"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'docs'}:{ROOT}"}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


def test_the_page_of_the_table_is_up_to_date() -> None:
    done = generated("")
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_not_up_to_date_is_noticed() -> None:
    done = generated("generate.HEAD = generate.HEAD.replace('failed', 'lost', 1)")
    assert done.returncode == 1
    assert "run `make generate`" in done.stderr
