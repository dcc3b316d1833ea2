"""The words of an attempt that has no outcome on this rank."""

from __future__ import annotations

from checkpointd.errors import FencedError
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.attempt_errors import lost_error
from checkpointd.pipeline.shard import AttemptInfo


def test_a_newer_start_that_is_found_twice_is_told_once() -> None:
    """Once by the look before the shard, and again by the look before the no."""
    info = AttemptInfo(tag="t", attempt=AttemptId(1, 0), rank=1, world_size=2, step=1, n=0)
    told = {
        str(lost_error(info, own, FencedError("another job has taken over")))
        for own in (FencedError("another job has taken over"), None)
    }
    assert "t/00000001-0 failed: another job has taken over" in told
    other = lost_error(info, OSError("the copy was torn"), FencedError("another job has taken over"))
    assert "the copy was torn; the failure could not be stored for the other ranks (another job" in str(other)
