"""TIDY-2 of room.py: what counts beside the checkpoints that stay, as the log has it."""

from __future__ import annotations

import pytest

from checkpointd.commit.log import apply, check
from checkpointd.commit.retention import Retention
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import (
    AbortRecord,
    AnnounceRecord,
    BeginRecord,
    CommitRecord,
    LogState,
    Record,
    RemoveRecord,
    SweepRecord,
    VerifyRecord,
)
from checkpointd.layout.manifest import NO_REASON, BallotRef
from checkpointd.layout.save_timings import Cost
from checkpointd.pipeline.gc import room
from checkpointd.pipeline.gc.room import has_room, room_use
from checkpointd.pipeline.shard import AttemptInfo
from tests.lease_builders import SINCE

LARGE = 1 << 40
NEXT = AttemptInfo(tag="t100", attempt=AttemptId(1, 0), rank=0, world_size=1, step=100, n=100)
LAST = Retention(keep_last=1)


def name(n: int, tag: str = "") -> str:
    return f"{tag}/{AttemptId(1, n)}" if tag else f"t{n}/{AttemptId(1, 0)}"


def announced(n: int, tag: str = "", base: str = "") -> AnnounceRecord:
    return AnnounceRecord(attempt=name(n, tag), n=n, step=n, base=base)


def committed(n: int, tag: str = "", nbytes: int = LARGE) -> list[Record]:
    cost = Cost(written_bytes=nbytes)
    ballot = BallotRef(size=1, digest="0" * 32)
    commit = CommitRecord(attempt=name(n, tag), n=n, step=n, world_size=1, ballot=ballot, cost=cost, decided_by=0, writer=SINCE)
    return [announced(n, tag), commit]


def aborted(n: int) -> list[Record]:
    return [announced(n), AbortRecord(attempt=name(n), error=NO_REASON, decided_by=0, writer=SINCE)]


def removed(n: int) -> RemoveRecord:
    return RemoveRecord(attempts=(name(n),), reason="no rule keeps it", writer=SINCE)


def state_after(*records: Record) -> LogState:
    state = apply(LogState(), BeginRecord(start=1, nonce="0" * 32, world_size=1, writer=SINCE))
    for record in records:
        assert check(state, record) == ""
        state = apply(state, record)
    return state


STAYS = [*committed(0), VerifyRecord(attempt=name(0), nbytes=1)]


@pytest.mark.parametrize(
    ("records", "count"),
    [
        (STAYS, 0),
        ([*STAYS, announced(1)], 1),
        ([*STAYS, announced(1), announced(2)], 2),
        ([*STAYS, *aborted(1)], 1),
        ([*STAYS, *aborted(1), SweepRecord(attempts=(name(1),))], 0),
        ([*committed(1), *committed(2)], 1),  # one that the rules do not keep
        ([*STAYS, *committed(1)], 1),  # one that stays only because it was verified
        ([*committed(1), *committed(2), removed(1)], 1),
        ([*committed(1), *committed(2), removed(1), SweepRecord(attempts=(name(1),))], 0),
    ],
)
def test_tidy_2_what_counts(records: list[Record], count: int) -> None:
    state = state_after(*records)
    for more in range(room.SPARE + 1):
        full = state_after(*records, *(announced(50 + n) for n in range(more)))
        assert has_room(room_use(full, LAST), LAST, NEXT, LARGE) == (count + more + 1 <= room.SPARE)
    assert len(state.attempts) == len({record.attempt for record in records if isinstance(record, AnnounceRecord)})


def test_tidy_2_ranks_that_lead_count_as_one_until_they_are_more() -> None:
    of_two = AttemptInfo(tag="t100", attempt=AttemptId(1, 0), rank=0, world_size=2, step=100, n=100)
    for begun, is_full in (({}, False), ({"begun": 1.0}, False), ({"begun": 1.0, "too": 1.0}, True)):
        assert has_room(room_use(state_after(), LAST), LAST, of_two, LARGE, begun) is not is_full
    led = room_use(state_after(announced(1)), LAST)
    assert has_room(led, LAST, of_two, LARGE, {"begun": 1.0})
    assert not has_room(led, LAST, of_two, LARGE, {name(1): 1.0, "begun": 1.0})


def test_tidy_2_what_was_announced_already_and_what_did_not_go_do_not_count() -> None:
    own = AnnounceRecord(attempt=NEXT.prefix, n=100, step=100)
    found = room_use(state_after(own, *aborted(1), *aborted(2), *aborted(3)), LAST)
    assert not has_room(found, LAST, NEXT, LARGE)
    assert has_room(found, LAST, NEXT, LARGE, stays={name(1)})
    assert has_room(found, LAST, NEXT, LARGE, only_undecided=True)


def test_tidy_2_without_rules_only_the_same_tag_counts() -> None:
    rules = Retention()
    others = [*(announced(n) for n in range(10)), *aborted(10)]
    assert has_room(room_use(state_after(*others), rules), rules, NEXT, LARGE)
    same = [record for n in range(20, 24) for record in committed(n, NEXT.tag)]
    assert not has_room(room_use(state_after(*others, *same), rules), rules, NEXT, LARGE)
    assert len(room_use(state_after(*same), rules).going) == 3


def test_tidy_2_many_may_be_there_if_they_are_small_together() -> None:
    small = room.SMALL_BYTES // 8
    for count in range(1, 10):
        records = [record for n in range(count) for record in committed(n, nbytes=small)]
        assert has_room(room_use(state_after(*records), LAST), LAST, NEXT, small) == (count <= 8), count
    tiny = [record for n in range(room.SMALL_MAX) for record in committed(n, nbytes=1)]
    assert has_room(room_use(state_after(*tiny), LAST), LAST, NEXT, 1)
    assert not has_room(room_use(state_after(*tiny, announced(99)), LAST), LAST, NEXT, 1)


def test_what_an_undecided_attempt_may_refer_to_counts_and_cannot_go_yet() -> None:
    found = room_use(state_after(*committed(1), announced(2, base=name(1)), *committed(3), removed(1)), LAST)
    assert [one.prefix for one in found.going] == [name(1)]
    assert found.removable == set()
