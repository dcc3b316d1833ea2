"""How a root does, from what the daemon knows of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec
import pytest

from checkpointd.daemon.status.model import RankStatus, RootStatus, SaveStatus, State
from checkpointd.daemon.status.verdict import about, attention, judged, rhythm_of
from checkpointd.layout.manifest import ErrorReport, Inline
from tests.unit.daemon.example_statuses import NOW, busy, checkpoints, failing, rank_status, root_status, save

FULL = ErrorReport(code="StoreFullError", message="no space is left", phase="persisting")


def committed(*began: float, rank: int = 0) -> list[SaveStatus]:
    return [save(rank, 100 * (at + 1), began=moment) for at, moment in enumerate(began)]


def failed(began: float, *, step: int = 900, phase: str = "failed", rank: int = 0) -> SaveStatus:
    return save(rank, step, began=began, phase=phase, error=FULL)


def root(ranks: Sequence[RankStatus] | None = None, recent: Iterable[SaveStatus] = (), **changed: Any) -> RootStatus:
    """A root whose newest commit is that of `recent`, without what other runs left there."""
    recent = list(recent)
    made = root_status("/r", ranks=[rank_status(0, 1)] if ranks is None else ranks, recent=recent)
    last = max((one.ended_at for one in recent if one.phase == "committed" and one.ended_at), default=None)
    return msgspec.structs.replace(
        made, **{"checkpoints": (), "history": (), "commit_s": (), "newest_committed_at": last, **changed}
    )


def said(found: RootStatus, now: float = NOW) -> tuple[str, str]:
    verdict = judged(found, now).verdict
    return verdict.state, verdict.mood


def gone(*ranks: int, world: int = 2, well: bool = False) -> list[RankStatus]:
    return [rank_status(r, world, connected=r not in ranks, left_well=well and r in ranks) for r in range(world)]


def test_a_root_that_saves_is_healthy() -> None:
    assert said(root(recent=committed(NOW - 100))) == ("healthy", "good")
    assert judged(root(recent=committed(NOW - 100)), NOW).verdict.reason == "The last save was committed"


def test_a_save_that_the_trainer_persisted_itself_is_said() -> None:
    inline = Inline(reason="refused", why="no room")
    found = judged(root(recent=[msgspec.structs.replace(one, inline=inline) for one in committed(NOW - 100)]), NOW)
    assert (
        found.verdict.reason
        == "The last save was committed; the trainers persisted it themselves, since the sidecar refused it"
    )


def test_a_first_save_that_has_not_come_is_not_bad() -> None:
    assert said(root()) == ("healthy", "good")
    assert judged(root(), NOW).verdict.reason == "The trainers are connected; nothing was saved yet"


def test_what_the_run_before_committed_is_not_this_ones() -> None:
    found = judged(root(newest_committed_at=NOW - 9000), NOW)
    assert found.verdict.reason == "The trainers are connected; they have not saved since they began"


def test_the_last_saves_that_did_not_commit_are_counted() -> None:
    found = judged(root(recent=[*committed(NOW - 900), failed(NOW - 600, step=500), failed(NOW - 300, step=600)]), NOW)
    assert (found.verdict.state, found.verdict.mood) == ("failing", "bad")
    said = "The last 2 saves did not commit: rank 0 failed: no space is left; nothing was committed since 2026-09-21T13:58:25Z"
    assert found.verdict.reason == said


def test_a_commit_after_a_failure_makes_it_healthy() -> None:
    assert said(root(recent=[failed(NOW - 600), *committed(NOW - 300)])) == ("healthy", "good")


def test_a_commit_that_another_node_saw_makes_it_healthy() -> None:
    assert said(root(recent=[failed(NOW - 600)], newest_committed_at=NOW - 100)) == ("healthy", "good")


def test_the_rank_that_failed_by_itself_is_named_first() -> None:
    recent = [failed(NOW - 60, phase="aborted"), failed(NOW - 60, rank=1)]
    assert "rank 1 failed" in judged(root([rank_status(r, 2) for r in range(2)], recent), NOW).verdict.reason


def skipped(began: float, *, step: int = 900, phase: str = "skipped", code: str = "SkippedError") -> SaveStatus:
    return save(0, step, began=began, phase=phase, error=ErrorReport(code=code, message="two saves are still in flight"))


def test_saves_that_were_left_out_on_purpose_are_counted_and_are_no_failure() -> None:
    left_out = [skipped(NOW - 50, step=300), skipped(NOW - 40, step=400, phase="superseded", code="SupersededError")]
    found = judged(root(recent=[*committed(NOW - 60), *left_out]), NOW)
    assert (found.verdict.state, found.verdict.mood) == ("healthy", "good")
    assert found.verdict.reason == "The last save was committed; 2 saves were skipped or replaced since then"


@pytest.mark.parametrize(
    ("phase", "code"), [("skipped", "DeadlineError"), ("superseded", "StoreError"), ("aborted", "DeadlineError")]
)
def test_a_save_counts_as_left_out_by_its_error_and_not_by_its_phase(phase: str, code: str) -> None:
    found = judged(root(recent=[*committed(NOW - 300), skipped(NOW - 50, phase=phase, code=code)]), NOW)
    assert (found.verdict.state, found.verdict.mood) == ("failing", "bad")


def test_a_failure_between_saves_that_were_skipped_counts_with_them() -> None:
    recent = [*committed(NOW - 900), failed(NOW - 700), *(skipped(NOW - 600 + at, step=1000 + at) for at in range(3))]
    reason = judged(root(recent=recent), NOW).verdict.reason
    assert reason.startswith(
        "The last 4 saves did not commit: rank 0 failed: no space is left; nothing was committed since 2026-"
    )


def live(began: float, *, step: int = 900, phase: str = "prepared", rank: int = 0) -> SaveStatus:
    return save(rank, step, began=began, phase=phase)


def test_what_is_in_flight_is_named_in_every_state() -> None:
    flying = [live(NOW - 20, step=901), live(NOW - 10, step=902)]
    words = "2 saves are in flight, global_step901 since 2026-09-21T14:13:00Z"
    for recent in (committed(NOW - 100), [*committed(NOW - 100), failed(NOW - 50)], []):
        assert words in judged(root(recent=recent, in_flight=tuple(flying)), NOW).verdict.reason
    assert words in judged(root(gone(1), committed(NOW - 100), in_flight=tuple(flying)), NOW).verdict.reason


def test_a_job_whose_saves_never_come_to_an_end_is_late() -> None:
    """Saves are asked for as ever, so the next one is never overdue; no vote comes from a rank that hangs on another node."""
    recent, skips = (
        committed(*(NOW - 1000 + 60 * at for at in range(8))),
        [skipped(NOW - 300 + 60 * at, step=950 + at) for at in range(5)],
    )
    found = judged(root(recent=[*recent, *skips], in_flight=(live(NOW - 420), live(NOW - 360, step=940))), NOW)
    assert (found.verdict.state, found.verdict.mood) == ("late", "doubt")
    assert found.verdict.reason == (
        "Nothing was committed since 2026-09-21T14:03:45Z, although 7 saves were asked for; 5 saves were skipped or replaced "
        "since then; 2 saves are in flight, global_step900 since 2026-09-21T14:06:20Z"
    )


def test_a_commit_that_takes_as_long_as_commits_take_is_not_late() -> None:
    slow = [save(0, 100, began=NOW - 2000, persisting=600.0)]
    assert said(root(recent=slow, in_flight=(live(NOW - 700),)))[0] == "healthy"
    assert said(root(recent=slow, in_flight=(live(NOW - 1000),)))[0] == "late"


def test_a_first_commit_that_does_not_come_and_what_lies_in_the_spool_are_not_late() -> None:
    assert said(root(in_flight=(live(NOW - 5000),)))[0] == "healthy"
    in_spool = msgspec.structs.replace(live(NOW - 5000), phase="spooled")
    assert said(root(recent=committed(NOW - 9000), in_flight=(in_spool,)))[0] == "healthy"


def test_saves_that_are_skipped_for_ever_while_nothing_is_in_flight_are_late() -> None:
    recent = committed(*(NOW - 1000 + 60 * at for at in range(5)))
    skips = [skipped(NOW - 700 + 60 * at, step=950 + at) for at in range(11)]
    assert said(root(recent=[*recent, *skips]))[0] == "late"


def test_a_job_that_skips_most_saves_is_not_late() -> None:
    """With when_busy="space", say: a commit each ten minutes, and a save each half minute."""
    ranks = [msgspec.structs.replace(rank_status(0, 1), since=NOW - 9000)]
    recent = committed(*(NOW - 2500 + 600 * at for at in range(5)))
    skips = [skipped(NOW - 1900 + 30 * at, step=5000 + at) for at in range(1, 64) if at % 20]
    assert said(root(ranks, sorted([*recent, *skips], key=lambda one: one.began_at))) == ("healthy", "good")


def test_a_long_cause_hides_neither_what_is_in_flight_nor_since_when_nothing_was_committed() -> None:
    long = msgspec.structs.replace(failed(NOW - 50, step=800), error=ErrorReport(code="StoreError", message="x" * 900))
    reason = judged(root(recent=[*committed(NOW - 100), long], in_flight=(live(NOW - 10),)), NOW).verdict.reason
    assert "…; nothing was committed since 2026-" in reason
    assert reason.endswith("global_step900 is in flight since 2026-09-21T14:13:10Z")


def test_a_trainer_that_was_killed_is_gone() -> None:
    found = judged(root(gone(1)), NOW)
    assert (found.verdict.state, found.verdict.mood) == ("trainers gone", "bad")
    assert found.verdict.reason == "The trainer of rank 1 went without closing the Checkpointer"


def test_trainers_that_closed_are_not_gone() -> None:
    assert said(root(gone(0, 1, well=True))) == ("closed", "quiet")
    assert said(root(gone(1, well=True))) == ("healthy", "good")


def test_a_job_that_closed_after_a_failure_should_be_looked_at() -> None:
    assert said(root(gone(0, 1, well=True), [failed(NOW - 60)])) == ("closed", "doubt")


def test_ranks_of_a_larger_run_before_are_not_missed() -> None:
    old = [msgspec.structs.replace(rank, since=NOW - 90_000, start=2) for rank in gone(2, 3, world=4)[2:]]
    assert said(root([*(rank_status(r, 2) for r in range(2)), *old])) == ("healthy", "good")


def of_run(ranks: Sequence[RankStatus], start: int | None, *, since: float, gone_at: float | None = None) -> list[RankStatus]:
    return [msgspec.structs.replace(rank, start=start, since=since, gone_at=gone_at) for rank in ranks]


@pytest.mark.parametrize(("well", "state"), [(None, "healthy"), (True, "closed"), (False, "trainers gone")])
def test_ranks_that_another_node_took_over_are_not_missed(well: bool | None, state: str) -> None:
    """Ranks 0 and 1 were killed here, and run elsewhere since; 2 and 3 came here, and then perhaps ended."""
    before = of_run(gone(0, 1, world=4)[:2], 3, since=NOW - 7000, gone_at=NOW - 3000)
    here = [rank_status(r, 4, connected=well is None, left_well=bool(well)) for r in (2, 3)]
    found = judged(root([*before, *of_run(here, 4, since=NOW - 2900)]), NOW)
    assert found.verdict.state == state
    assert [rank.rank for rank in found.ranks] == [2, 3]


def test_a_rank_of_the_same_run_is_missed_whenever_the_others_came() -> None:
    gone_first = of_run(gone(0)[:1], 4, since=NOW - 200, gone_at=NOW - 100)
    assert said(root([*gone_first, *of_run([rank_status(1, 2)], 4, since=NOW - 50)])) == ("trainers gone", "bad")


def test_a_root_that_was_made_again_begins_its_starts_anew() -> None:
    before = of_run(gone(0)[:1], 7, since=NOW - 7000, gone_at=NOW - 3000)
    assert said(root([*before, *of_run([rank_status(1, 2)], 1, since=NOW - 50)])) == ("healthy", "good")


def test_a_trainer_that_went_before_it_had_begun_is_missed_until_the_next_run() -> None:
    first = of_run(gone(0)[:1], None, since=NOW - 200, gone_at=NOW - 100)
    beside, later = of_run([rank_status(1, 2)], 4, since=NOW - 150), of_run([rank_status(1, 2)], 5, since=NOW - 50)
    assert said(root([*first, *beside])) == ("trainers gone", "bad")
    assert said(root([*first, *later])) == ("healthy", "good")


def test_a_save_that_does_not_come_is_late() -> None:
    recent = committed(NOW - 2800, NOW - 2200, NOW - 1600)
    found = judged(root(recent=recent), NOW - 1000)
    assert (found.every_s, found.next_due_at) == (600, NOW - 1000)
    assert found.verdict.state == "healthy"
    assert said(root(recent=recent), NOW - 1600 + 901) == ("late", "doubt")
    assert judged(root(recent=recent), NOW).verdict.reason == "The next save is overdue: the last ones came every 10 min"


def test_one_interval_says_nothing() -> None:
    found = judged(root(recent=committed(NOW - 7000, NOW - 6400)), NOW)
    assert (found.every_s, found.next_due_at) == (None, None)
    assert found.verdict.state == "healthy"


def test_the_longest_interval_is_waited_for() -> None:
    recent = committed(NOW - 6000, NOW - 5900, NOW - 5800, NOW - 5700, NOW - 3700, NOW - 3600)
    assert said(root(recent=recent), NOW - 3600 + 2900) == ("healthy", "good")
    assert said(root(recent=recent), NOW - 3600 + 3001) == ("late", "doubt")


def test_the_time_between_two_runs_is_no_interval() -> None:
    ranks = [msgspec.structs.replace(rank_status(0, 1), since=NOW - 1300)]
    recent = committed(NOW - 90_000, NOW - 89_400, NOW - 88_800, NOW - 1200, NOW - 600)
    found = judged(root(ranks, recent), NOW)
    assert (found.every_s, found.next_due_at) == (600, NOW)


def test_after_a_restart_of_the_daemon_the_store_knows_the_rhythm() -> None:
    found = judged(root(checkpoints=checkpoints(800, 8, 1)), NOW)
    assert found.every_s == 600
    assert found.next_due_at == NOW - 93 + 600


def test_trainers_that_are_gone_are_not_late() -> None:
    found = judged(root(gone(0, 1, well=True), committed(NOW - 2800, NOW - 2200, NOW - 1600)), NOW)
    assert (found.verdict.state, found.next_due_at) == ("closed", None)


def test_what_cannot_be_looked_at_comes_before_all() -> None:
    assert said(root(problem=FULL, recent=[failed(NOW - 60)])) == ("unreadable", "bad")


def test_a_newest_checkpoint_that_is_damaged() -> None:
    [one] = checkpoints(100, 1, 1)
    assert said(root(checkpoints=(msgspec.structs.replace(one, read_back="damaged"),))) == ("damaged", "bad")


def test_a_root_that_only_lies_on_disk_is_idle() -> None:
    assert said(root([])) == ("idle", "quiet")


def test_what_needs_a_look_comes_first_then_what_saves() -> None:
    def named(name: str, found: RootStatus) -> RootStatus:
        return judged(msgspec.structs.replace(found, root=name), NOW)

    flying = save(0, 300, began=NOW - 1, phase="persisting", done=0.5)
    found = [
        named("a", root([])),
        named("b", root(gone(0, 1, well=True))),
        named("c", root(recent=committed(NOW - 100))),
        named("d", msgspec.structs.replace(root(), in_flight=(flying,))),
        named("e", root(recent=committed(NOW - 2800, NOW - 2200, NOW - 1600))),
        named("f", root(gone(1))),
        named("g", root(recent=[failed(NOW - 60)])),
        named("h", root(problem=FULL)),
    ]
    assert [one.root for one in sorted(found, key=attention)] == ["h", "g", "f", "e", "d", "c", "b", "a"]


def test_a_reason_is_one_short_sentence_and_the_same_later() -> None:
    long = msgspec.structs.replace(failed(NOW - 60), error=msgspec.structs.replace(FULL, message="x" * 5000))
    assert len(judged(root(recent=[long]), NOW).verdict.reason) == 300
    for found in (*busy(8).roots, *failing().roots, root(gone(1))):
        assert judged(found, NOW).verdict == judged(found, NOW + 1).verdict
        assert judged(found, NOW).verdict.state in get_args(State)


def test_rhythm_needs_nothing_else() -> None:
    assert rhythm_of(root([])) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.25, "250 ms"),
        (9, "9.0 s"),
        (45, "45 s"),
        (100, "100 s"),
        (118, "2 min"),
        (600, "10 min"),
        (9000, "2.5 h"),
        (2e5, "2.3 d"),
    ],
)
def test_about(seconds: float, words: str) -> None:
    assert about(seconds) == words
