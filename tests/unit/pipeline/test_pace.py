"""PACE-1 to PACE-3 of pace.py: when a save rests, and for how long."""

from __future__ import annotations

import time

import pytest

from checkpointd.pipeline.pace import REST_S_MAX, Pace, rest_s
from checkpointd.pipeline.shard import ShardProgress
from checkpointd.testing import simloop


@pytest.mark.parametrize(
    ("busy_s", "share", "needed_s", "left_s", "rests_s"),
    [
        (0.01, 1.0, 1.0, 100.0, 0.0),
        (0.01, 0.5, 1.0, 100.0, 0.01),
        (0.01, 0.25, None, 100.0, 0.03),
        (1.0, 0.05, 1.0, 100.0, REST_S_MAX),
        (0.01, 0.5, 70.0, 100.0, 0.0),  # late: a reserve stays
        (0.01, 0.5, None, 0.0, 0.0),
        (0.01, 0.5, 0.0, -1.0, 0.0),
    ],
)
def test_pace_1_a_save_rests_by_its_share_unless_it_would_be_late(
    busy_s: float, share: float, needed_s: float | None, left_s: float, rests_s: float
) -> None:
    assert rest_s(busy_s, share, needed_s=needed_s, left_s=left_s) == pytest.approx(rests_s)


def test_pace_1_why_a_save_goes_at_full_speed_is_said() -> None:
    pace = Pace(share=0.5, until=time.monotonic() + 1000)
    assert pace.rest_after(0.01, 1.0) == pytest.approx(0.01)
    assert pace.reason == ""
    assert pace.rest_after(0.01, 1e6) == 0.0
    assert pace.reason == "late"
    assert pace.rest_after(0.01, 1.0) > 0.0
    assert pace.rest_after(0.0, 1.0) == 0.0
    assert pace.reason == ""
    pace.lift("awaited")
    assert pace.rest_after(0.01, 1.0) == 0.0
    assert pace.reason == "awaited"


def test_pace_3_the_background_copy_rests_only_while_it_ends_in_time() -> None:
    pace = Pace(share=0.5, copy_until=time.monotonic() + 1000)
    assert pace.copy_rest_after(0.01, 1.0) == pytest.approx(0.01)
    assert pace.copy_rest_after(0.01, 900.0) == 0.0
    assert Pace(share=1.0, copy_until=time.monotonic() + 1000).copy_rest_after(0.01, 1.0) == 0.0
    assert Pace(share=0.5).copy_rest_after(0.01, 1.0) == 0.0
    pace.hurry_copy()
    assert pace.copy_rest_after(0.01, 1.0) == 0.0
    assert pace.rest_after(0.01, None) > 0.0


def test_rests_are_added_up_and_full_speed_rests_never() -> None:
    async def main() -> None:
        slow, fast = ShardProgress(pace=Pace(share=0.2)), ShardProgress()
        for progress in (slow, fast):
            for _ in range(10):
                await progress.rest(0.01)
        assert slow.pace.rested_s == pytest.approx(0.4)
        assert fast.pace.rested_s == 0.0

    simloop.run(0, main())
