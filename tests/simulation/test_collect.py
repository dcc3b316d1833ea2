"""Collection loses nothing: jobs with retention, with collectors beside them, and with saves that refer to what these remove.

COLLECT-1 and COLLECT-2 of `pipeline/gc/collect.py` and LOG-10. Their mutations are in `test_job_mutations.py`.
"""

from __future__ import annotations

from typing import Any, cast

import pytest

from checkpointd.layout.log_records import RemoveRecord
from checkpointd.pipeline.gc.collect import DELETED_BY_NAME, DELETED_WITH_TAG
from checkpointd.testing.job.simjob import run_schedule
from checkpointd.testing.job.simlog import InvariantError, LogWatch
from checkpointd.testing.job.simrank import JobConfig
from checkpointd.testing.job.simschedule import Kill, PowerCut, Schedule
from tests.model.processes import WRITER, announce, checkpoint, commit, state_of
from tests.model.promises import NAMES, X, Y

# Thousands of runs in virtual time: a busy machine needs minutes for the largest.
pytestmark = pytest.mark.timeout(600)


def test_power_cut_at_effects_of_a_job_with_retention_and_a_collector(stride: int) -> None:
    job = JobConfig(seed=2, world_size=2, steps=2, frozen=True, keeps=1, collectors=1)
    for number in range(1, 400, 5 * stride):
        run_schedule(Schedule(job=job, faults=((number, PowerCut()),)))


def test_kill_of_whoever_acts_in_a_job_with_retention_and_collectors(stride: int) -> None:
    job = JobConfig(seed=3, world_size=2, steps=2, frozen=True, keeps=1, collectors=2)
    for number in range(1, 400, 5 * stride):
        run_schedule(Schedule(job=job, faults=((number, Kill()),)))


@pytest.mark.parametrize("reason", [DELETED_BY_NAME, DELETED_WITH_TAG, "retention keeps the last 1"])
def test_the_watch_asks_of_rules_alone_that_what_stays_was_read_back(reason: str) -> None:
    """Of two commits of a tag that a person deletes, somebody else may have removed the newer one meanwhile."""
    state = state_of(*checkpoint(X), announce(Y), commit(Y))
    watch = LogWatch(cast(Any, None), retires=True)
    going = RemoveRecord(attempts=(NAMES[X],), reason=reason, writer=WRITER)
    if reason in (DELETED_BY_NAME, DELETED_WITH_TAG):
        watch._check_removal(state, going, "gc")
    else:
        with pytest.raises(InvariantError, match=r"removed-newer.*verified"):
            watch._check_removal(state, going, "gc")
