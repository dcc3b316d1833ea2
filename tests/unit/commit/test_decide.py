"""DECIDE-1 and DECIDE-2 of commit/decide.py: from votes to an outcome, and what the words of an abort say."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.commit import decide as decisions
from checkpointd.commit.decide import deadline, decide, recover, unshared
from checkpointd.layout.keys import index_name
from checkpointd.layout.manifest import RANKS_AT_FAULT_MAX, ErrorReport, IndexRef, PlanRef, Vote, WriterIdentity, digest

TAG, ATTEMPT = "global_step1", "00000003-0"
WRITER = WriterIdentity(host="node0", pid=1, time="2026-01-01T00:00:00.000+00:00")
Votes = dict[int, Vote | None]


def yes(rank: int, world_size: int = 3) -> Vote:
    return Vote(
        tag=TAG,
        attempt=ATTEMPT,
        rank=rank,
        world_size=world_size,
        step=1,
        n=0,
        save_latest=True,
        vote="yes",
        index=IndexRef(name=index_name(rank), size=10, digest=digest(b""), plan=PlanRef(size=5, digest=digest(b"plan"))),
        writer=WRITER,
    )


def no(rank: int, message: str = "no space", *, code: str = "StoreFullError", world_size: int = 3) -> Vote:
    report = ErrorReport(code=code, message=message, phase="persisting")
    return msgspec.structs.replace(yes(rank, world_size), vote="no", index=None, error=report)


def of(votes: Votes, world_size: int = 3) -> decisions.Decision | None:
    return decide(votes, tag=TAG, attempt=ATTEMPT, world_size=world_size)


def words(decision: decisions.Decision | None) -> str:
    assert decision is not None
    assert decision.error is not None
    return decision.error.message


FAULTY: dict[str, Vote | None] = {
    "unreadable": None,
    "another rank's": yes(0),
    "another tag's": msgspec.structs.replace(yes(1), tag="global_step2"),
    "another attempt's": msgspec.structs.replace(yes(1), attempt="00000002-0"),
    "of another world": yes(1, world_size=2),
    "without an index": msgspec.structs.replace(yes(1), index=None),
}


@given(st.integers(1, 6), st.data())
def test_decide_1_and_2_for_any_votes(world_size: int, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["yes", "no", "bad", "missing"]), min_size=world_size, max_size=world_size))
    votes: Votes = {}
    for rank, kind in enumerate(kinds):
        if kind != "missing":
            votes[rank] = {"yes": yes(rank, world_size), "no": no(rank, world_size=world_size), "bad": None}[kind]
    decision = of(votes, world_size)
    if {"no", "bad"} & set(kinds):
        assert decision is not None
        assert not decision.commit
        wanted = "bad" if "bad" in kinds else "no"
        assert decision.ranks == tuple(rank for rank, kind in enumerate(kinds) if kind == wanted)
    elif "missing" in kinds:
        assert decision is None
    else:
        assert decision is not None
        assert decision.commit


@pytest.mark.parametrize("name", FAULTY)
def test_decide_1_a_vote_that_is_not_valid_aborts_at_once_and_is_named(name: str) -> None:
    decision = of({1: FAULTY[name]})
    assert words(decision).startswith("the vote of rank 1 ")
    assert decision is not None
    assert decision.ranks == (1,)


def test_decide_1_votes_of_ranks_that_do_not_exist_never_fill_the_number() -> None:
    assert words(of({0: yes(0), 1: yes(1), 7: yes(7)})) == "the vote of rank 7 is that of a rank that 3 ranks do not have"
    assert words(of({0: yes(0), 1: yes(1), -1: yes(-1)})) == "the vote of rank -1 is that of a rank that 3 ranks do not have"


def test_a_no_carries_its_error_and_rank() -> None:
    decision = of({0: yes(0), 2: no(2)})
    assert words(decision) == "rank 2 failed while persisting: no space"
    assert decision is not None
    assert decision.error is not None
    assert (decision.error.code, decision.error.phase, decision.ranks) == ("StoreFullError", "persisting", (2,))


def test_a_failure_is_told_before_a_skip_and_the_others_are_counted() -> None:
    decision = of({0: no(0, "busy", code="SkippedError"), 1: no(1, "disk gone", code="StoreError"), 2: no(2)})
    assert words(decision) == "rank 1 failed while persisting: disk gone (and 2 more ranks voted no)"
    assert words(of({0: no(0, "busy", code="SkippedError")})) == "rank 0 failed while persisting: busy"


def test_a_no_without_a_reason_aborts_all_the_same() -> None:
    assert words(of({1: msgspec.structs.replace(no(1), error=None)})) == "rank 1 voted no without a reason"


def test_the_deadline_names_who_is_missing_how_far_they_are_and_what_to_do() -> None:
    decision = deadline({2: "had begun to write", 1: ""}, timeout_s=30)
    assert words(decision) == (
        "no vote from rank 1, rank 2 (had begun to write) within 30 s: every rank must call save() for the same step and tag; "
        "the next save starts afresh"
    )
    assert decision.error is not None
    assert (decision.error.code, decision.ranks) == ("DeadlineError", (1, 2))


def test_the_deadline_of_a_large_job_names_eight_and_counts_the_rest() -> None:
    decision = deadline(dict.fromkeys(range(1000), ""), timeout_s=600)
    assert "rank 7 and 992 more within 600 s" in words(decision)
    assert len(decision.ranks) == RANKS_AT_FAULT_MAX == 64


def test_ranks_that_describe_the_state_differently_abort() -> None:
    assert words(unshared("w is float32[4] on rank 0")) == "the ranks do not describe one state: w is float32[4] on rank 0"


# --- recovery ----------------------------------------------------------------------------------------------------------


def recovered(votes: Votes) -> decisions.Decision:
    return recover(votes, tag=TAG, attempt=ATTEMPT)


def test_recovery_aborts_where_votes_are_missing_since_nobody_will_vote_any_more() -> None:
    decision = recovered({1: yes(1)})
    assert words(decision) == "the job ended before the attempt was decided: ranks 0, 2 had not voted"
    assert decision.ranks == (0, 2)
