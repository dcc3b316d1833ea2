"""Measuring a bucket: how much is sent, and what the figures mean."""

from __future__ import annotations

import asyncio
import math

import pytest
from typing_extensions import Buffer

from checkpointd.doctor.bucket import speed
from checkpointd.doctor.finding import StateSize
from tests.unit.store.objects.fake_bucket import FakeBucket

MIB = 1 << 20


def state(nbytes: int) -> StateSize:
    return StateSize(total_bytes=nbytes, node_bytes=nbytes, source="as you say", share_known=True)


@pytest.mark.parametrize(
    ("mib_s", "nbytes", "level", "words"),
    [(100, 1000 * MIB, "ok", "about 10 s"), (100, MIB, "ok", "about 1 s"), (1, 1000 * MIB, "note", "about 1000 s")],
)
def test_a_save_takes_as_long_as_its_bytes(mib_s: int, nbytes: int, level: str, words: str) -> None:
    found = speed.judged(mib_s * MIB, 3 * mib_s * MIB, 64 * MIB, state(nbytes))
    assert found.level == level
    assert words in found.seen
    assert f"upload {mib_s}.0 MiB/s" in found.seen
    assert f"download {3 * mib_s}.0 MiB/s" in found.seen


def test_64_mib_go_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "TRIED_S_MAX", math.inf)
    bucket = FakeBucket()
    assert asyncio.run(speed.throughput(bucket, None)).level == "ok"
    assert {key: len(stored.data) for key, stored in bucket.objects.items()} == {
        "large-16777216": 16 * MIB,
        "large-67108864": 64 * MIB,
    }


def test_a_slow_bucket_gets_no_more_than_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "TRIED_S_MAX", 0.0)
    bucket = FakeBucket()
    assert "16.0 MiB" in asyncio.run(speed.throughput(bucket, None)).seen
    assert len(bucket.objects) == 1


def test_bytes_that_change_on_the_way_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(FakeBucket):
        async def get_range(self, key: str, offset: int, nbytes: int) -> Buffer:
            found = bytearray(memoryview(await super().get_range(key, offset, nbytes)))
            found[-1] ^= 1
            return bytes(found)

    monkeypatch.setattr(speed, "TRIED_S_MAX", 0.0)
    assert asyncio.run(speed.throughput(Changing(), None)).level == "fail"


def test_slow_requests_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SLOW_S", math.inf)
    assert asyncio.run(speed.latency(FakeBucket())).level == "ok"
    monkeypatch.setattr(speed, "SLOW_S", 0.0)
    found = asyncio.run(speed.latency(FakeBucket()))
    assert found.level == "note"
    assert "region" in found.fix
