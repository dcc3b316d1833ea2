"""Which checkpoints are due, which exports go, and what is in the way."""

from __future__ import annotations

import msgspec
import pytest

from checkpointd.config import ExportConfig
from checkpointd.export.planning import planned
from checkpointd.export.record import ExportRecord
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt, ReadBackState
from checkpointd.layout.manifest import BallotRef, WriterIdentity

ROOT = "/ckpts/run1"


def checkpoint(step: int, *, k: int = 0, number: int | None = None, read_back: ReadBackState = "no") -> LoggedAttempt:
    attempt, n = AttemptId(1, k), step if number is None else number
    commit = CommitRecord(
        attempt=f"t{step}/{attempt}",
        n=n,
        step=step,
        world_size=1,
        ballot=BallotRef(digest=f"{(1, n)}", size=1),
        decided_by=0,
        writer=WriterIdentity(host="h", pid=1, time=""),
    )
    one = LoggedAttempt.of(commit)
    return msgspec.structs.replace(one, verified=read_back == "whole", damaged="damaged" if read_back == "damaged" else "")


def record(of: LoggedAttempt, **changes: object) -> ExportRecord:
    found = ExportRecord(
        complete=True,
        root=ROOT,
        tag=of.tag,
        attempt=str(of.id),
        order=of.commit.order,
        ballot=of.commit.ballot.digest,
        step=of.commit.step,
        only="model",
        dtype="keep",
        bytes=1,
        files=("model.safetensors",),
        release="0",
        time="",
    )
    return msgspec.structs.replace(found, **changes)  # type: ignore[arg-type]


NEWEST_FIRST = [checkpoint(step) for step in (60, 50, 40, 30, 20, 10)]


@pytest.mark.parametrize(
    ("rule", "there", "due", "going"),
    [
        ({}, (), (60, 50, 40, 30, 20, 10), ()),
        ({}, (60, 20), (50, 40, 30, 10), ()),
        ({"every_steps": 20}, (40,), (60, 20), ()),
        ({"every_steps": 7}, (), (), ()),
        ({"keep_last": 2}, (), (60, 50), ()),
        ({"keep_last": 2}, (60, 30, 20), (50,), (20,)),  # 30 stays until 50 is there
        ({"keep_last": 1}, (60, 50, 10), (), (10, 50)),
        ({"every_steps": 20, "keep_last": 2}, (20,), (60, 40), ()),
        ({"keep_last": 6}, (60, 55), (50, 40, 30, 20), ()),  # the root has no 55 any more; 10 would be let go at once
        ({"keep_last": 2}, (95, 90, 60), (50,), ()),  # of a root that was there before
    ],
)
def test_export_4_the_rule_chooses(
    rule: dict[str, int], there: tuple[int, ...], due: tuple[int, ...], going: tuple[int, ...]
) -> None:
    records = {f"t{step}": record(checkpoint(step)) for step in there}
    agenda = planned(NEWEST_FIRST, records, ExportConfig(to="/m", **rule), ROOT)  # type: ignore[arg-type]
    assert (tuple(one.commit.step for one in agenda.due), tuple(one.step for one in agenda.going)) == (due, going)
    assert agenda.blocked == ()


def test_a_checkpoint_that_is_damaged_or_was_tried_is_not_due() -> None:
    found = [checkpoint(3, read_back="damaged"), checkpoint(2), checkpoint(1, read_back="whole")]
    assert [one.tag for one in planned(found, {}, ExportConfig(to="/m"), ROOT, {"t2/00000001-0"}).due] == ["t1"]


def test_a_copy_of_an_export_counts_for_nothing_and_is_in_the_way_of_its_name() -> None:
    there = {"t60": record(checkpoint(60)), "best": record(checkpoint(60)), "t50": record(checkpoint(10))}
    agenda = planned(NEWEST_FIRST, there, ExportConfig(to="/m", keep_last=2), ROOT)
    assert ([one.tag for one in agenda.blocked], agenda.due, agenda.going) == (["t50"], (), ())


def test_a_tag_that_was_saved_again_is_due_although_its_older_export_is_there() -> None:
    again = checkpoint(10, k=1, number=70)
    agenda = planned([again, *NEWEST_FIRST[:-1]], {"t10": record(checkpoint(10))}, ExportConfig(to="/m", keep_last=1), ROOT)
    assert [one.id.k for one in agenda.due] == [1]
    assert agenda.going == ()


@pytest.mark.parametrize(
    ("found", "is_due", "is_blocked"),
    [
        (None, False, True),  # no export
        (record(checkpoint(10), root="/other", attempt="00000009-0"), False, True),
        (record(checkpoint(10), root="/other", complete=False), False, True),
        (record(checkpoint(10), root="/other"), False, False),  # the root was moved: it is the same checkpoint
        (record(checkpoint(10), complete=False), True, False),  # a process was killed
        (record(checkpoint(10), ballot="another"), True, False),  # the root was made anew at its old place
    ],
)
def test_what_lies_in_the_place(found: ExportRecord | None, is_due: bool, is_blocked: bool) -> None:
    agenda = planned([checkpoint(10)], {"t10": found}, ExportConfig(to="/m"), ROOT)
    assert (bool(agenda.due), bool(agenda.blocked)) == (is_due, is_blocked)


def test_what_is_left_of_an_export_that_is_not_due_any_more_goes() -> None:
    begun = {f"t{step}": record(checkpoint(step), complete=False) for step in (60, 5)}
    begun["t7"] = record(checkpoint(7), complete=False, root="/other")
    agenda = planned(NEWEST_FIRST, begun, ExportConfig(to="/m"), ROOT)
    assert agenda.due[0].tag == "t60"
    assert [one.tag for one in agenda.going] == ["t5"]


def test_a_root_in_a_bucket_is_the_same_whatever_its_options() -> None:
    there = {"t10": record(checkpoint(10), root="s3://bucket/run?endpoint=http://a", ballot="older")}
    agenda = planned([checkpoint(10)], there, ExportConfig(to="/m"), "s3://bucket/run?endpoint=http://b")
    assert len(agenda.due) == 1
